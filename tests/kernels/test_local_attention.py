"""Sliding windows and soft-capped scores, against dense float64 attention; unused slots hold NaN."""

from dataclasses import replace

import allspark_kernels as kernels
import numpy as np
import pytest
import torch
from kernel_helpers import BF16, F32, Place, Step, assert_close, make_step

HEADS = (4, 2, 32)
Q_LENS, KV_LENS = [1, 31, 1, 70, 20, 1], [1, 31, 33, 70, 127, 700]
# Shorter than a block of keys, across a split of keys, at its borders, longer than every request.
WINDOWS = (1, 20, 33, 256, 300, 1000)


def attend(step: Step, decode_lens: list[int] | None = None) -> torch.Tensor:
    num_q_heads, dim = step.q.shape[1:]
    shape = (step.span_size, step.q.device, num_q_heads, step.k_cache.shape[1], dim)
    plan = kernels.plan_attention(step.q_lens, step.kv_lens, step.table, *shape, decode_lens)
    return kernels.paged_attention(
        step.q, step.k_cache, step.v_cache, plan, step.scale, window=step.window, soft_cap=step.soft_cap
    )


def part(step: Step, request: int, first: int, stop: int) -> Step:
    """The query tokens [first, stop) of one request, at these absolute positions."""
    start = sum(step.q_lens[:request]) + first - (step.kv_lens[request] - step.q_lens[request])
    q = step.q[start : start + stop - first]
    return replace(step, q=q, q_lens=[stop - first], kv_lens=[stop], table=step.table[request : request + 1])


@pytest.mark.parametrize("window", WINDOWS)
def test_a_token_sees_only_its_window(sampling_place: Place, poisoned: None, window: int) -> None:
    if sampling_place.name == "interpreter" and window not in (20, 300):
        pytest.skip("the interpreter is slow: it runs a window below and one above the split size")
    step = make_step(Q_LENS, KV_LENS, HEADS, device=sampling_place.device, seed=window)
    step.window = window
    assert_close(attend(step), step.expected(), F32, size=8.0)


@pytest.mark.parametrize("window", (0, 40))
def test_scores_are_capped(sampling_place: Place, poisoned: None, window: int) -> None:
    step = make_step(Q_LENS, KV_LENS, HEADS, device=sampling_place.device, seed=3)
    step.q *= 40  # most scores lie in the bend of the cap
    step.window, step.soft_cap = window, 20.0
    uncapped = replace(step, soft_cap=0.0).expected()
    assert (step.expected() - uncapped).abs().max() > 0.1, "the cap must matter here"
    assert_close(attend(step), step.expected(), F32, size=64.0)


@pytest.mark.parametrize(("window", "dtype"), ((20, F32), (300, BF16)))
def test_rows_depend_on_neither_chunks_nor_neighbours(
    sampling_place: Place, window: int, dtype: torch.dtype
) -> None:
    if sampling_place.name == "torch":
        pytest.skip("the oracle leaves the order of sums to its library")
    activations = F32 if sampling_place.name == "native" else dtype
    lens = [70, 1, 20], [70, 600, 330]
    step = make_step(*lens, HEADS, dtype=activations, device=sampling_place.device, seed=8)
    step.k_cache, step.v_cache = step.k_cache.to(dtype), step.v_cache.to(dtype)
    step.window, step.soft_cap = window, 5.0
    whole = attend(step, [0, 1, 0]).split(step.q_lens)
    cuts = ((0, 0, 1), (0, 1, 70), (1, 599, 600), (2, 310, 313), (2, 313, 330))
    for request, first, stop in cuts:
        got = attend(part(step, request, first, stop), [int(request == 1)])
        want = whole[request][first - (step.kv_lens[request] - step.q_lens[request]) :][: stop - first]
        assert torch.equal(got, want), f"request {request}, tokens {first}..{stop}"


def test_a_long_row_split_over_programs_forgets_what_its_window_leaves_out(
    sampling_place: Place, poisoned: None
) -> None:
    """One decode row of many splits: those before the window hold no sums that could count."""
    step = make_step([1], [5000], (2, 1, 16), device=sampling_place.device, seed=4)
    for window in (3, 1000):
        step.window = window
        assert_close(attend(step), step.expected(), F32)


def test_what_lies_before_the_window_does_not_matter(sampling_place: Place) -> None:
    step = make_step([1], [200], (2, 1, 16), device=sampling_place.device, seed=5)
    step.window = 40
    before = attend(step)
    for position in range(160):
        span, offset = step.table[0, position // step.span_size], position % step.span_size
        step.k_cache[span, :, offset] = 100.0
        step.v_cache[span, :, offset] = -100.0
    assert torch.equal(attend(step), before)


def test_wrong_settings_are_refused() -> None:
    step = make_step([1], [9], (2, 1, 16))
    plan = kernels.plan_attention([1], [9], step.table, 32, "cpu", 2, 1, 16)
    for wrong in ({"window": -1}, {"soft_cap": -1.0}, {"soft_cap": np.inf}):
        with pytest.raises(ValueError, match="must not be negative"):
            kernels.paged_attention(step.q, step.k_cache, step.v_cache, plan, 1.0, **wrong)
