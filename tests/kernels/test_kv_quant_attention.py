"""Attention over quantised KV: against float64, with an error bound, and independent of chunks and batch."""

import allspark_kernels as kernels
import numpy as np
import pytest
import torch
from allspark_kernels import CacheMode
from kernel_helpers import BF16, F16, F32, Place, assert_close, randn
from quantised_helpers import MODES, QuantisedStep, empty_cache, make_quantised_step

HEADS = ((2, 2, 16), (9, 3, 64), (4, 1, 80), (6, 2, 48), (8, 1, 128))
Q_LENS = [1, 31, 1, 33, 20, 1]
KV_LENS = [1, 31, 33, 33, 127, 300]


def run(
    step: QuantisedStep,
    rows: slice = slice(None),
    lens: tuple[list[int], list[int]] | None = None,
    table: np.ndarray | None = None,
    decode_lens: list[int] | None = None,
) -> torch.Tensor:
    exact = step.exact
    q_lens, kv_lens = lens or (exact.q_lens, exact.kv_lens)
    num_q_heads, dim = exact.q.shape[1:]
    heads = (num_q_heads, step.k_cache.shape[1], dim)
    spans = exact.table if table is None else table
    plan = kernels.plan_attention(
        q_lens, kv_lens, spans, exact.span_size, exact.q.device, *heads, decode_lens
    )
    return kernels.paged_attention(
        exact.q[rows],
        step.k_cache,
        step.v_cache,
        plan,
        exact.scale,
        window=exact.window,
        soft_cap=exact.soft_cap,
    )


@pytest.mark.parametrize("mode", MODES, ids=lambda m: m.name)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_ragged_step(
    cache_place: Place, poisoned: None, mode: CacheMode, heads: tuple[int, int, int]
) -> None:
    """The result is that of float64 attention over the numbers that the codes stand for."""
    if cache_place.name == "interpreter" and HEADS.index(heads) % 2 != MODES.index(mode):
        pytest.skip("the interpreter is slow: it runs every head shape in one mode")
    dtype = F32 if cache_place.name in ("torch", "native") else (BF16, F16, F32)[HEADS.index(heads) % 3]
    step = make_quantised_step(mode, Q_LENS, KV_LENS, heads, 32, dtype, cache_place.device, heads[2])
    inner = 8.0 if dtype == F32 else 1.0
    assert_close(run(step), step.read.expected(), dtype, inner=dtype, size=inner)


@pytest.mark.parametrize("mode", MODES, ids=lambda m: m.name)
@pytest.mark.parametrize("span_size", (16, 64, 128))
def test_span_sizes(cache_place: Place, poisoned: None, mode: CacheMode, span_size: int) -> None:
    if cache_place.name == "interpreter" and span_size != (16, 128)[MODES.index(mode)]:
        pytest.skip("the interpreter is slow: it runs every mode with one span size")
    step = make_quantised_step(
        mode, [1, 20, 1], [17, 130, 257], (4, 2, 32), span_size, F32, cache_place.device, span_size
    )
    assert_close(run(step), step.read.expected(), F32, size=8.0)


@pytest.mark.parametrize("mode", MODES, ids=lambda m: m.name)
def test_window_and_soft_cap(cache_place: Place, poisoned: None, mode: CacheMode) -> None:
    step = make_quantised_step(mode, [1, 20, 1], [70, 90, 130], (4, 2, 32), 16, F32, cache_place.device, 3)
    for dense in (step.exact, step.read):
        dense.window, dense.soft_cap = 37, 2.0
    assert_close(run(step), step.read.expected(), F32, size=8.0)


@pytest.mark.parametrize("mode", MODES, ids=lambda m: m.name)
def test_error_of_quantisation_is_bounded(mode: CacheMode) -> None:
    """Half a step of V, plus what half a step of K can change in the weights.

    A score moves by at most e = scale |q|_1 s_k / 2, so every softmax weight by a factor of at most
    exp(2 e), and the output by at most s_v / 2 + (exp(2 e) - 1) sum w |v|.
    """
    heads = (6, 2, 64)
    step = make_quantised_step(mode, [40, 1, 1], [40, 200, 400], heads, seed=11)
    with kernels.use_backend("torch"):
        actual = run(step).double()
    exact = step.exact.expected()
    error = (actual - exact).abs()
    steps = {CacheMode.INT8: 255, CacheMode.UINT4: 15}[mode]

    def largest_step(cache: torch.Tensor) -> float:
        rows = cache.double()[~cache.isnan().any(-1)]
        return float(((rows.amax(-1).clamp(min=0) - rows.amin(-1).clamp(max=0)) / steps).max())

    step.exact.v_cache = step.exact.v_cache.abs()
    size = step.exact.expected()
    score = step.exact.scale * step.exact.q.double().abs().sum(-1, keepdim=True)
    shift = score * largest_step(step.exact.k_cache) / 2
    bound = largest_step(step.exact.v_cache) / 2 + torch.expm1(2 * shift) * size
    assert (error <= bound + 1e-6).all()
    # What random inputs lose in fact: the root mean square is far below the worst case.
    relative = float(error.square().mean().sqrt() / exact.square().mean().sqrt())
    print(f"{mode.name}: relative error {relative:.4f}")
    assert relative < {CacheMode.INT8: 0.01, CacheMode.UINT4: 0.15}[mode]


@pytest.mark.parametrize("mode", MODES, ids=lambda m: m.name)
def test_rows_do_not_depend_on_chunks(cache_place: Place, mode: CacheMode) -> None:
    """A request is prefilled at once or in chunks, its generated tokens decoded or recomputed: same bits."""
    if cache_place.name == "torch":
        pytest.skip("the oracle leaves the order of sums to its library")
    length, generated = 80, 3
    dtype = F32 if cache_place.name == "native" else BF16
    step = make_quantised_step(mode, [length], [length], (3, 1, 16), 32, dtype, cache_place.device, 8)
    prompt = length - generated

    def chunked(cuts: list[int]) -> torch.Tensor:
        starts = [0, *cuts[:-1]]
        return torch.cat(
            [
                run(step, slice(a, b), ([b - a], [b]), decode_lens=[max(0, b - max(a, prompt))])
                for a, b in zip(starts, cuts, strict=True)
            ]
        )

    whole = chunked([length])
    for cuts in ([64, *range(prompt, length + 1)], [1, 33, 70, length - 2, length]):
        assert torch.equal(chunked(cuts), whole), f"chunks {cuts} differ"


@pytest.mark.parametrize("mode", MODES, ids=lambda m: m.name)
def test_rows_do_not_depend_on_neighbours(cache_place: Place, mode: CacheMode) -> None:
    if cache_place.name == "torch":
        pytest.skip("the oracle leaves the order of sums to its library")
    lens = [1, 1, 30, 1, 11], [300, 5, 30, 77, 64]
    dtype = F32 if cache_place.name == "native" else BF16
    step = make_quantised_step(mode, *lens, (4, 2, 16), 32, dtype, cache_place.device, 9)
    whole, start = run(step), 0
    for b, q_len in enumerate(lens[0]):
        rows = slice(start, start + q_len)
        alone = run(step, rows, ([q_len], [lens[1][b]]), step.exact.table[b : b + 1])
        assert torch.equal(alone, whole[rows]), f"request {b} differs"
        start += q_len


@pytest.mark.parametrize("mode", MODES, ids=lambda m: m.name)
def test_written_and_read_in_chunks_of_any_size(cache_place: Place, mode: CacheMode) -> None:
    """K and V of a chunk are read back quantised by the chunk itself: the cut does not show."""
    if cache_place.name == "torch":
        pytest.skip("the oracle leaves the order of sums to its library")
    length, span_size, heads = 20, 16, (2, 1, 32)
    table = np.array([[2, 0]], np.int32)
    source = [randn(length, h, 32, seed=h + i, device=cache_place.device) for i, h in enumerate((2, 1, 1))]
    cos_sin = randn(length, 32, seed=5, device=cache_place.device)
    where = [int(table[0, p // span_size]) * span_size + p % span_size for p in range(length)]

    def prefill(cuts: list[int]) -> torch.Tensor:
        caches = [empty_cache(mode, 4, 1, span_size, 32, cache_place.device) for _ in range(2)]
        rows, start = [], 0
        for stop in cuts:
            q, k, v = (x[start:stop].clone() for x in source)
            positions = torch.arange(start, stop, device=cache_place.device)
            slots = torch.tensor(where[start:stop], device=cache_place.device)
            kernels.rotary_kv_write(q, k, v, cos_sin, positions, slots, *caches)
            lens = ([stop - start], [stop])
            plan = kernels.plan_attention(
                *lens, table, span_size, cache_place.device, *heads, decode_lens=[0]
            )
            rows.append(kernels.paged_attention(q, *caches, plan, 32**-0.5))
            start = stop
        return torch.cat(rows)

    whole = prefill([length])
    assert not whole.isnan().any()
    for cuts in ([7, 16, length], [1, 19, length]):
        assert torch.equal(prefill(cuts), whole), f"chunks {cuts} differ"


@pytest.mark.parametrize("mode", MODES, ids=lambda m: m.name)
def test_reserved_plan(cache_place: Place, poisoned: None, mode: CacheMode) -> None:
    heads = (3, 1, 16)
    plan = kernels.reserve_decode_plan(4, 300, 32, cache_place.device, *heads)
    for kv_lens in ([80, 1, 300], [33]):
        rows = len(kv_lens)
        step = make_quantised_step(mode, [1] * rows, kv_lens, heads, device=cache_place.device, seed=rows)
        plan.refill(kv_lens, step.exact.table[:, :10])
        q = torch.full((4, *step.exact.q.shape[1:]), float("nan"), device=cache_place.device)
        q[:rows] = step.exact.q
        out = kernels.paged_attention(q, step.k_cache, step.v_cache, plan, step.exact.scale)
        assert_close(out[:rows], step.read.expected(), F32)
        assert torch.equal(out[rows:], torch.zeros_like(out[rows:]))
