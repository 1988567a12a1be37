"""Rotary embedding of q and k fused with the write of k and v to the span cache."""

import itertools

import torch
import triton
import triton.language as tl

from ..kv_format import CacheMode
from .kv_quant import PLAIN, POINTERS, aot_cache, aot_suffix, cache_constants, store_rows
from .variant import Variant, next_power_of_2

NUM_WARPS = 4
# Heads times dimensions of one program's tile.
TILE_ELEMENTS = 1024


@triton.jit
def _turn(x_ptr, out_ptr, source, target, mask, cos, sin, HALF: tl.constexpr):
    """Rotate the pairs (x[i], x[i + HALF]) of a tile of heads."""
    low = tl.load(x_ptr + source, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(x_ptr + source + HALF, mask=mask, other=0.0).to(tl.float32)
    kind = out_ptr.dtype.element_ty
    tl.store(out_ptr + target, (low * cos - high * sin).to(kind), mask=mask)
    tl.store(out_ptr + target + HALF, (high * cos + low * sin).to(kind), mask=mask)


@triton.jit
def _turned_row(row_ptr, angle_ptr, dims, mask, ROTARY_DIM: tl.constexpr):
    """Whole rotated heads [heads, DIM_BLOCK] in float32, 0 where masked: a scale needs all of a head."""
    HALF: tl.constexpr = ROTARY_DIM // 2
    is_turned = dims < ROTARY_DIM
    is_low = dims < HALF
    partner = tl.where(is_low, dims + HALF, dims - HALF)
    own = tl.load(row_ptr + dims, mask=mask, other=0.0).to(tl.float32)
    other = tl.load(row_ptr + partner, mask=mask & is_turned, other=0.0).to(tl.float32)
    pair = tl.where(is_low, dims, dims - HALF)
    cos = tl.load(angle_ptr + pair, mask=is_turned, other=1.0)
    sin = tl.load(angle_ptr + HALF + pair, mask=is_turned, other=0.0)
    return tl.where(is_low, own * cos - other * sin, own * cos + other * sin)


@triton.jit
def rotary_kv_write_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    cos_sin_ptr,
    positions_ptr,
    slots_ptr,
    k_cache_ptr,
    v_cache_ptr,
    q_stride,
    k_stride,
    v_stride,
    NUM_Q_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    SPAN_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    MODE: tl.constexpr,
    ROW_WIDTH: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    Q_GROUPS: tl.constexpr = (NUM_Q_HEADS + HEADS - 1) // HEADS
    HALF: tl.constexpr = ROTARY_DIM // 2
    position = tl.load(positions_ptr + token)
    pairs = tl.arange(0, HALF_BLOCK)
    angles = cos_sin_ptr + position * ROTARY_DIM + pairs
    cos = tl.load(angles, mask=pairs < HALF, other=0.0)[None, :]
    sin = tl.load(angles + HALF, mask=pairs < HALF, other=0.0)[None, :]
    if group < Q_GROUPS:
        q_heads = group * HEADS + tl.arange(0, HEADS)
        q_mask = (q_heads < NUM_Q_HEADS)[:, None] & (pairs < HALF)[None, :]
        q_where = token * q_stride + q_heads[:, None] * DIM + pairs[None, :]
        _turn(q_ptr, q_ptr, q_where, q_where, q_mask, cos, sin, HALF)
    else:
        slot = tl.load(slots_ptr + token)
        heads = (group - Q_GROUPS) * HEADS + tl.arange(0, HEADS)
        is_kept = (heads < tl.where(slot >= 0, NUM_KV_HEADS, 0))[:, None]
        span, offset = slot // SPAN_SIZE, slot % SPAN_SIZE
        fresh = heads[:, None] * DIM
        dims = tl.arange(0, DIM_BLOCK)[None, :]
        mask = is_kept & (dims < DIM)
        value = tl.load(v_ptr + token * v_stride + fresh + dims, mask=mask, other=0.0)
        if MODE == PLAIN:
            cached = ((span * NUM_KV_HEADS + heads) * SPAN_SIZE + offset)[:, None] * DIM
            half_mask = is_kept & (pairs < HALF)[None, :]
            source = token * k_stride + fresh + pairs[None, :]
            _turn(k_ptr, k_cache_ptr, source, cached + pairs[None, :], half_mask, cos, sin, HALF)
            if ROTARY_DIM < DIM:
                rest_mask = mask & (dims >= ROTARY_DIM)
                rest = tl.load(k_ptr + token * k_stride + fresh + dims, mask=rest_mask, other=0.0)
                tl.store(k_cache_ptr + cached + dims, rest.to(k_cache_ptr.dtype.element_ty), mask=rest_mask)
            tl.store(v_cache_ptr + cached + dims, value.to(v_cache_ptr.dtype.element_ty), mask=mask)
        else:
            block = (span * NUM_KV_HEADS + heads) * (SPAN_SIZE * ROW_WIDTH)
            is_written = heads < tl.where(slot >= 0, NUM_KV_HEADS, 0)
            angle = cos_sin_ptr + position * ROTARY_DIM
            key = _turned_row(k_ptr + token * k_stride + fresh, angle, dims, mask, ROTARY_DIM)
            store_rows(k_cache_ptr, block, offset, key, is_written, DIM, DIM_BLOCK, HEADS, SPAN_SIZE, MODE)
            store_rows(
                v_cache_ptr, block, offset, value.to(tl.float32), is_written,
                DIM, DIM_BLOCK, HEADS, SPAN_SIZE, MODE,
            )  # fmt: skip


def _constants(q_heads: int, kv_heads: int, dim: int, rotary_dim: int, span_size: int) -> dict[str, int]:
    dim_block = next_power_of_2(dim)
    return {
        "NUM_Q_HEADS": q_heads,
        "NUM_KV_HEADS": kv_heads,
        "DIM": dim,
        "ROTARY_DIM": rotary_dim,
        "SPAN_SIZE": span_size,
        "HEADS": min(max(1, TILE_ELEMENTS // dim_block), next_power_of_2(kv_heads)),
        "HALF_BLOCK": next_power_of_2(rotary_dim // 2),
        "DIM_BLOCK": dim_block,
    }


def rotary_kv_write(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
) -> None:
    """Rotate q [T, Hq, D] in place; store rotated k and v [T, Hk, D] at slots >= 0 of the cache."""
    num_tokens, q_heads, dim = q.shape
    if num_tokens == 0:
        return
    kv_heads, span_size = k_cache.shape[1], k_cache.shape[2]
    constants = _constants(q_heads, kv_heads, dim, cos_sin.shape[1], span_size)
    heads = constants["HEADS"]
    grid = (num_tokens, triton.cdiv(q_heads, heads) + triton.cdiv(kv_heads, heads))
    rotary_kv_write_kernel[grid](
        q,
        k,
        v,
        cos_sin,
        positions,
        slots,
        k_cache,
        v_cache,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        **cache_constants(k_cache),
        **constants,
        num_warps=NUM_WARPS,
    )


def variants(_arch: str) -> list[Variant]:
    """Compilations to check: each dtype, whole and partial rotation, odd head sizes."""
    shapes = ((32, 8, 128, 128, 32), (32, 8, 80, 32, 16))
    found = []
    for mode, dtype in itertools.product(CacheMode, (torch.bfloat16, torch.float32)):
        for q_heads, kv_heads, dim, rotary_dim, span_size in shapes:
            pointer = POINTERS[dtype]
            cache, stored = aot_cache(mode, dtype, dim)
            types = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr"), pointer)
            types |= {"k_cache_ptr": cache, "v_cache_ptr": cache}
            types |= {"cos_sin_ptr": "*fp32", "positions_ptr": "*i64", "slots_ptr": "*i64"}
            types |= {"q_stride": "i32", "k_stride": "i32", "v_stride": "i32"}
            shape = f"{pointer[1:]},Hq={q_heads},Hk={kv_heads},D={dim},R={rotary_dim}"
            found.append(
                Variant(
                    name=f"rotary_kv_write{aot_suffix(mode)}[{shape}]",
                    kernel=rotary_kv_write_kernel,
                    types=types,
                    constants={**_constants(q_heads, kv_heads, dim, rotary_dim, span_size), **stored},
                    num_warps=NUM_WARPS,
                    aligned=("q_stride", "k_stride", "v_stride"),
                )
            )
    return found
