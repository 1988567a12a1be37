"""Quantised KV in the engine: room for more tokens, tokens that no schedule changes, a bounded error."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from allspark_workers.engine.engine import Engine
from allspark_workers.engine.errors import UnsupportedModelError
from allspark_workers.engine.host_store import SpanStore
from allspark_workers.engine.kv import plan_kv
from allspark_workers.engine.types import ModelConfig
from engine_helpers import TinyModels, random_prompt, request, run_all

Maker = Callable[..., Engine]
MODES = (1, 2)
NEW = 40
SAMPLED = {"do_sample": True, "temperature": 0.9, "top_k": 40, "seed": 7, "repetition_penalty": 1.2}


def kv_of(mode: int, head_dim: int, dtype: torch.dtype = torch.bfloat16, budget: int = 64 << 20) -> int:
    """Tokens that a budget holds for a model of 4 layers with 8 KV heads."""
    arch = SimpleNamespace(num_layers=4, num_kv_heads=8, head_dim=head_dim)
    model = SimpleNamespace(arch=arch, dtype=dtype, device=torch.device("cpu"), max_length=1 << 20)
    return plan_kv(model, ModelConfig("m", kv_bytes=budget, cache_mode=mode)).num_tokens  # type: ignore[arg-type]


def test_about_twice_and_four_times_as_many_tokens_fit() -> None:
    """Of bfloat16; what is missing is the 8 bytes of scale and zero per token and head."""
    for head_dim, int8, uint4 in ((64, 1.77, 3.2), (128, 1.88, 3.55), (256, 1.93, 3.76)):
        plain = kv_of(0, head_dim)
        assert kv_of(1, head_dim) / plain == pytest.approx(int8, rel=0.01)
        assert kv_of(2, head_dim) / plain == pytest.approx(uint4, rel=0.01)
    assert kv_of(1, 128, torch.float32) > 3.7 * kv_of(0, 128, torch.float32)
    assert kv_of(2, 128, torch.float32) > 7 * kv_of(0, 128, torch.float32)


def test_heads_that_cannot_be_quantised_are_refused_with_a_reason() -> None:
    assert kv_of(0, 40) > 0
    for mode in MODES:
        with pytest.raises(UnsupportedModelError, match=r"multiple of 16, not 40; use cache_mode 0"):
            kv_of(mode, 40)


@pytest.mark.parametrize("mode", (3, -1))
def test_unknown_modes_are_refused(mode: int) -> None:
    with pytest.raises(ValueError, match=f"cache_mode {mode} is not one of 0, 1"):
        ModelConfig("m", cache_mode=mode)


@pytest.mark.parametrize("mode", MODES)
def test_facts_and_statistics_count_the_bytes_of_the_mode(mode: int, make_engine: Maker) -> None:
    plain, engine = make_engine(kv_bytes=1 << 20), make_engine(kv_bytes=1 << 20, cache_mode=mode)
    facts, stat = engine.facts, engine.stat()
    row = {1: 16 + 8, 2: 8 + 8}[mode]
    assert facts.cache_mode == mode and plain.facts.cache_mode == 0
    assert facts.span_bytes == stat.span_size == 32 * 2 * row
    assert stat.total_span * stat.span_size <= 1 << 20
    assert stat.free_token / plain.stat().free_token == pytest.approx(16 * 4 / row, rel=0.02)
    cache = engine._runner._cache
    held = sum(x.numel() * x.element_size() for x in (*cache.keys, *cache.values))
    assert held == stat.total_span * stat.span_size


@pytest.mark.parametrize("mode", MODES)
def test_tokens_do_not_depend_on_the_schedule(mode: int, make_engine: Maker) -> None:
    """Alone, in a crowd, in chunks, pre-empted for lack of memory, resumed in the middle: the same tokens."""
    requests = [
        request(f"r{i}", random_prompt(20 + 3 * i, seed=i), NEW, **(SAMPLED | {"seed": i})) for i in range(8)
    ]
    engine = make_engine("qwen3", span_size=16, cache_mode=mode)
    expected = run_all(engine, requests).tokens
    assert len({tuple(tokens) for tokens in expected.values()}) == 8
    for item in requests[:2]:
        assert run_all(engine, [item]).tokens[item.request_id] == expected[item.request_id], "alone"
    chunked = make_engine("qwen3", span_size=16, cache_mode=mode, prefill_chunk=7)
    assert run_all(chunked, requests).tokens == expected, "chunked"
    one_span = 2 * engine.facts.num_layers * engine.facts.span_bytes
    narrow = make_engine("qwen3", span_size=16, cache_mode=mode, kv_bytes=7 * one_span)
    assert run_all(narrow, requests).tokens == expected, "pre-empted"
    assert narrow._scheduler.num_preemptions > 1
    first = requests[0]
    done = expected["r0"][:17]
    resumed = request("r0", first.prompt.tolist(), NEW, epoch=2, generated=done, **(SAMPLED | {"seed": 0}))
    assert run_all(engine, [resumed]).tokens["r0"] == expected["r0"][17:], "resumed"


@pytest.mark.parametrize(("mode", "bound"), [(1, 0.02), (2, 0.3)])
def test_logits_stay_close_to_transformers(
    mode: int, bound: float, tiny: TinyModels, make_engine: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random weights and 16-dimensional heads are the worst case: every head's noise reaches the logits."""
    engine = make_engine("llama-biases", cache_mode=mode)
    seen: list[torch.Tensor] = []
    original = engine._runner._sampler.sample
    monkeypatch.setattr(
        engine._runner._sampler,
        "sample",
        lambda ops, logits, *rest: (seen.append(logits.clone()), original(ops, logits, *rest))[1],
    )
    prompt = random_prompt(90)
    run_all(engine, [request("p", prompt, 1)])
    with torch.inference_mode():
        want = tiny.reference("llama-biases")(torch.tensor([prompt])).logits[0, -1]
    error = ((seen[0][0] - want).norm() / want.norm()).item()
    print(f"cache_mode {mode}: relative error of the logits {error:.4f}")
    assert error < bound


@pytest.mark.parametrize("mode", MODES)
def test_the_torch_kernels_give_nearly_the_same_tokens(mode: int, make_engine: Maker) -> None:
    """A value at a tie between two codes may fall to either side: one such row may change a token."""
    prompts = [request(f"p{n}", random_prompt(n), 24) for n in (3, 17, 40)]
    native = run_all(make_engine("qwen3", cache_mode=mode), prompts).tokens
    from allspark_kernels import use_backend

    with use_backend("torch"):
        oracle = run_all(make_engine("qwen3", cache_mode=mode), prompts).tokens
    equal = [a == b for name in native for a, b in zip(native[name], oracle[name], strict=True)]
    print(f"cache_mode {mode}: {sum(equal)} of {len(equal)} tokens are equal")
    assert sum(equal) >= 0.9 * len(equal)


@pytest.mark.parametrize("mode", MODES)
def test_cached_prefixes_and_shared_prompts_are_read_as_they_were_written(
    mode: int, make_engine: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Quantised spans are kept for a later prompt, swapped to host memory, shared and copied on write."""
    prompts = [random_prompt(48) + random_prompt(5 + i, seed=i) for i in range(3)]
    requests = [request(f"r{i}", prompt, 20, **SAMPLED) for i, prompt in enumerate(prompts)]
    samples = request("s", random_prompt(37), 20, num_return_sequences=3, **SAMPLED)
    items = [*requests, samples, request("fills the pool", random_prompt(190), 20, **SAMPLED)]
    plain = make_engine("qwen3", span_size=16, cache_mode=mode)
    expected = [run_all(plain, [item]).tokens for item in items]
    one_span = 2 * plain.facts.num_layers * plain.facts.span_bytes
    cached = make_engine(
        "qwen3",
        span_size=16,
        cache_mode=mode,
        kv_bytes=14 * one_span,
        enable_prefix_cache=True,
        prefix_cache_ttl_s=60.0,
        prefix_host_bytes=40 * one_span,
    )
    restored: list[int] = []
    load = SpanStore.load

    def counted(store: SpanStore, slot: int, span: int) -> None:
        restored.append(span)
        load(store, slot, span)

    monkeypatch.setattr(SpanStore, "load", counted)
    for _ in range(2):
        assert [run_all(cached, [item]).tokens for item in items] == expected
    assert cached.stat().prefix_cache_hit_token >= 4 * 48
    assert restored, "nothing came back from host memory"
