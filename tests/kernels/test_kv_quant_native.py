"""Quantised KV in the native library: the same bits on every instruction set and number of threads."""

from collections.abc import Iterator

import allspark_kernels as kernels
import pytest
import torch
from allspark_kernels import CacheMode, native
from kernel_helpers import randn
from quantised_helpers import MODES, empty_cache, make_quantised_step

if not native.available():
    pytest.skip(str(native.unavailable_reason), allow_module_level=True)

from allspark_kernels.native import library

HEADS = ((9, 3, 64), (14, 2, 128), (16, 1, 48), (3, 1, 272), (40, 2, 16))


@pytest.fixture(autouse=True)
def backend() -> Iterator[None]:
    before = native.get_num_threads()
    with kernels.use_backend("native"):
        yield
    native.set_num_threads(before)


@pytest.mark.parametrize("mode", MODES, ids=lambda m: m.name)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_threads_and_instruction_sets_agree(mode: CacheMode, heads: tuple[int, int, int]) -> None:
    q_heads, kv_heads, dim = heads
    step = make_quantised_step(mode, [1, 9], [600, 70], heads, 16, seed=dim)
    plan_of = (step.exact.q_lens, step.exact.kv_lens, step.exact.table, 16, "cpu", *heads)
    source = [randn(20, n, dim, seed=n + i) * 3 for i, n in enumerate((q_heads, kv_heads, kv_heads))]
    cos_sin, where = randn(20, dim, seed=1), torch.arange(20)

    def compute() -> list[torch.Tensor]:
        q, k, v = (x.clone() for x in source)
        caches = [empty_cache(mode, 2, kv_heads, 16, dim) for _ in range(2)]
        kernels.rotary_kv_write(q, k, v, cos_sin, where, where, *caches)
        plan = kernels.plan_attention(*plan_of)
        out = kernels.paged_attention(step.exact.q, step.k_cache, step.v_cache, plan, dim**-0.5)
        return [out, *(cache.view(torch.uint8) for cache in caches)]

    native.set_num_threads(1)
    expected = compute()
    error = (expected[0].double() - step.read.expected()).abs().max()
    assert float(error) < 5e-6
    for isa in library.runnable_isas():
        with library.use_isa(isa):
            for threads in (1, 2, 3):
                native.set_num_threads(threads)
                assert all(map(torch.equal, compute(), expected)), (isa, threads)


@pytest.mark.parametrize("mode", MODES, ids=lambda m: m.name)
def test_captured_step_writes_and_reads_quantised_rows(mode: CacheMode) -> None:
    """A recorded step repeats the write and the attention with what is in its tensors now."""
    heads = (6, 2, 32)
    plan = kernels.reserve_decode_plan(3, 64, 16, "cpu", *heads)
    q, k, v = torch.zeros(3, 6, 32), torch.zeros(3, 2, 32), torch.zeros(3, 2, 32)
    cos_sin, out = randn(64, 32, seed=1), torch.zeros(3, 6, 32)
    positions, slots = torch.zeros(3, dtype=torch.int64), torch.full((3,), -1)
    caches = [empty_cache(mode, 12, 2, 16, 32) for _ in range(2)]
    table = torch.arange(12, dtype=torch.int32).view(3, 4)

    def step() -> None:
        kernels.rotary_kv_write(q, k, v, cos_sin, positions, slots, *caches)
        out.copy_(kernels.paged_attention(q, *caches, plan, 0.2))

    replay = kernels.capture(step, "cpu")
    other = [cache.clone() for cache in caches]
    for position in range(20):
        rows = 3 if position < 18 else 2
        lens, spans = [position + 1] * rows, table[:rows]
        slots.fill_(-1)
        slots[:rows] = spans[:, position // 16].long() * 16 + position % 16
        positions.fill_(position)
        fresh = [randn(3, n, 32, seed=100 * position + n + i) for i, n in enumerate((6, 2, 2))]
        for tensor, value in zip((q, k, v), fresh, strict=True):
            tensor.copy_(value)
        plan.refill(lens, spans)
        replay()
        kernels.rotary_kv_write(*fresh, cos_sin, positions, slots, *other)
        again = kernels.plan_attention([1] * rows, lens, spans, 16, "cpu", *heads)
        want = kernels.paged_attention(fresh[0][:rows], *other, again, 0.2)
        assert torch.equal(out[:rows], want) and not want.isnan().any()
