"""Requests with adapters: logits equal peft's merged models, and neighbours change no bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from allspark_workers.engine.engine import Engine
from allspark_workers.engine.types import Task
from engine_helpers import TinyModels, random_prompt, request
from lora_helpers import ADAPTERS, merged, run_until_idle, write_adapter

Maker = Callable[..., Engine]
# Families whose checkpoints hold fused matrices, or q and k in another order of rows.
FUSED = {
    "phi3": ["qkv_proj", "gate_up_proj", "o_proj"],
    "glm": ["q_proj", "k_proj", "v_proj", "down_proj"],
    "glm4": "all-linear",
    "gemma2": "all-linear",
    "qwen2-moe": "all-linear",
    "qwen3-moe": ["q_proj", "o_proj"],
}
PROMPTS = {n: random_prompt(n, seed=9) for n in (1, 33, 70)}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, tiny: TinyModels) -> Path:
    """Every adapter for two models."""
    where = tmp_path_factory.mktemp("adapters")
    for variant in ("llama-tied", "qwen2"):
        for name in ADAPTERS:
            write_adapter(tiny, variant, name, where / variant)
    for variant, modules in FUSED.items():
        write_adapter(tiny, variant, "stable", where / variant, target_modules=modules)
    return where


def record_logits(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[torch.Tensor]]:
    """A copy of the logits that each token of each request was drawn from."""
    seen: dict[str, list[torch.Tensor]] = {}
    sampler = engine._runner._sampler
    original = sampler.sample

    def sample(ops: Any, logits: torch.Tensor, sequences: list[Any], *masks: Any) -> list[int]:
        for sequence, row in zip(sequences, logits, strict=True):
            seen.setdefault(sequence.request_id, []).append(row.clone())
        return original(ops, logits, sequences, *masks)

    monkeypatch.setattr(sampler, "sample", sample)
    return seen


@torch.inference_mode()
def reference_logits(model: Any, tokens: list[int]) -> torch.Tensor:
    return model(torch.tensor([tokens])).logits[0]


@pytest.mark.parametrize("variant", ["llama-tied", "qwen2"])
def test_a_mixed_batch_equals_peft_merged_models(
    variant: str, root: Path, tiny: TinyModels, make_engine: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Base and five adapters of different rank and reach at once, prompts in chunks, then decoding."""
    engine = make_engine(variant, lora_roots=(str(root / variant),), prefill_chunk=48)
    logits = record_logits(engine, monkeypatch)
    models = {"": tiny.reference(variant)}
    models |= {name: merged(tiny, variant, root / variant / name) for name in ADAPTERS}
    requests = [
        request(f"{name}/{n}", prompt, 6, lora_name=name) for name in models for n, prompt in PROMPTS.items()
    ]
    done = run_until_idle(engine, requests)
    for name, model in models.items():
        for n, prompt in PROMPTS.items():
            key = f"{name}/{n}"
            assert done.finish(key) == "length", done.ends[key]
            want = reference_logits(model, prompt + done.tokens[key])[n - 1 : -1]
            difference = (torch.stack(logits[key]) - want).abs().max().item()
            assert difference <= 1e-4, f"{key}: {difference}"
    base = done.tokens["/70"]
    assert all(done.tokens[f"{name}/70"] != base for name in ADAPTERS), "an adapter changes nothing"


@pytest.mark.parametrize("variant", list(FUSED))
def test_fused_and_reordered_matrices(
    variant: str, root: Path, tiny: TinyModels, make_engine: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(variant, lora_roots=(str(root / variant),))
    logits = record_logits(engine, monkeypatch)
    run_until_idle(engine, [request("r", PROMPTS[70], 1, lora_name="stable")])
    want = reference_logits(merged(tiny, variant, root / variant / "stable"), PROMPTS[70])[-1]
    difference = (logits["r"][0] - want).abs().max().item()
    assert difference <= 1e-4, difference


def test_neighbours_change_no_bit(root: Path, make_engine: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone without any adapter, alone with its own, or among all: the same logits, bit for bit."""
    folder = str(root / "qwen2")
    prompt = PROMPTS[33]
    alone: dict[str, list[torch.Tensor]] = {}
    plain = make_engine("qwen2", lora_max_num=0)
    with monkeypatch.context() as patch:
        seen = record_logits(plain, patch)
        run_until_idle(plain, [request("", prompt, 8)])
        alone |= seen
    for name in ("stable", "patterns", "regex"):
        engine = make_engine("qwen2", lora_roots=(folder,))
        with monkeypatch.context() as patch:
            seen = record_logits(engine, patch)
            run_until_idle(engine, [request(name, prompt, 8, lora_name=name)])
            alone |= seen
    engine = make_engine("qwen2", lora_roots=(folder,), prefill_chunk=20)
    together = record_logits(engine, monkeypatch)
    noise = [request(f"n{n}", random_prompt(n, seed=n), 12, lora_name="plain") for n in (3, 60)]
    noise += [request(f"b{n}", random_prompt(n, seed=n), 12) for n in (5, 40)]
    run_until_idle(engine, noise + [request(name, prompt, 8, lora_name=name) for name in alone])
    for name, rows in alone.items():
        assert len(rows) == len(together[name]) == 8
        assert all(torch.equal(a, b) for a, b in zip(rows, together[name], strict=True)), name


def test_a_resumed_request_goes_on_with_its_adapter(root: Path, make_engine: Maker) -> None:
    """On a worker that has never seen the adapter: it is loaded first."""
    folder = str(root / "qwen2")
    whole = run_until_idle(
        make_engine("qwen2", lora_roots=(folder,)), [request("r", PROMPTS[33], 12, lora_name="stable")]
    ).tokens["r"]
    other = make_engine("qwen2", lora_roots=(folder,))
    rest = run_until_idle(
        other, [request("r", PROMPTS[33], 12, epoch=2, lora_name="stable", generated=whole[:5])]
    )
    assert rest.tokens["r"] == whole[5:]


def test_a_preempted_request_keeps_its_adapter(root: Path, make_engine: Maker) -> None:
    """Too few spans for both: the later one is computed again, and nothing of it changes."""
    folder = str(root / "qwen2")
    requests = [
        request(f"r{i}", random_prompt(60, seed=i), 30, lora_name=name)
        for i, name in enumerate(("stable", "plain"))
    ]
    roomy = run_until_idle(make_engine("qwen2", lora_roots=(folder,)), requests)
    tight = make_engine(
        "qwen2",
        lora_roots=(folder,),
        lora_names=("plain", "stable"),
        span_size=16,
        kv_bytes=10 * 16 * 768,
    )
    got = run_until_idle(tight, requests)
    assert tight._scheduler.num_preemptions > 0
    assert got.tokens == roomy.tokens
    assert tight._adapters.num_leases("plain") == tight._adapters.num_leases("stable") == 0


def test_the_profiler_names_the_adapters_part(root: Path, make_engine: Maker) -> None:
    engine = make_engine("qwen2", lora_roots=(str(root / "qwen2"),))
    engine.profile_enabled = True
    run_until_idle(engine, [request("r", PROMPTS[1], 3, lora_name="plain")])
    assert "LoraAdd" in engine.profile()


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_precision_stays_close(
    dtype: str, root: Path, tiny: TinyModels, make_engine: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine("qwen2", dtype=dtype, lora_roots=(str(root / "qwen2"),))
    logits = record_logits(engine, monkeypatch)
    run_until_idle(engine, [request("r", PROMPTS[70], 1, lora_name="stable")])
    want = reference_logits(merged(tiny, "qwen2", root / "qwen2" / "stable"), PROMPTS[70])[-1]
    error = ((logits["r"][0] - want).norm() / want.norm()).item()
    assert error < (0.03 if dtype == "bf16" else 0.004), error


def test_the_prefix_cache_tells_adapters_apart(root: Path, make_engine: Maker) -> None:
    folder = {"lora_roots": (str(root / "llama-tied"),)}
    plain = make_engine(**folder)
    engine = make_engine(**folder, span_size=16, enable_prefix_cache=True, prefix_cache_ttl_s=60.0)

    def served(by: Engine, name: str) -> list[int]:
        item = request("a", PROMPTS[70], 8)
        item.lora_name = name
        return list(run_until_idle(by, [item]).tokens["a"])

    names = ("", "plain", "stable")
    expected = {name: served(plain, name) for name in names}
    assert len({tuple(tokens) for tokens in expected.values()}) == 3
    for name in (*names, *names):
        assert served(engine, name) == expected[name]
    assert engine.stat().prefix_cache_hit_token == 3 * 64


def test_every_sequence_of_a_request_has_its_adapter(
    root: Path, tiny: TinyModels, make_engine: Maker
) -> None:
    """Beams, samples and a hidden-state request with adapters in one batch, against peft and each alone."""
    prompt = PROMPTS[33]
    model = merged(tiny, "qwen2", root / "qwen2" / "stable")
    infer = request("infer", prompt, 1, lora_name="stable")
    infer.task = Task.INFER
    drawn = {"do_sample": True, "seed": 3, "num_return_sequences": 3}
    engine = make_engine("qwen2", lora_roots=(str(root / "qwen2"),), lora_max_num=2, prefill_chunk=16)
    got = run_until_idle(
        engine,
        [
            request("base", prompt, 9),
            request("beams", prompt, 9, lora_name="stable", num_beams=4),
            request("samples", prompt, 9, lora_name="plain", **drawn),
            infer,
        ],
    )
    tokens = torch.tensor([prompt])
    with torch.inference_mode():
        beams = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=9,
            num_beams=4,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        states = model(tokens, output_hidden_states=True).hidden_states[-1]
    assert got.tokens["beams"] == beams[0, len(prompt) :].tolist()
    difference = np.abs(got.ends["infer"].tensors["last_hidden_state"] - states.numpy()).max()
    assert difference <= 2e-4, difference
    alone = make_engine("qwen2", lora_roots=(str(root / "qwen2"),))
    again = run_until_idle(alone, [request("samples", prompt, 9, lora_name="plain", **drawn)])
    assert again.tokens["samples"] == got.tokens["samples"]
    for key, value in again.ends["samples"].tensors.items():
        assert np.array_equal(value, got.ends["samples"].tensors[key]), key
    assert engine._adapters.num_leases("stable") == engine._adapters.num_leases("plain") == 0
