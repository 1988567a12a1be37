"""Sampling: penalties and mask, then bans, then selection; and the bookkeeping of seen ids."""

import torch
import triton
import triton.language as tl

from ..types import SamplingBatch
from .selection import select
from .variant import Variant

BLOCK = 2048
SHORT_BLOCK = 256
NUM_WARPS = 4


@triton.jit
def penalty_kernel(
    logits_ptr,
    seen_ptr,
    slot_ptr,
    repetition_ptr,
    presence_ptr,
    suppress_ptr,
    mask_ptr,
    num_ids,
    num_words,
    HAS_SEEN: tl.constexpr,
    HAS_MASK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_id = ids < num_ids
    where = logits_ptr + row.to(tl.int64) * num_ids + ids
    x = tl.load(where, mask=is_id, other=0.0)
    if HAS_SEEN:
        slot = tl.load(slot_ptr + row).to(tl.int64)
        seen = tl.load(seen_ptr + slot * num_ids + ids, mask=is_id, other=0).to(tl.int32)
        is_generated = (seen & 2) != 0
        repeated_bits = tl.where(tl.load(suppress_ptr + row) != 0, 2, 3)
        is_repeated = (seen & repeated_bits) != 0
        factor = tl.load(repetition_ptr + row)
        # Rounded as by the other implementations: "/" is less exact and could change which id is largest.
        divided = tl.div_rn(x, tl.zeros_like(x) + factor)
        x = tl.where(is_repeated, tl.where(x < 0, x * factor, divided), x)
        x = tl.where(is_generated, x - tl.load(presence_ptr + row), x)
    if HAS_MASK:
        word = tl.load(mask_ptr + row.to(tl.int64) * num_words + ids // 32, mask=is_id, other=0)
        x = tl.where(((word >> (ids % 32)) & 1) != 0, x, float("-inf"))
    tl.store(where, x, mask=is_id)


@triton.jit(do_not_specialize=["num_bans"])
def ban_kernel(
    logits_ptr, rows_ptr, ids_ptr, mask_ptr, num_bans, num_ids, num_words,
    HAS_MASK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_ban = index < num_bans
    rows = tl.load(rows_ptr + index, mask=is_ban, other=0)
    ids = tl.load(ids_ptr + index, mask=is_ban, other=0)
    if HAS_MASK:
        # The mask comes after the bans: an id it forbids stays at -inf.
        word = tl.load(mask_ptr + rows * num_words + ids // 32, mask=is_ban, other=0)
        is_ban = is_ban & (((word >> (ids % 32).to(tl.int32)) & 1) != 0)
    tl.store(logits_ptr + rows * num_ids + ids, tl.full((BLOCK,), -1e9, tl.float32), mask=is_ban)


# The rows of `seen` and the ids are parts of tensors: whether they are aligned changes from call to call.
@triton.jit(
    do_not_specialize=["num_entries", "bit"],
    do_not_specialize_on_alignment=["seen_ptr", "slot_ptr", "ids_ptr"],
)
def mark_seen_kernel(
    seen_ptr,
    slot_ptr,
    ids_ptr,
    num_entries,
    num_ids,
    bit,
    HAS_SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_entry = index < num_entries
    ids = tl.load(ids_ptr + index, mask=is_entry, other=-1)
    is_entry = is_entry & (ids >= 0)
    where = ids.to(tl.int64)
    if HAS_SLOTS:
        where += tl.load(slot_ptr + index, mask=is_entry, other=0).to(tl.int64) * num_ids
    # Entries that meet in one byte all write the same value.
    old = tl.load(seen_ptr + where, mask=is_entry, other=0)
    tl.store(seen_ptr + where, (old | bit).to(tl.uint8), mask=is_entry)


def sample(logits: torch.Tensor, p: SamplingBatch) -> torch.Tensor:
    """logits [B, V] (modified in place) -> ids [B] int64; -1 for a row without any candidate."""
    rows, vocab = logits.shape
    if rows == 0:
        return torch.empty(0, dtype=torch.int64, device=logits.device)
    mask = logits if p.allow_mask is None else p.allow_mask
    num_words = (vocab + 31) // 32
    has_mask = p.allow_mask is not None
    if p.seen is not None or has_mask:
        penalty_kernel[(rows, triton.cdiv(vocab, BLOCK))](
            logits,
            logits if p.seen is None else p.seen,
            p.slot,
            p.repetition_penalty,
            p.presence_penalty,
            p.suppress_repetition,
            mask,
            vocab,
            num_words,
            HAS_SEEN=p.seen is not None,
            HAS_MASK=has_mask,
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
        )
    num_bans = p.ban_rows.shape[0]
    if num_bans:
        grid = (triton.cdiv(num_bans, SHORT_BLOCK),)
        ban_kernel[grid](
            logits,
            p.ban_rows,
            p.ban_ids,
            mask,
            num_bans,
            vocab,
            num_words,
            HAS_MASK=has_mask,
            BLOCK=SHORT_BLOCK,
        )
    return select(logits, p)


def mark_seen(seen: torch.Tensor, slot: int | torch.Tensor, ids: torch.Tensor, bit: int) -> None:
    """seen[slot, ids] |= bit; ids < 0 are skipped."""
    num_entries = ids.shape[0]
    if num_entries == 0:
        return
    has_slots = not isinstance(slot, int)
    target = seen if isinstance(slot, torch.Tensor) else seen[slot]
    slots = slot if isinstance(slot, torch.Tensor) else ids
    grid = (triton.cdiv(num_entries, SHORT_BLOCK),)
    mark_seen_kernel[grid](
        target, slots, ids, num_entries, seen.shape[1], bit, HAS_SLOTS=has_slots, BLOCK=SHORT_BLOCK
    )


def variants(_arch: str) -> list[Variant]:
    """Compilations to check: with and without penalties and mask."""
    rows = {"slot_ptr": "*i32", "repetition_ptr": "*fp32", "presence_ptr": "*fp32", "suppress_ptr": "*i1"}
    penalty = {"logits_ptr": "*fp32", "seen_ptr": "*u8", **rows, "mask_ptr": "*i32"}
    bans = {
        "logits_ptr": "*fp32",
        "rows_ptr": "*i64",
        "ids_ptr": "*i64",
        "mask_ptr": "*i32",
        "num_bans": "i32",
    }
    sizes = {"num_ids": "i32", "num_words": "i32"}
    found = [
        Variant(
            name=f"penalty[seen={has_seen},mask={has_mask}]",
            kernel=penalty_kernel,
            types={**penalty, **sizes},
            constants={"HAS_SEEN": has_seen, "HAS_MASK": has_mask, "BLOCK": BLOCK},
            num_warps=NUM_WARPS,
        )
        for has_seen, has_mask in ((True, False), (False, True), (True, True))
    ]
    for flag in (False, True):
        found.append(
            Variant(
                name=f"ban[mask={flag}]",
                kernel=ban_kernel,
                types={**bans, **sizes},
                constants={"HAS_MASK": flag, "BLOCK": SHORT_BLOCK},
                num_warps=NUM_WARPS,
            )
        )
        found.append(
            Variant(
                name=f"mark_seen[slots={flag}]",
                kernel=mark_seen_kernel,
                types={
                    "seen_ptr": "*u8",
                    "slot_ptr": "*i32" if flag else "*i64",
                    "ids_ptr": "*i64",
                    "num_entries": "i32",
                    "num_ids": "i32",
                    "bit": "i32",
                },
                constants={"HAS_SLOTS": flag, "BLOCK": SHORT_BLOCK},
                num_warps=NUM_WARPS,
            )
        )
    return found
