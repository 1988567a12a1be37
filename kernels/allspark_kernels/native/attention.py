"""Paged attention: the step is cut into work items once, every layer then runs them."""

import ctypes
from typing import TYPE_CHECKING

import numpy as np
import torch

from . import library
from .elementwise import MAX_HEAD_DIM, cache_code
from .library import I64, PTR

if TYPE_CHECKING:
    from ..plan import AttentionPlan

ITEM_INTS = 6  # of struct item in attention.h
LONG_CALL_SCORES = 1 << 20  # query-key pairs from which the interpreter lock is given up


class Step(ctypes.Structure):
    """Mirror of ``struct step`` in attention.h."""

    _fields_ = (
        *((name, PTR) for name in ("q_lens", "kv_lens", "cu_q", "span_table")),
        *((name, I64) for name in ("requests", "max_spans", "q_heads", "kv_heads", "dim", "span_size")),
        *(("items", PTR), ("item_count", I64), ("states", PTR), ("state_floats", I64), ("live", I64)),
    )


class StepState:
    """What the library reads for one plan, at an address that lasts as long as the plan."""

    __slots__ = ("address", "is_long", "items", "plan_arrays", "states", "step")

    def __init__(self, plan: "AttentionPlan") -> None:
        self.plan_arrays = (plan.q_lens, plan.kv_lens, plan.cu_q, plan.span_table)
        self.step = Step(
            *(array.ctypes.data for array in self.plan_arrays),
            *(plan.num_requests, plan.span_table.shape[1]),
            *(plan.num_q_heads, plan.num_kv_heads, plan.head_dim, plan.span_size),
        )
        self.address = ctypes.addressof(self.step)
        self.items = torch.empty(0, dtype=torch.int32)
        self.states = torch.empty(0, dtype=torch.float32)
        self.cut()

    def cut(self) -> None:
        """Cut the lengths that are now in the plan into work items."""
        step, calls = self.step, library.current.held
        step.items = None
        count = calls.ask_attention_plan(self.address)
        if count < 0:
            raise MemoryError("no memory for the work list of a step")
        self.items = _at_least(self.items, count * ITEM_INTS)
        self.states = _at_least(self.states, count * step.state_floats)
        step.items, step.item_count = self.items.data_ptr(), count
        step.states = self.states.data_ptr() if step.state_floats else None
        calls.ask_attention_plan(self.address)
        q_lens, kv_lens, *_ = self.plan_arrays
        pairs = int(np.dot(q_lens.astype(np.int64), kv_lens)) * step.q_heads
        self.is_long = pairs > LONG_CALL_SCORES


def _at_least(buffer: torch.Tensor, size: int) -> torch.Tensor:
    """The buffer, or a new one if it is too small."""
    return buffer if buffer.numel() >= size else torch.empty(size, dtype=buffer.dtype)


def prepare_plan(plan: "AttentionPlan", _shared: object) -> StepState:
    """Work items of a plan. Raises ValueError if its heads are too wide for the library."""
    if plan.head_dim > MAX_HEAD_DIM:
        raise ValueError(f"native kernels serve heads up to {MAX_HEAD_DIM} wide, not {plan.head_dim}")
    if not isinstance(plan.state, StepState):
        return StepState(plan)
    plan.state.cut()
    return plan.state


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    plan: "AttentionPlan",
    scale: float,
    out: torch.Tensor | None,
    window: int,
    soft_cap: float,
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
        state.address,
        q.data_ptr(),
        q.stride(0),
        *addresses,
        code,
        scale,
        out.data_ptr(),
        window,
        float(soft_cap),
    ):
        raise MemoryError("no scratch memory for attention")
    return out
