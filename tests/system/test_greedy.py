"""Greedy tokens through the whole fleet equal those of transformers on the same weights in fp32.

The reference is teacher-forced: it reads prompt and answer at once, and every token of the answer has to be
the argmax of its logits at the position before. By induction that is what its own greedy loop would produce.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from allspark.client import CACHE_MODES, Client, GenerateOptions, ModelOptions
from allspark.launcher import Fleet, FleetOptions
from allspark.text import load_tokenizer
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from tests.engine.engine_helpers import TinyModels, random_prompt
from tests.system.conftest import report

NEW = 64
FAMILIES = ("llama-llama3", "mistral", "qwen2", "qwen3")
EXACT = ModelOptions(matmul_precision="highest", max_length=256, max_batch=32)
TEXTS = (
    "The capital of France is", "Once upon a time there was", "Water boils at", "def fibonacci(n):",
    "The three primary colours are", "To be or not to be,", "The speed of light is", "In 1969, humans",
    "A recipe for bread needs", "The opposite of hot is", "My favourite animal is the", "E = mc^2 means that",
    "Dear Sir or Madam,", "The largest planet of the solar system", "import numpy as np\n", "Roses are red,",
    "Q: What is 2 + 2?\nA:", "The Great Wall of China", "Photosynthesis is the process", "Breaking news:",
)  # fmt: skip


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    return TinyModels(tmp_path_factory.mktemp("families"))


@pytest.fixture(scope="module")
def fleet(tiny: TinyModels, smollm2: Path) -> Iterator[Fleet]:
    roots = (smollm2.parent, *(tiny.path(f) for f in FAMILIES))
    with Fleet(FleetOptions(start_timeout_s=300.0, workers=1, model_roots=roots), report) as fleet:
        for family in FAMILIES:
            fleet.load_model(family, tiny.path(family), EXACT)
        fleet.load_model("qwen3-int8", tiny.path("qwen3"), replace(EXACT, cache_mode=CACHE_MODES["int8"]))
        fleet.load_model("smollm2", smollm2, EXACT)
        yield fleet


def generate(fleet: Fleet, model: str, prompts: list[list[int]]) -> list[list[int]]:
    """All prompts at once."""
    with Client(fleet.addresses) as client:
        requests = [client.submit(model, p, GenerateOptions(max_new_tokens=NEW)) for p in prompts]
        results = [r.result() for r in requests]
        for r in requests:
            r.release()
    return results


@torch.inference_mode()
def logits_before(reference: Any, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """Logits [NEW, V] that the reference draws each token of the answer from."""
    assert len(answer) == NEW
    logits: torch.Tensor = reference(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    return logits


def assert_greedy(reference: Any, prompt: list[int], answer: list[int]) -> None:
    logits = logits_before(reference, prompt, answer)
    expected = logits.argmax(-1).tolist()
    wrong = [i for i, (a, b) in enumerate(zip(answer, expected, strict=True)) if a != b]
    if wrong:
        top = logits[wrong[0]].topk(2)
        pytest.fail(f"token {wrong[0]} is {answer[wrong[0]]}; the reference's best two: {top}")


@pytest.mark.parametrize("family", FAMILIES)
def test_tiny_models_of_every_family(fleet: Fleet, tiny: TinyModels, family: str) -> None:
    prompts = [random_prompt(n, seed=n) for n in (1, 2, 31, 32, 33, 127)]
    for prompt, answer in zip(prompts, generate(fleet, family, prompts), strict=True):
        assert_greedy(tiny.reference(family), prompt, answer)


def test_int8_cache_of_a_model_built_with_it(fleet: Fleet, tiny: TinyModels) -> None:
    """Six prompts of one model with int8 KV: frames of its size, and tokens that are the reference's best or
    within a hundredth of the logits' range of it."""
    prompts = [random_prompt(n, seed=n) for n in (1, 2, 31, 32, 33, 127)]
    with Client(fleet.addresses) as client:
        assert client.stat("qwen3-int8").span_size == 32 * 3 * (32 + 8)
        assert client.stat("qwen3").span_size == 32 * 3 * 32 * 4
    equal = total = 0
    for prompt, answer in zip(prompts, generate(fleet, "qwen3-int8", prompts), strict=True):
        logits = logits_before(tiny.reference("qwen3"), prompt, answer)
        chosen = logits.gather(1, torch.tensor(answer)[:, None]).squeeze(1)
        gap = (logits.amax(1) - chosen).max()
        print(f"gap {gap:.4f} of {logits.amax() - logits.amin():.2f}")
        assert gap <= 0.01 * (logits.amax() - logits.amin())
        equal += int((logits.argmax(1) == torch.tensor(answer)).sum())
        total += NEW
    print(f"{equal} of {total} tokens are the reference's best")
    assert equal >= 0.95 * total


@pytest.fixture(scope="module")
def reference(smollm2: Path) -> Any:
    """transformers' own reading of the GGUF file; its loader would ask for the `accelerate` package."""
    config = transformers.LlamaConfig(**load_gguf_checkpoint(str(smollm2))["config"])
    model = transformers.LlamaForCausalLM(config).eval()
    loaded = load_gguf_checkpoint(str(smollm2), return_tensors=True, model_to_load=model)
    missing, unexpected = model.load_state_dict(loaded["tensors"], strict=False)
    assert missing == ["lm_head.weight"] and not unexpected
    model.tie_weights()
    return model


def test_smollm2(fleet: Fleet, smollm2: Path, reference: Any) -> None:
    encode = load_tokenizer(smollm2).encode
    prompts = [encode(text) for text in TEXTS]
    for prompt, answer in zip(prompts, generate(fleet, "smollm2", prompts), strict=True):
        assert_greedy(reference, prompt, answer)
