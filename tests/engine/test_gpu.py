"""The engine on a GPU: the same tokens captured and not, alone and in a crowd; several engines; memory."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from allspark_kernels import GraphPool
from allspark_workers.engine.device import Staging
from allspark_workers.engine.engine import Engine
from allspark_workers.engine.host_store import SpanStore
from allspark_workers.engine.types import EngineRequest, Task
from allspark_workers.models.decoder import KVCache
from engine_helpers import VARIANTS, random_prompt, request, run_all

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

Maker = Callable[..., Engine]
GPU = "cuda:0"


def requests() -> list[EngineRequest]:
    """Batches of every size from 1 to 11, greedy and sampled, over several spans."""
    return [
        request(f"r{i}", random_prompt(1 + 9 * i, seed=i), 5 + 7 * i, do_sample=i % 2 > 0, seed=i)
        for i in range(11)
    ]


@pytest.mark.parametrize("cache_mode", [0, 1, 2])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32", "int8", "int4"])
@pytest.mark.parametrize("variant", ["qwen3", "qwen3-moe"])
def test_the_same_tokens_captured_alone_and_in_a_crowd(
    variant: str, dtype: str, cache_mode: int, make_engine: Maker
) -> None:
    engine = make_engine(variant, device=GPU, dtype=dtype, max_batch=11, cache_mode=cache_mode)
    crowd = run_all(engine, requests())
    alone = {}
    for item in requests():
        alone |= run_all(engine, [item]).tokens
    assert crowd.tokens == alone
    engine._runner._graphs = None
    assert run_all(engine, requests()).tokens == alone, "eager"


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_every_family_computes_what_the_cpu_computes(variant: str, make_engine: Maker) -> None:
    prompt = random_prompt(150, seed=4)
    found = []
    for device in ("cpu", GPU):
        engine = make_engine(variant, device=device, max_batch=2, prefill_chunk=64)
        item = request("i", prompt, 1)
        item.task = Task.INFER
        found.append(run_all(engine, [item]).ends["i"].tensors)
    for name, expected in found[0].items():
        assert np.abs(found[1][name] - expected).max() < 2e-3 * max(1.0, np.abs(expected).max()), name


def forget_compiled_kernels() -> None:
    from triton import JITFunction

    modules = [
        module for name, module in sys.modules.items() if name.startswith("allspark_kernels.triton_ops")
    ]
    for kernel in (value for module in modules for value in vars(module).values()):
        if isinstance(kernel, JITFunction):
            kernel.device_caches.clear()


def test_serving_compiles_no_kernel(make_engine: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import knobs

    compiled: list[str] = []

    def note(*_: Any, fn: Any = None, **__: Any) -> None:
        compiled.append(getattr(fn, "name", str(fn)))

    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", note)
    forget_compiled_kernels()
    engine = make_engine("qwen3", device=GPU, dtype="bf16", max_batch=4)
    assert len(set(compiled)) > 10
    compiled.clear()
    run_all(
        engine,
        [
            request("long", random_prompt(300, seed=2), 9, do_sample=True, top_k=3, top_p=0.5, seed=4),
            request("penalised", random_prompt(17, seed=3), 5, repetition_penalty=1.2),
            request("banned", random_prompt(20, seed=5), 6, bad_words=((7,), (9,)), min_length=23),
        ],
    )
    assert compiled == []


def test_a_capture_leaves_other_threads_alone(make_engine: Maker) -> None:
    """While one engine captures its steps, another one of the process serves, allocates and copies."""
    busy = make_engine("qwen3", device=GPU, dtype="bf16", max_batch=4)
    expected = run_all(busy, requests()).tokens
    errors: list[BaseException] = []
    stop = threading.Event()

    def serve() -> None:
        try:
            while not stop.is_set():
                assert run_all(busy, requests()).tokens == expected
                pinned = torch.zeros(3 << 20, pin_memory=True)
                pinned.to(GPU, non_blocking=True).add_(1).cpu()
        except BaseException as error:  # noqa: BLE001 - told to the thread that asserts
            errors.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        for _ in range(3):
            started = make_engine("llama-tied", device=GPU, dtype="bf16", max_batch=64)
            run_all(started, requests())
            started.stop()
            started.start()
    finally:
        stop.set()
        thread.join()
    assert errors == []


def test_captured_steps_share_memory() -> None:
    torch.cuda.empty_cache()
    size, pool, kept = 32 << 20, GraphPool(GPU), []

    def step() -> None:
        big = torch.zeros(size, dtype=torch.uint8, device=GPU)
        kept.append(big[:1] + 1)

    before = torch.cuda.memory_reserved(GPU)
    replays = [pool.capture(step) for _ in range(6)]
    assert torch.cuda.memory_reserved(GPU) - before < 4 * size
    for replay in replays:
        replay()
    torch.cuda.synchronize(GPU)


def test_the_host_does_not_overwrite_what_is_still_being_copied() -> None:
    staging, total = Staging((1 << 20,), torch.device(GPU)), 0
    sums = torch.zeros((), dtype=torch.int64, device=GPU)
    for index in range(50):
        torch.cuda._sleep(2_000_000)  # the copy waits behind this
        staging.wait()
        staging.host[:] = index
        staging.upload()
        sums += staging.tensor.sum()
        total += index << 20
    assert sums.item() == total


def test_weights_leave_the_device_and_come_back(make_engine: Maker) -> None:
    engine = make_engine("qwen3", device=GPU, dtype="bf16", max_batch=4)
    expected = run_all(engine, requests()).tokens
    engine.stop()
    before = torch.cuda.memory_allocated(GPU)
    engine.unload(0)
    assert torch.cuda.memory_allocated(GPU) < before
    engine.reload()
    engine.start()
    assert run_all(engine, requests()).tokens == expected


def test_a_stopped_engine_leaves_its_kv_memory_to_others(make_engine: Maker) -> None:
    engine = make_engine("qwen3", device=GPU, dtype="bf16", max_batch=4, kv_bytes=512 << 20, max_length=640)
    run_all(engine, requests())
    kv_bytes = engine._residence._kv_bytes
    before, _ = torch.cuda.mem_get_info(GPU)
    engine.stop()
    after, _ = torch.cuda.mem_get_info(GPU)
    assert after - before >= kv_bytes


def test_spans_go_to_the_host_and_come_back_bit_for_bit() -> None:
    frames = [torch.randn((5, 2, 16, 32), device=GPU) for _ in range(4)]
    cache = KVCache(tuple(frames[:2]), tuple(frames[2:]))
    copies = [frame.clone() for frame in frames]
    store = SpanStore(cache, 3)
    for slot, span in enumerate((4, 0, 2)):
        store.save(span, slot)
    for frame in frames:
        frame.fill_(float("nan"))
    for slot, span in enumerate((4, 0, 2)):
        store.load(slot, span)
    for frame, copy in zip(frames, copies, strict=True):
        assert torch.equal(frame[[4, 0, 2]], copy[[4, 0, 2]])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_an_engine_may_run_on_a_device_that_is_not_the_current_one(make_engine: Maker) -> None:
    assert torch.cuda.current_device() == 0
    tokens = [
        run_all(make_engine("qwen3", device=f"cuda:{i}", dtype="bf16", max_batch=4), requests()).tokens
        for i in range(2)
    ]
    assert tokens[0] == tokens[1]
