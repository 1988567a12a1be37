"""Logits and greedy tokens against transformers on tiny random models of every family."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from allspark_workers.engine.engine import Engine
from engine_helpers import VARIANTS, TinyModels, random_prompt, request, run_all

LENGTHS = (1, 2, 31, 32, 33, 127, 500)
Maker = Callable[..., Engine]


def record_logits(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """Keep a copy of the logits that each request's latest token was drawn from."""
    seen: dict[str, torch.Tensor] = {}
    sampler = engine._runner._sampler
    original = sampler.sample

    def sample(ops: Any, logits: torch.Tensor, sequences: list[Any], *more: Any) -> list[int]:
        seen.update(zip((s.request_id for s in sequences), logits.clone(), strict=True))
        return original(ops, logits, sequences, *more)

    monkeypatch.setattr(sampler, "sample", sample)
    return seen


@torch.inference_mode()
def reference_logits(model: Any, prompt: list[int]) -> torch.Tensor:
    return model(torch.tensor([prompt])).logits[0, -1]


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_logits_equal_transformers_for_every_length_and_chunking(
    variant: str, tiny: TinyModels, make_engine: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = {f"p{n}": random_prompt(n) for n in LENGTHS}
    expected = {name: reference_logits(tiny.reference(variant), ids) for name, ids in prompts.items()}
    for chunk, span_size in ((512, 32), (50, 16), (7, 64), (1000, 128)):
        engine = make_engine(variant, prefill_chunk=chunk, span_size=span_size)
        logits = record_logits(engine, monkeypatch)
        run_all(engine, [request(name, ids, 1) for name, ids in prompts.items()])
        for name, want in expected.items():
            difference = (logits[name] - want).abs().max().item()
            assert difference <= 1e-4, f"{variant} {name} chunk {chunk}: {difference}"


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_greedy_tokens_equal_transformers(variant: str, tiny: TinyModels, make_engine: Maker) -> None:
    prompts = {f"p{n}": random_prompt(n, seed=5) for n in (1, 7, 33, 100)}
    got = run_all(make_engine(variant), [request(name, ids, 64) for name, ids in prompts.items()])
    for name, ids in prompts.items():
        tokens = torch.tensor([ids])
        want = tiny.reference(variant).generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=64, do_sample=False, pad_token_id=0
        )
        assert got.tokens[name] == want[0, len(ids) :].tolist(), f"{variant} {name}"
        assert got.finish(name) == "length"


def test_the_torch_kernels_give_the_same_tokens(
    tiny: TinyModels, make_engine: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [request(f"p{n}", random_prompt(n), 24) for n in (3, 40)]
    native = run_all(make_engine("qwen3"), prompts)
    from allspark_kernels import use_backend

    with use_backend("torch"):
        assert run_all(make_engine("qwen3"), prompts).tokens == native.tokens


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_precision_weights_stay_close(
    dtype: str, tiny: TinyModels, make_engine: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights and KV are rounded, sums are not: the error is that of the rounding alone."""
    engine = make_engine("llama-biases", dtype=dtype)
    assert engine.facts.dtype == dtype
    logits = record_logits(engine, monkeypatch)
    prompt = random_prompt(90)
    run_all(engine, [request("p", prompt, 1)])
    want = reference_logits(tiny.reference("llama-biases"), prompt)
    error = ((logits["p"] - want).norm() / want.norm()).item()
    assert error < (0.03 if dtype == "bf16" else 0.004), error
