"""Paged attention: the step is cut into work items once, every layer then runs them."""

import ctypes
from typing import TYPE_CHECKING

import torch

from . import library
from .elementwise import MAX_HEAD_DIM, cache_code
from .library import I64, PTR

if TYPE_CHECKING:
    from ..plan import AttentionPlan

ITEM_INTS = 6  # of struct item in attention.h
LONG_CALL_SCORES = 1 << 20  # query-key pairs from which the interpreter lock is given up


class _Step(ctypes.Structure):
    """Mirror of ``struct step`` in attention.h."""

    _fields_ = (
        *((name, PTR) for name in ("q_lens", "kv_lens", "cu_q", "span_table")),
        *((name, I64) for name in ("requests", "max_spans", "q_heads", "kv_heads", "dim", "span_size")),
        *(("items", PTR), ("item_count", I64), ("states", PTR), ("state_floats", I64)),
    )


class StepState:
    """What the library reads for one plan; keeps alive what the addresses in it point to."""

    __slots__ = ("address", "arrays", "is_long", "step")

    def __init__(self, plan: "AttentionPlan") -> None:
        self.arrays: list[object] = [plan.q_lens, plan.kv_lens, plan.cu_q, plan.span_table]
        self.step = _Step(
            *(array.ctypes.data for array in (plan.q_lens, plan.kv_lens, plan.cu_q, plan.span_table)),
            *(plan.num_requests, plan.span_table.shape[1]),
            *(plan.num_q_heads, plan.num_kv_heads, plan.head_dim, plan.span_size),
        )
        self.address = ctypes.addressof(self.step)
        self._cut()
        pairs = int((plan.q_lens.astype("int64") * plan.kv_lens).sum()) * plan.num_q_heads
        self.is_long = pairs > LONG_CALL_SCORES

    def _cut(self) -> None:
        calls, floats = library.current.held, I64()
        count = calls.ask_attention_plan(self.address, ctypes.addressof(floats))
        if count < 0:
            raise MemoryError("no memory for the work list of a step")
        items = torch.empty(count * ITEM_INTS, dtype=torch.int32)
        states = torch.empty(count * floats.value, dtype=torch.float32) if floats.value else None
        self.step.items, self.step.item_count = items.data_ptr(), count
        self.step.states = None if states is None else states.data_ptr()
        self.step.state_floats = floats.value
        calls.ask_attention_plan(self.address, ctypes.addressof(floats))
        self.arrays += [items, states]


def prepare_plan(plan: "AttentionPlan") -> StepState:
    """Work items of a plan. Raises ValueError if its heads are too wide for the library."""
    if plan.head_dim > MAX_HEAD_DIM:
        raise ValueError(
            f"native kernels serve heads of up to {MAX_HEAD_DIM} dimensions, not {plan.head_dim}"
        )
    return StepState(plan)


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    plan: "AttentionPlan",
    scale: float,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """q [T, Hq, D] float32 (rows may be strided), caches [num_spans, Hk, span_size, D] -> [T, Hq, D]."""
    if q.dtype is not torch.float32:
        raise ValueError(f"activations on the CPU are float32, not {q.dtype}")
    if out is None:
        out = torch.empty(q.shape, dtype=torch.float32)
    state: StepState = plan.state
    calls = library.current.freed if state.is_long else library.current.held
    code = cache_code(k_cache, v_cache)
    addresses = (k_cache.data_ptr(), v_cache.data_ptr())
    if calls.ask_paged_attention(
        state.address, q.data_ptr(), q.stride(0), *addresses, code, scale, out.data_ptr()
    ):
        raise MemoryError("no scratch memory for attention")
    return out
