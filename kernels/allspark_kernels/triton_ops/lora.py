"""Low-rank adapters of many requests in two launches: x A^T in splits of K, then their sum times B^T.

A program serves rows of one adapter, whose weights it finds through the table of addresses. What a row gets
depends on its own values and its adapter alone: K is cut into splits of fixed length, each is summed in
blocks of BLOCK_K, the splits are added in order, and the rank is walked in blocks of BLOCK_R.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from ..lora import ENTRY_WORDS, MAX_PARTS, TILE_ROWS, LoraPlan, LoraSite
from .product import AOT_DTYPES, SUM, product_constants
from .variant import Variant, arch_of

# Length of a split of K: it decides how sums are grouped.
SPLIT_K = 1024
SHRINK_RANKS, SHRINK_K, SHRINK_WARPS = 32, 64, 4
EXPAND_COLUMNS, EXPAND_RANKS, EXPAND_WARPS, EXPAND_STAGES = 128, 16, 4, 2

_TL_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _address(entry, word: tl.constexpr, TYPE: tl.constexpr):
    """The pointer that a table entry holds; every matrix is aligned to 16 bytes."""
    value = tl.multiple_of(tl.load(entry + word), 16)
    return value.to(tl.pointer_type(TYPE))


@triton.jit(do_not_specialize=["num_rows", "max_rank"])
def lora_shrink_kernel(
    x_ptr,
    entries_ptr,
    rows_ptr,
    tiles_ptr,
    low_ptr,
    K,
    num_rows,
    max_rank,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    ENTRY: tl.constexpr,
    TYPE: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """low[split, index, rank] = sum over the split's k of x[rows[index], k] A[rank, k]."""
    tile = tiles_ptr + tl.program_id(0) * 3
    slot, start, count = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    entry = entries_ptr + slot.to(tl.int64) * ENTRY
    total = (tl.load(entry + 4) + tl.load(entry + 5) + tl.load(entry + 6)).to(tl.int32)
    first_rank = tl.program_id(1) * RANKS
    if first_rank >= total:
        return
    split = tl.program_id(2)
    within = tl.arange(0, ROWS)
    ranks = first_rank + tl.arange(0, RANKS)
    row_mask, rank_mask = within < count, ranks < total
    rows = tl.load(rows_ptr + start + within, mask=row_mask, other=0).to(tl.int64)
    down = _address(entry, 0, TYPE) + ranks.to(tl.int64)[None, :] * K
    x_rows = x_ptr + rows[:, None] * K
    ks = tl.arange(0, BLOCK_K)
    acc = tl.zeros((ROWS, RANKS), tl.float32)
    for k in range(split * SPLIT_K, min(split * SPLIT_K + SPLIT_K, K), BLOCK_K):
        inside = k + ks < K
        x = tl.load(x_rows + (k + ks)[None, :], mask=row_mask[:, None] & inside[None, :], other=0.0)
        a = tl.load(down + (k + ks)[:, None], mask=inside[:, None] & rank_mask[None, :], other=0.0)
        part = tl.dot(x.to(OPERAND), a.to(OPERAND), acc.to(SUM), input_precision=PRECISION)
        acc = part.to(tl.float32)
    low = low_ptr + (split.to(tl.int64) * num_rows + start + within)[:, None] * max_rank + ranks[None, :]
    tl.store(low, acc, mask=row_mask[:, None] & rank_mask[None, :])


@triton.jit(do_not_specialize=["num_rows", "max_rank", "num_splits"])
def lora_expand_kernel(
    low_ptr,
    entries_ptr,
    rows_ptr,
    tiles_ptr,
    out_ptr,
    N0,
    N1,
    N2,
    num_rows,
    max_rank,
    num_splits,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ENTRY: tl.constexpr,
    TYPE: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """out[rows[index], part] += sum over ranks of (sum over splits of low[split, index, rank]) B^T[rank]."""
    tile = tiles_ptr + tl.program_id(0) * 3
    slot, start, count = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    entry = entries_ptr + slot.to(tl.int64) * ENTRY
    # Column tiles of the parts follow each other; none crosses from one part into the next.
    block = tl.program_id(1)
    blocks0, blocks1 = tl.cdiv(N0, COLUMNS), tl.cdiv(N1, COLUMNS)
    width, offset, first_rank = N0, 0, 0
    rank = tl.load(entry + 4).to(tl.int32)
    up = _address(entry, 1, TYPE)
    if block >= blocks0 + blocks1:
        block -= blocks0 + blocks1
        width, offset = N2, N0 + N1
        first_rank = rank + tl.load(entry + 5).to(tl.int32)
        rank = tl.load(entry + 6).to(tl.int32)
        up = _address(entry, 3, TYPE)
    elif block >= blocks0:
        block -= blocks0
        width, offset = N1, N0
        first_rank = rank
        rank = tl.load(entry + 5).to(tl.int32)
        up = _address(entry, 2, TYPE)
    if rank == 0:
        return
    within, columns, ranks = tl.arange(0, ROWS), block * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, RANKS)
    row_mask, column_mask = within < count, columns < width
    low_rows = low_ptr + (start + within).to(tl.int64)[:, None] * max_rank + first_rank
    split_stride = num_rows.to(tl.int64) * max_rank
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for r in range(0, rank, RANKS):
        inside = r + ranks < rank
        mask = row_mask[:, None] & inside[None, :]
        part_ptr = low_rows + (r + ranks)[None, :]
        low = tl.load(part_ptr, mask=mask, other=0.0)
        for _ in range(1, num_splits):
            part_ptr += split_stride
            low += tl.load(part_ptr, mask=mask, other=0.0)
        b = tl.load(
            up + (r + ranks).to(tl.int64)[:, None] * width + columns[None, :],
            mask=inside[:, None] & column_mask[None, :],
            other=0.0,
        )
        part = tl.dot(low.to(WIDE), b.to(WIDE), acc.to(SUM), input_precision=PRECISION)
        acc = part.to(tl.float32)
    rows = tl.load(rows_ptr + start + within, mask=row_mask, other=0).to(tl.int64)
    where = out_ptr + rows[:, None] * (N0 + N1 + N2) + offset + columns[None, :]
    mask = row_mask[:, None] & column_mask[None, :]
    total = tl.load(where, mask=mask, other=0.0).to(tl.float32) + acc
    tl.store(where, total.to(out_ptr.dtype.element_ty), mask=mask)


def _shrink_constants(arch: str, dtype: torch.dtype) -> dict[str, Any]:
    tile = {"ROWS": TILE_ROWS, "RANKS": SHRINK_RANKS, "BLOCK_K": SHRINK_K, "SPLIT_K": SPLIT_K}
    return {**tile, "ENTRY": ENTRY_WORDS, "TYPE": _TL_TYPES[dtype], **product_constants(arch, dtype)}


def _shrink_stages(arch: str) -> int:
    return 2 if arch.startswith("gfx") else 4


def _expand_constants(arch: str, dtype: torch.dtype) -> dict[str, Any]:
    # The first product is kept in float32: its rounding would otherwise enter every output column.
    wide = product_constants(arch, torch.float32)
    tile = {"ROWS": TILE_ROWS, "RANKS": EXPAND_RANKS, "COLUMNS": EXPAND_COLUMNS, "ENTRY": ENTRY_WORDS}
    return {**tile, "TYPE": _TL_TYPES[dtype], "WIDE": wide["OPERAND"], "PRECISION": wide["PRECISION"]}


def lora_add(x: torch.Tensor, site: LoraSite, plan: LoraPlan, out: torch.Tensor) -> None:
    """Rows of x [T, K] go through their adapter and are added to their rows of out [T, N]."""
    max_rank, num_rows, num_tiles = site.max_rank, plan.rows.shape[0], plan.tiles.shape[0]
    if max_rank == 0:
        return
    arch, dtype, k = arch_of(x.device), site.dtype, site.in_features
    num_splits = triton.cdiv(k, SPLIT_K)
    low = torch.empty((num_splits, num_rows, max_rank), dtype=torch.float32, device=x.device)
    lora_shrink_kernel[(num_tiles, triton.cdiv(max_rank, SHRINK_RANKS), num_splits)](
        x,
        site.entries,
        plan.rows,
        plan.tiles,
        low,
        k,
        num_rows,
        max_rank,
        **_shrink_constants(arch, dtype),
        num_warps=SHRINK_WARPS,
        num_stages=_shrink_stages(arch),
    )
    widths = (*site.widths, 0, 0)[:MAX_PARTS]
    num_blocks = sum(triton.cdiv(width, EXPAND_COLUMNS) for width in widths)
    lora_expand_kernel[(num_tiles, num_blocks)](
        low,
        site.entries,
        plan.rows,
        plan.tiles,
        out,
        *widths,
        num_rows,
        max_rank,
        num_splits,
        **_expand_constants(arch, dtype),
        num_warps=EXPAND_WARPS,
        num_stages=EXPAND_STAGES,
    )


def variants(arch: str) -> list[Variant]:
    """Compilations to check: each dtype."""
    found = []
    common = {"entries_ptr": "*i64", "rows_ptr": "*i32", "tiles_ptr": "*i32", "num_rows": "i32"}
    common |= {"low_ptr": "*fp32", "max_rank": "i32"}
    for name, dtype in AOT_DTYPES.items():
        found.append(
            Variant(
                name=f"lora_shrink[{name}]",
                kernel=lora_shrink_kernel,
                types={**common, "x_ptr": f"*{name}", "K": "i32"},
                constants=_shrink_constants(arch, dtype),
                num_warps=SHRINK_WARPS,
                num_stages=_shrink_stages(arch),
                is_matrix_product=True,
                aligned=("K",),
            )
        )
        sizes = dict.fromkeys(("N0", "N1", "N2", "num_splits"), "i32")
        found.append(
            Variant(
                name=f"lora_expand[{name}]",
                kernel=lora_expand_kernel,
                types={**common, **sizes, "out_ptr": f"*{name}"},
                constants=_expand_constants(arch, dtype),
                num_warps=EXPAND_WARPS,
                num_stages=EXPAND_STAGES,
                is_matrix_product=True,
                aligned=("N0", "N1", "N2"),
            )
        )
    return found
