"""What quantised KV changes in the greedy tokens of a real model, SmolLM2-135M."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
import torch
from allspark import demo_model
from allspark_kernels import plan_attention
from allspark_workers.engine.engine import Engine
from allspark_workers.engine.kv import allocate_kv, plan_kv
from allspark_workers.engine.types import ModelConfig
from allspark_workers.models.decoder import StepTensors
from allspark_workers.models.loader import Model, load_model
from allspark_workers.models.ops import DIRECT
from allspark_workers.text import load_tokenizer
from engine_helpers import request, run_all

TEXTS = (
    "The capital of France is", "Once upon a time there was", "Water boils at", "def fibonacci(n):",
    "The three primary colours are", "To be or not to be,", "The speed of light is", "In 1969, humans",
)  # fmt: skip
NEW = 40


Texts = list[tuple[list[int], list[int]]]


@pytest.fixture(scope="module")
def model() -> Model:
    return load_model(config(0))


def config(mode: int) -> ModelConfig:
    sizes = {"max_length": 128, "max_batch": len(TEXTS), "kv_bytes": 96 << 20}
    return ModelConfig(str(demo_model.fetch()), dtype="fp32", cache_mode=mode, **sizes)


@pytest.fixture(scope="module")
def texts(model: Model) -> Texts:
    """Prompts and their greedy answers with an unquantised cache."""
    encode = load_tokenizer(demo_model.fetch()).encode
    prompts = [encode(text) for text in TEXTS]
    engine = Engine(model, config(0))
    engine.start()
    tokens = run_all(engine, [request(f"{i}", p, NEW) for i, p in enumerate(prompts)]).tokens
    engine.stop()
    return [(p, tokens[f"{i}"]) for i, p in enumerate(prompts)]


@torch.inference_mode()
def logits_of(model: Model, mode: int, texts: Texts) -> torch.Tensor:
    """Logits [texts, NEW, V] that each token of the answers is drawn from, all in one step."""
    arch = model.arch
    layout = plan_kv(model, config(mode))
    cache = allocate_kv(model, layout)
    rows = [prompt + answer[:-1] for prompt, answer in texts]
    lens = [len(row) for row in rows]
    width = -(-max(lens) // layout.span_size)
    table = np.arange(len(rows) * width, dtype=np.int32).reshape(len(rows), width)
    plan = plan_attention(
        lens, lens, table, layout.span_size, "cpu", arch.num_heads, arch.num_kv_heads, arch.head_dim
    )
    positions = torch.cat([torch.arange(n) for n in lens])
    first = torch.from_numpy(np.repeat(table[:, 0].astype(np.int64) * layout.span_size, lens))
    step = StepTensors(
        torch.tensor(list(chain.from_iterable(rows))), positions, first + positions, plan, None
    )
    logits = model.decoder.forward(DIRECT, step, cache)
    return torch.stack([part[-NEW:] for part in logits.split(lens)])


@pytest.fixture(scope="module")
def exact(model: Model, texts: Texts) -> torch.Tensor:
    return logits_of(model, 0, texts)


# The share of tokens that stay the likeliest, the mean relative error of the logits, and how far below the
# likeliest one a token may lie that takes its place. int8 changes next to nothing but near ties. uint4 has 15
# steps for a row, and the keys of so small a model have outliers: most tokens remain, a free-running text
# soon goes its own way. Measured over 12 such texts: 99.3 %, 0.021, 0.30 and 83.7 %, 0.39, 4.4.
LIMITS = {1: (0.98, 0.03, 0.5), 2: (0.75, 0.5, 6.0)}


@pytest.mark.parametrize("mode", LIMITS)
def test_greedy_tokens_are_nearly_the_same(
    model: Model, texts: Texts, exact: torch.Tensor, mode: int
) -> None:
    """Each token given the unquantised text before it, so that one change does not count again and again."""
    answers = torch.tensor([answer for _, answer in texts])
    logits = logits_of(model, mode, texts)
    assert torch.equal(exact.argmax(-1), answers), "one step over the text gives what the engine generated"
    likeliest = logits.argmax(-1)
    share = (likeliest == answers).double().mean().item()
    spread = exact - exact.mean(-1, keepdim=True)
    error = ((logits - exact).norm(dim=-1) / spread.norm(dim=-1)).mean().item()
    gap = (exact.amax(-1) - exact.gather(-1, likeliest.unsqueeze(-1)).squeeze(-1)).max().item()
    print(f"cache_mode {mode}: {share:.1%} of {answers.numel()} tokens, logits {error:.3f}, gap {gap:.2f}")
    min_share, max_error, max_gap = LIMITS[mode]
    assert share >= min_share and error <= max_error and gap <= max_gap
