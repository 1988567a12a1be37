"""Next-token selection and the table of ids that a request has seen."""

import ctypes

import torch

from ..types import SamplingBatch
from . import library
from .library import I64, PTR

LONG_CALL_LOGITS = 1 << 20  # from here on the interpreter lock is given up


class _Sampling(ctypes.Structure):
    """Mirror of ``struct sampling`` in sample.h."""

    _fields_ = (
        *(("logits", PTR), ("chosen", PTR), ("rows", I64), ("vocab", I64)),
        *((name, PTR) for name in ("temperature", "top_k", "top_p", "seed", "position")),
        *((name, PTR) for name in ("repetition_penalty", "presence_penalty", "suppress_repetition")),
        *(("seen", PTR), ("seen_rows", I64), ("slot", PTR)),
        *(("ban_rows", PTR), ("ban_ids", PTR), ("bans", I64), ("allow_mask", PTR)),
    )


def sample(logits: torch.Tensor, p: SamplingBatch) -> torch.Tensor:
    """logits [B, V] float32 (processed in place) -> ids [B] int64; -1 for a row without any candidate.

    Raises ValueError if a slot or a banned id lies outside its table.
    """
    rows, vocab = logits.shape
    chosen = torch.empty(rows, dtype=torch.int64)
    per_row = (p.temperature, p.top_k, p.top_p, p.seed, p.position)
    penalties = (p.repetition_penalty, p.presence_penalty, p.suppress_repetition)
    tables = [x for x in (p.seen, p.slot, p.ban_rows, p.ban_ids, p.allow_mask) if x is not None]
    for x in (*per_row, *penalties, *tables):
        if not x.is_contiguous():
            raise ValueError("the tensors of a sampling batch must be contiguous")
    batch = _Sampling(
        *(logits.data_ptr(), chosen.data_ptr(), rows, vocab),
        *(x.data_ptr() for x in (*per_row, *penalties)),
        *((None, 0) if p.seen is None else (p.seen.data_ptr(), p.seen.shape[0])),
        p.slot.data_ptr(),
        *(p.ban_rows.data_ptr(), p.ban_ids.data_ptr(), p.ban_ids.numel()),
        None if p.allow_mask is None else p.allow_mask.data_ptr(),
    )
    lib = library.current
    calls = lib.freed if rows * vocab >= LONG_CALL_LOGITS else lib.held
    _check(calls.ask_sample(ctypes.addressof(batch)), "a slot or a banned id lies outside its table")
    return chosen


def mark_seen(seen: torch.Tensor, slot: int | torch.Tensor, ids: torch.Tensor, bit: int) -> None:
    """seen[slot, ids] |= bit; ids < 0 are skipped. Raises ValueError outside the table."""
    if not seen.is_contiguous():
        raise ValueError("seen must be contiguous")
    ids = ids.to(torch.int64).contiguous()
    slots = None if isinstance(slot, int) else slot.to(torch.int64).contiguous()
    status = library.current.held.ask_mark_seen(
        seen.data_ptr(),
        seen.shape[0],
        seen.shape[1],
        slot if isinstance(slot, int) else 0,
        None if slots is None else slots.data_ptr(),
        ids.data_ptr(),
        ids.numel(),
        bit,
    )
    _check(status, "a slot or an id lies outside the table of seen ids")


def _check(status: int, problem: str) -> None:
    if status == 1:
        raise MemoryError("no scratch memory for sampling")
    if status:
        raise ValueError(problem)
