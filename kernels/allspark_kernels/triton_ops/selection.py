"""Exact top-k, exact top-p and the seeded draw, one program per row, without sorting.

Logits are mapped to integers of the same order. The threshold of top-k, and then of top-p, is found two
bits at a time from the top: each pass over the row (a read from the L2 cache) counts and weighs what lies
above three trial thresholds. The search ends early once the undecided interval holds at most one
candidate. Ties at the threshold are resolved by id, smaller first.
"""

import torch
import triton
import triton.language as tl

from ..types import SamplingBatch
from .philox import gumbel
from .variant import Variant, arch_of, next_power_of_2

MAX_BLOCK = 4096
NUM_WARPS = 16


@triton.jit
def _load(row_ptr, ids, num_ids):
    """Logits with NaN, and ids past the end, as -inf, and -0 as +0 (equal values must tie)."""
    x = tl.load(row_ptr + ids, mask=ids < num_ids, other=float("-inf"))
    x = tl.where(x == x, x, float("-inf"))
    return tl.where(x == 0.0, 0.0, x)


@triton.jit
def _key(x):
    """Map float32 to int32 so that x < y is key(x) < key(y)."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _is_kept(key, ids, threshold, last_tie):
    """Above the threshold, or equal to it with an id up to ``last_tie``."""
    return (key > threshold) | ((key == threshold) & (ids <= last_tie))


@triton.jit
def _winner(best, best_id, num_ids):
    """Largest lane value and the smallest id among the lanes that have it."""
    top = tl.max(best, axis=0)
    return top, tl.min(tl.where(best == top, best_id, num_ids), axis=0)


@triton.jit
def _first_maximum(row_ptr, num_ids, BLOCK: tl.constexpr):
    """Largest logit and the smallest id that has it."""
    lanes = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    best_id = tl.zeros((BLOCK,), tl.int32) + num_ids
    for start in range(0, num_ids, BLOCK):
        ids = start + lanes
        x = _load(row_ptr, ids, num_ids)
        best_id = tl.where(x > best, ids, best_id)
        best = tl.maximum(best, x)
    return _winner(best, best_id, num_ids)


@triton.jit
def _above(row_ptr, num_ids, top, rate, floor, last_floor, low, step, BLOCK: tl.constexpr):
    """Counts and masses of the candidates with key >= low + step, low + 2 step, low + 3 step."""
    lanes = tl.arange(0, BLOCK)
    n1, m1 = tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.float32)
    n2, m2, n3, m3 = n1, m1, n1, m1
    for start in range(0, num_ids, BLOCK):
        ids = start + lanes
        x = _load(row_ptr, ids, num_ids)
        key = _key(x)
        is_candidate = _is_kept(key, ids, floor, last_floor) & (ids < num_ids)
        weight = tl.exp2((x - top) * rate)
        in1 = is_candidate & (key >= low + step)
        in2 = is_candidate & (key >= low + 2 * step)
        in3 = is_candidate & (key >= low + 3 * step)
        n1 += in1.to(tl.int32)
        n2 += in2.to(tl.int32)
        n3 += in3.to(tl.int32)
        m1 += tl.where(in1, weight, 0.0)
        m2 += tl.where(in2, weight, 0.0)
        m3 += tl.where(in3, weight, 0.0)
    return (
        tl.sum(n1, axis=0), tl.sum(n2, axis=0), tl.sum(n3, axis=0),
        tl.sum(m1, axis=0), tl.sum(m2, axis=0), tl.sum(m3, axis=0),
    )  # fmt: skip


@triton.jit
def _mass(row_ptr, num_ids, top, rate, floor, last_floor, BLOCK: tl.constexpr):
    """Mass of all candidates, summed in the same order as in ``_above``."""
    lanes = tl.arange(0, BLOCK)
    mass = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, num_ids, BLOCK):
        ids = start + lanes
        x = _load(row_ptr, ids, num_ids)
        is_candidate = _is_kept(_key(x), ids, floor, last_floor) & (ids < num_ids)
        mass += tl.where(is_candidate, tl.exp2((x - top) * rate), 0.0)
    return tl.sum(mass, axis=0)


@triton.jit
def _nth_tie(row_ptr, num_ids, floor, last_floor, threshold, n, BLOCK: tl.constexpr):
    """Id of the n-th candidate (n >= 1, by id) whose key equals the threshold."""
    found = tl.zeros((), tl.int32) + num_ids
    before = tl.zeros((), tl.int32)
    for start in range(0, num_ids, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        key = _key(_load(row_ptr, ids, num_ids))
        is_tie = (key == threshold) & _is_kept(key, ids, floor, last_floor) & (ids < num_ids)
        rank = before + tl.cumsum(is_tie.to(tl.int32), axis=0)
        found = tl.minimum(found, tl.min(tl.where(is_tie & (rank == n), ids, num_ids), axis=0))
        before += tl.sum(is_tie.to(tl.int32), axis=0)
    return found


@triton.jit
def _search(
    row_ptr, num_ids, top, rate, floor, last_floor, num_candidates, mass, goal,
    BY_MASS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Threshold and last tie of the shortest best-first run of candidates that reaches ``goal``.

    BY_MASS: the run's mass exceeds ``goal``. Otherwise: it has ``goal`` members.
    Invariant: the run of keys >= low reaches the goal, that of keys >= low + 4 step does not.
    """
    low = tl.full((), -2147483648, tl.int32)
    num_candidates = tl.zeros((), tl.int32) + num_candidates
    step = tl.full((), 1 << 30, tl.int32)
    n_low, m_low = num_candidates, mass
    n_high, m_high = tl.zeros((), tl.int32), tl.zeros((), tl.float32)
    is_open = n_low > 1
    while is_open:
        n1, n2, n3, m1, m2, m3 = _above(
            row_ptr, num_ids, top, rate, floor, last_floor, low, step, BLOCK
        )  # fmt: skip
        if BY_MASS:
            reach1, reach2, reach3 = m1 > goal, m2 > goal, m3 > goal
        else:
            reach1, reach2, reach3 = n1 >= goal, n2 >= goal, n3 >= goal
        n_high = tl.where(reach3, n_high, tl.where(reach2, n3, tl.where(reach1, n2, n1)))
        m_high = tl.where(reach3, m_high, tl.where(reach2, m3, tl.where(reach1, m2, m1)))
        n_low = tl.where(reach3, n3, tl.where(reach2, n2, tl.where(reach1, n1, n_low)))
        m_low = tl.where(reach3, m3, tl.where(reach2, m2, tl.where(reach1, m1, m_low)))
        low += step * (reach1.to(tl.int32) + reach2.to(tl.int32) + reach3.to(tl.int32))
        step = step >> 2
        is_open = (step > 0) & (n_low - n_high > 1)
        if not BY_MASS:
            is_open = is_open & (n_low > goal)
    ties = n_low - n_high
    if BY_MASS:
        each = (m_low - m_high) / tl.maximum(ties, 1).to(tl.float32)
        wanted = tl.minimum(tl.floor((goal - m_high) / tl.maximum(each, 1e-38)) + 1.0, 2147483000.0)
        room = tl.minimum(tl.maximum(wanted.to(tl.int32), 1), ties)
    else:
        room = goal - n_high
    last_tie = tl.zeros((), tl.int32) + num_ids
    if room < ties:
        last_tie = _nth_tie(row_ptr, num_ids, floor, last_floor, low, room, BLOCK)
    return low, last_tie


@triton.jit
def _draw(row_ptr, num_ids, top, per_temperature, threshold, last_tie, seed, position, BLOCK: tl.constexpr):
    """The kept id with the largest x / T + Gumbel noise."""
    lanes = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    best_id = tl.zeros((BLOCK,), tl.int32) + num_ids
    for start in range(0, num_ids, BLOCK):
        ids = start + lanes
        x = _load(row_ptr, ids, num_ids)
        score = (x - top) * per_temperature + gumbel(ids, seed, position)
        is_kept = _is_kept(_key(x), ids, threshold, last_tie) & (ids < num_ids)
        score = tl.where(is_kept, score, float("-inf"))
        best_id = tl.where(score > best, ids, best_id)
        best = tl.maximum(best, score)
    _, chosen = _winner(best, best_id, num_ids)
    return chosen


@triton.jit
def select_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    seed_ptr,
    position_ptr,
    out_ptr,
    num_ids,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    row_ptr = logits_ptr + row.to(tl.int64) * num_ids
    top, chosen = _first_maximum(row_ptr, num_ids, BLOCK)
    temperature = tl.load(temperature_ptr + row)
    if top == float("-inf"):
        chosen = tl.full((), -1, tl.int32)
    elif (temperature > 0.0) & (top < float("inf")):
        # Bounded, so that the best logit's distance 0 times it stays 0 for the tiniest temperature.
        per_temperature = tl.minimum(1.0 / temperature, 1e30)
        rate = per_temperature * 1.4426950408889634
        threshold, last_tie = tl.full((), -2147483648, tl.int32), tl.zeros((), tl.int32) + num_ids
        top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
        num_kept = tl.zeros((), tl.int32) + num_ids
        if (top_k > 0) & (top_k < num_ids):
            zero = tl.zeros((), tl.float32)
            threshold, last_tie = _search(
                row_ptr, num_ids, top, rate, threshold, last_tie, num_ids, zero, top_k, False, BLOCK
            )  # fmt: skip
            num_kept = top_k
        if (top_p > 0.0) & (top_p < 1.0):
            mass = _mass(row_ptr, num_ids, top, rate, threshold, last_tie, BLOCK)
            p_threshold, p_last = _search(
                row_ptr, num_ids, top, rate, threshold, last_tie, num_kept, mass, top_p * mass, True, BLOCK
            )  # fmt: skip
            # The search may stop below the top-k threshold; with equal thresholds both cut the same ties.
            if p_threshold > threshold:
                threshold, last_tie = p_threshold, p_last
            elif p_threshold == threshold:
                last_tie = tl.minimum(last_tie, p_last)
        seed, position = tl.load(seed_ptr + row), tl.load(position_ptr + row)
        chosen = _draw(row_ptr, num_ids, top, per_temperature, threshold, last_tie, seed, position, BLOCK)
    tl.store(out_ptr + row, chosen.to(tl.int64))


def _block(arch: str, vocab: int) -> int:
    """Ids that one program reads at a time: fewer on AMD, where every comparison holds scalar registers."""
    return min(MAX_BLOCK // 2 if arch.startswith("gfx") else MAX_BLOCK, max(16, next_power_of_2(vocab)))


def select(logits: torch.Tensor, p: SamplingBatch) -> torch.Tensor:
    """Chosen id of each row of processed logits [B, V]."""
    rows, vocab = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    select_kernel[(rows,)](
        logits,
        p.temperature,
        p.top_k,
        p.top_p,
        p.seed,
        p.position,
        out,
        vocab,
        BLOCK=_block(arch_of(logits.device), vocab),
        num_warps=NUM_WARPS,
    )
    return out


def variants(arch: str) -> list[Variant]:
    """Compilations to check."""
    types = {
        "logits_ptr": "*fp32",
        "temperature_ptr": "*fp32",
        "top_k_ptr": "*i32",
        "top_p_ptr": "*fp32",
        "seed_ptr": "*i64",
        "position_ptr": "*i64",
        "out_ptr": "*i64",
        "num_ids": "i32",
    }
    return [
        Variant(
            name=f"select[aligned={is_aligned}]",
            kernel=select_kernel,
            types=types,
            constants={"BLOCK": _block(arch, 1 << 17)},
            num_warps=NUM_WARPS,
            aligned=("num_ids",) if is_aligned else (),
        )
        for is_aligned in (False, True)
    ]
