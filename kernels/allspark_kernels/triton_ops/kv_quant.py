"""Rows of the KV cache in Triton: read as operands of a product, written quantised. Layout: ``kv_format``."""

import torch
import triton
import triton.language as tl

from ..kv_format import CODES, SMALLEST_SCALE, CacheMode, KVFormat, cache_mode_of, kv_format

PLAIN = tl.constexpr(int(CacheMode.DEFAULT))
UINT4 = tl.constexpr(int(CacheMode.UINT4))
INT8_STEPS, INT8_SMALLEST = map(tl.constexpr, CODES[CacheMode.INT8])
UINT4_STEPS, UINT4_SMALLEST = map(tl.constexpr, CODES[CacheMode.UINT4])
MIN_SCALE = tl.constexpr(SMALLEST_SCALE)
LARGEST_FLOAT = tl.constexpr(3.4028234663852886e38)
# Added and taken away again, it rounds |x| < 2^22 to the nearest integer, ties to even.
ROUND = tl.constexpr(12582912.0)
POINTERS = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}
POINTERS |= {torch.int8: "*i8", torch.uint8: "*u8"}


def cache_constants(cache: torch.Tensor) -> dict[str, int]:
    """How the rows of ``cache`` are stored, as a kernel's constants."""
    return {"MODE": int(cache_mode_of(cache)), "ROW_WIDTH": cache.shape[-1]}


def aot_cache(mode: CacheMode, dtype: torch.dtype, dim: int) -> tuple[str, dict[str, int]]:
    """Pointer type and constants of a cache, for the ahead-of-time checks."""
    layout: KVFormat = kv_format(mode, dtype, dim)
    return POINTERS[layout.dtype], {"MODE": int(mode), "ROW_WIDTH": layout.row_width}


def aot_suffix(mode: CacheMode) -> str:
    """What is added to the name of a kernel that is compiled for a quantised cache."""
    return "" if mode == CacheMode.DEFAULT else f"_{mode.name.lower()}"


@triton.jit
def _parameters(block_ptr, SPAN_SIZE: tl.constexpr, DIM: tl.constexpr, MODE: tl.constexpr):
    """Where the scales of a head's block begin; its zeros follow SPAN_SIZE floats later."""
    PAYLOAD: tl.constexpr = SPAN_SIZE * (DIM // 2 if MODE == UINT4 else DIM)
    return (block_ptr + PAYLOAD).to(tl.pointer_type(tl.float32), bitcast=True)


@triton.jit
def load_rows(
    head_ptr,
    block,
    offset,
    is_key,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    SPAN_SIZE: tl.constexpr,
    OPERAND: tl.constexpr,
    MODE: tl.constexpr,
):
    """Rows of keys or values [keys, DIM_BLOCK]: row offset[i] of the block at head_ptr + block[i].

    Rows where not is_key are 0. Columns from DIM on are no part of the head (in a quantised row: anything).
    """
    if MODE == PLAIN:
        dims = tl.arange(0, DIM_BLOCK)
        where = block + offset * DIM
        mask = is_key[:, None] & (dims < DIM)[None, :]
        rows = tl.load(head_ptr + where[:, None] + dims[None, :], mask=mask, other=0.0).to(OPERAND)
    else:
        if MODE == UINT4:
            pairs = tl.arange(0, DIM_BLOCK // 2)
            where = block + offset * (DIM // 2)
            mask = is_key[:, None] & (pairs < DIM // 2)[None, :]
            both = tl.load(head_ptr + where[:, None] + pairs[None, :], mask=mask, other=0)
            codes = tl.interleave(both & 15, both >> 4).to(tl.float32)
        else:
            dims = tl.arange(0, DIM_BLOCK)
            where = block + offset * DIM
            mask = is_key[:, None] & (dims < DIM)[None, :]
            codes = tl.load(head_ptr + where[:, None] + dims[None, :], mask=mask, other=0).to(tl.float32)
        scales = _parameters(head_ptr + block, SPAN_SIZE, DIM, MODE) + offset
        scale = tl.load(scales, mask=is_key, other=0.0)
        zero = tl.load(scales + SPAN_SIZE, mask=is_key, other=0.0)
        rows = ((codes - zero[:, None]) * scale[:, None]).to(OPERAND)
    return rows


@triton.jit
def _code(x, scale, zero, SMALLEST: tl.constexpr, STEPS: tl.constexpr):
    """round(clamp(x / scale + zero)), ties to even."""
    code = tl.minimum(tl.maximum(tl.div_rn(x, scale) + zero, SMALLEST), SMALLEST + STEPS)
    return (code + ROUND) - ROUND


@triton.jit
def store_rows(
    cache_ptr,
    block,
    offset,
    x,
    is_kept,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    SPAN_SIZE: tl.constexpr,
    MODE: tl.constexpr,
):
    """Quantise x [HEADS, DIM_BLOCK] float32, 0 from DIM on, into row ``offset`` of the blocks at
    cache_ptr + block[i], where is_kept."""
    STEPS: tl.constexpr = UINT4_STEPS if MODE == UINT4 else INT8_STEPS
    SMALLEST: tl.constexpr = UINT4_SMALLEST if MODE == UINT4 else INT8_SMALLEST
    lo = tl.minimum(tl.min(x, axis=1), 0.0)
    hi = tl.maximum(tl.max(x, axis=1), 0.0)
    scale = tl.maximum(tl.div_rn(hi - lo, tl.full((HEADS,), STEPS, tl.float32)), MIN_SCALE)
    is_finite = tl.min((tl.abs(x) <= LARGEST_FLOAT).to(tl.int32), axis=1) > 0
    scale = tl.where(is_finite, scale, float("nan"))
    zero = _code(-lo, scale, SMALLEST, SMALLEST, STEPS)
    code = _code(x, scale[:, None], zero[:, None], SMALLEST, STEPS)
    code = tl.where(is_finite[:, None], code, 0.0).to(tl.int32)
    if MODE == UINT4:
        pairs = tl.arange(0, DIM_BLOCK // 2)
        even, odd = tl.split(tl.reshape(code, (HEADS, DIM_BLOCK // 2, 2)))
        where = (block + offset * (DIM // 2))[:, None] + pairs[None, :]
        mask = is_kept[:, None] & (pairs < DIM // 2)[None, :]
        tl.store(cache_ptr + where, (even | (odd << 4)).to(tl.uint8), mask=mask)
    else:
        dims = tl.arange(0, DIM_BLOCK)
        where = (block + offset * DIM)[:, None] + dims[None, :]
        mask = is_kept[:, None] & (dims < DIM)[None, :]
        tl.store(cache_ptr + where, code.to(tl.int8), mask=mask)
    scales = _parameters(cache_ptr + block, SPAN_SIZE, DIM, MODE) + offset
    tl.store(scales, scale, mask=is_kept)
    tl.store(scales + SPAN_SIZE, zero, mask=is_kept)
