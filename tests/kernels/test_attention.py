"""Paged attention over ragged steps, against dense float64 attention; unused slots hold NaN."""

import allspark_kernels as kernels
import numpy as np
import pytest
import torch
from kernel_helpers import BF16, DTYPES, F16, F32, Place, Step, assert_close, make_step

# Query heads, KV heads, head size: group sizes 1 to 8, 20 and 71, and head sizes 16 to 128.
HEADS = ((2, 2, 16), (3, 1, 32), (9, 3, 64), (4, 1, 80), (7, 1, 96), (8, 1, 128), (20, 1, 16), (71, 1, 16))
# Whole prompts, chunks that continue one, and decode rows, mixed in one step.
Q_LENS = [1, 31, 1, 33, 20, 1]
KV_LENS = [1, 31, 33, 33, 127, 500]


def run(step: Step, decode_lens: list[int] | None = None) -> torch.Tensor:
    num_q_heads, dim = step.q.shape[1:]
    plan = kernels.plan_attention(
        step.q_lens,
        step.kv_lens,
        step.table,
        step.span_size,
        step.q.device,
        num_q_heads,
        step.k_cache.shape[1],
        dim,
        decode_lens,
    )
    return kernels.paged_attention(step.q, step.k_cache, step.v_cache, plan, step.scale)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_ragged_step(place: Place, poisoned: None, heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    if place.name == "interpreter" and (heads[0] > 32 or dtype != DTYPES[HEADS.index(heads) % 3]):
        pytest.skip("the interpreter is slow: it runs every head shape in one dtype")
    step = make_step(Q_LENS, KV_LENS, heads, dtype=dtype, device=place.device, seed=heads[2])
    out = run(step)
    assert out.dtype == dtype and out.is_contiguous()
    assert_close(out, step.expected(), dtype, inner=dtype, size=8.0 if dtype == F32 else 1.0)


@pytest.mark.parametrize("span_size", (16, 64, 128))
def test_span_sizes(place: Place, poisoned: None, span_size: int) -> None:
    lens = [1, 20, 1], [17, 130, 257]
    step = make_step(*lens, (4, 2, 32), span_size, dtype=F16, device=place.device, seed=span_size)
    assert_close(run(step), step.expected(), F16, inner=F16, size=1.0)


@pytest.mark.parametrize("length", (1, 31, 32, 33, 127, 500))
def test_every_length_prefilled_and_decoded(place: Place, poisoned: None, length: int) -> None:
    for q_len in {length, 1}:
        step = make_step([q_len], [length], (3, 1, 16), dtype=F16, device=place.device, seed=length)
        assert_close(run(step), step.expected(), F16, inner=F16, size=1.0)


def test_large_scores_do_not_overflow(place: Place, poisoned: None) -> None:
    step = make_step([3, 1], [40, 70], (2, 1, 16), device=place.device, seed=5)
    step.q *= 300
    assert_close(run(step), step.expected(), F32, size=200.0)


def test_cache_may_be_narrower_than_activations(place: Place, poisoned: None) -> None:
    step = make_step([5, 1], [40, 70], (6, 2, 32), device=place.device, seed=6)
    step.k_cache, step.v_cache = step.k_cache.to(BF16), step.v_cache.to(BF16)
    assert_close(run(step), step.expected(), F32)


def test_writes_into_out(place: Place) -> None:
    step = make_step([2, 1], [9, 20], (2, 1, 16), device=place.device)
    plan = kernels.plan_attention(
        step.q_lens, step.kv_lens, torch.from_numpy(step.table), 32, place.device, 2, 1, 16
    )
    out = torch.full((3, 2, 16), float("nan"), device=place.device)
    arguments = (step.q, step.k_cache, step.v_cache, plan, step.scale)
    assert kernels.paged_attention(*arguments, out=out) is out
    assert torch.equal(out, kernels.paged_attention(*arguments))


def chunked(step: Step, cuts: list[int], generated: int) -> torch.Tensor:
    """The rows of a whole one-request step, computed in chunks that end at ``cuts``."""
    results, start = [], 0
    prompt = step.kv_lens[0] - generated
    for stop in cuts:
        part = Step(
            step.q[start:stop],
            step.k_cache,
            step.v_cache,
            [stop - start],
            [stop],
            step.table,
            step.span_size,
            step.scale,
        )
        results.append(run(part, [max(0, stop - max(start, prompt))]))
        start = stop
    return torch.cat(results)


@pytest.mark.parametrize("dtype", (F32, BF16))
def test_rows_do_not_depend_on_chunks(place: Place, dtype: torch.dtype) -> None:
    """A request is prefilled at once or in chunks, its generated tokens decoded or recomputed: same bits."""
    if place.name == "torch":
        pytest.skip("the oracle leaves the order of sums to its library")
    length, generated = (80 if dtype == F32 else 150), 3
    step = make_step([length], [length], (3, 1, 16), dtype=dtype, device=place.device, seed=8)
    whole = chunked(step, [length], generated)
    assert_close(whole, step.expected(), dtype, inner=dtype, size=8.0)
    decoded = list(range(length - generated, length + 1))
    for cuts in ([64, *decoded], [1, 33, 70, length - 2, length]):
        assert torch.equal(chunked(step, cuts, generated), whole), f"chunks {cuts} differ"


def test_rows_do_not_depend_on_neighbours(place: Place) -> None:
    if place.name == "torch":
        pytest.skip("the oracle leaves the order of sums to its library")
    lens = [1, 1, 30, 1, 11], [300, 5, 30, 77, 64]
    step = make_step(*lens, (4, 2, 16), dtype=BF16, device=place.device, seed=9)
    whole, start = run(step), 0
    for b, q_len in enumerate(step.q_lens):
        rows = slice(start, start + q_len)
        alone = Step(
            step.q[rows],
            step.k_cache,
            step.v_cache,
            [q_len],
            [step.kv_lens[b]],
            step.table[b : b + 1],
            32,
            step.scale,
        )
        assert torch.equal(run(alone), whole[rows]), f"request {b} differs"
        start += q_len


def test_reserved_plan_is_refilled_in_place(place: Place, poisoned: None) -> None:
    """Two steps through one plan: same addresses, padding rows give zeros, results as from a fresh plan."""
    heads = (3, 1, 16)
    plan = kernels.reserve_decode_plan(4, 600, 32, place.device, *heads)
    for kv_lens in ([500, 1, 300], [33], [64, 256, 257, 600]):
        rows = len(kv_lens)
        step = make_step([1] * rows, kv_lens, heads, device=place.device, seed=rows)
        plan.refill(kv_lens, step.table[:, :19])
        q = torch.full((4, *step.q.shape[1:]), float("nan"), device=place.device)
        q[:rows] = step.q
        out = kernels.paged_attention(q, step.k_cache, step.v_cache, plan, step.scale)
        assert_close(out[:rows], step.expected(), F32)
        assert torch.equal(out[rows:], torch.zeros_like(out[rows:]))


def test_reserved_plan_keeps_its_addresses(place: Place) -> None:
    if place.name == "torch":
        pytest.skip("the oracle has no device work lists")
    plan = kernels.reserve_decode_plan(2, 600, 32, place.device, 4, 2, 32)

    def addresses() -> list[int]:
        work = plan.state.decode
        space = work.workspace
        tensors = (plan.state.lists, work.rows, work.items, space.sums, space.tops, space.totals)
        return [tensor.data_ptr() for tensor in tensors]

    before = addresses()
    plan.refill([600, 5], np.zeros((2, 19), np.int32))
    assert addresses() == before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_captured_decode_follows_the_plan() -> None:
    """A CUDA graph captured with one step replays another one that was put into its plan."""
    heads = (8, 2, 64)
    first = make_step([1, 1], [40, 300], heads, dtype=BF16, device="cuda", seed=1)
    plan = kernels.reserve_decode_plan(2, 600, 32, "cuda", *heads)
    plan.refill(first.kv_lens, first.table)
    q, k_cache, v_cache = first.q.clone(), first.k_cache.clone(), first.v_cache.clone()
    out = torch.empty_like(q)

    def step() -> None:
        kernels.paged_attention(q, k_cache, v_cache, plan, first.scale, out=out)

    replay = kernels.capture(step, "cuda")
    replay()
    assert_close(out, first.expected(), BF16, inner=BF16, size=1.0)
    second = make_step([1, 1], [300, 33], heads, dtype=BF16, device="cuda", seed=2)
    plan.refill(second.kv_lens, second.table)
    q.copy_(second.q)
    k_cache[: len(second.k_cache)].copy_(second.k_cache)
    v_cache[: len(second.v_cache)].copy_(second.v_cache)
    replay()
    assert_close(out, second.expected(), BF16, inner=BF16, size=1.0)
