"""Paged prefill attention over ragged, chunked prompts (flash attention, Dao, 2023).

A tile is a run of query tokens of one request times the query heads that share a KV head: short chunks
still fill the matrix unit, and keys are read once per KV head. A row sees the keys in fixed blocks from
position 0, whichever tile or chunk it stands in; a block past the row's own position changes nothing in
it (weights 0, decay 1). So the cut into chunks does not show in the result.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from ..kv_format import CacheMode, cache_mode_of
from ..plan import AttentionPlan
from .attention_plan import MIN_DOT_ROWS, DeviceWork, tile_rows
from .decode_attention import AOT_CACHES, SCORE_TYPES
from .kv_quant import aot_cache, aot_suffix, cache_constants, load_rows
from .product import AOT_DTYPES, SUM, product_constants, soft_capped, softmax_factors
from .variant import Variant, arch_of, next_power_of_2


@triton.jit
def _attend(
    q,
    sums,
    top,
    total,
    row_position,
    k_head_ptr,
    v_head_ptr,
    table,
    begin,
    end,
    num_keys,
    scale,
    window,
    cap_factor,
    soft_cap,
    span_stride,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    SPAN_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
    MODE: tl.constexpr,
    IS_MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
):
    """Online softmax over the keys [begin, end). Products and sums are the same with and without mask."""
    keys = tl.arange(0, BLOCK)
    zero = tl.zeros((ROWS, BLOCK), SUM)
    for block in range(begin, end, BLOCK):
        position = block + keys
        is_key = position < num_keys
        span = tl.load(table + position // SPAN_SIZE, mask=is_key, other=0).to(tl.int64)
        cached, offset = span * span_stride, position % SPAN_SIZE
        k = load_rows(k_head_ptr, cached, offset, is_key, DIM, DIM_BLOCK, SPAN_SIZE, OPERAND, MODE)
        v = load_rows(v_head_ptr, cached, offset, is_key, DIM, DIM_BLOCK, SPAN_SIZE, OPERAND, MODE)
        scores = tl.dot(q, tl.trans(k), zero, input_precision=PRECISION).to(tl.float32)
        if HAS_CAP:
            scores = soft_capped(scores, cap_factor, soft_cap)
        if IS_MASKED:
            scores = tl.where(position[None, :] <= row_position[:, None], scores, float("-inf"))
        if HAS_WINDOW:
            scores = tl.where(position[None, :] > row_position[:, None] - window, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        anchor = new_top
        if HAS_WINDOW:
            # Before its window begins a row has seen no key: its sums stay 0 instead of turning NaN.
            anchor = tl.where(new_top == float("-inf"), 0.0, new_top)
        # Subtract first: where the top stays, the decay is then exactly 1 and the block changes nothing.
        weights = tl.exp2((scores - anchor[:, None]) * scale)
        decay = tl.exp2((top - anchor) * scale)
        total = tl.fma(total, decay, tl.sum(weights, axis=1))
        kept = (sums * decay[:, None]).to(SUM)
        sums = tl.dot(weights.to(OPERAND), v, kept, input_precision=PRECISION).to(tl.float32)
        top = new_top
    return sums, top, total


@triton.jit
def prefill_kernel(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    out_ptr,
    tiles_ptr,
    lists_ptr,
    q_stride,
    scale,
    window,
    cap_factor,
    soft_cap,
    NUM_KV_HEADS: tl.constexpr,
    RATIO: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    SPAN_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    MODE: tl.constexpr,
    ROW_WIDTH: tl.constexpr,
):
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    first_token = tl.load(tiles_ptr + tile * 4).to(tl.int64)
    num_tokens = tl.load(tiles_ptr + tile * 4 + 1)
    table = lists_ptr + tl.load(lists_ptr + 1) + tl.load(tiles_ptr + tile * 4 + 2)
    first_position = tl.load(tiles_ptr + tile * 4 + 3)
    rows = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    first_index = tl.program_id(2) * ROWS // RATIO
    if first_index >= num_tokens:
        return
    last_index = tl.minimum((tl.program_id(2) * ROWS + ROWS - 1) // RATIO, num_tokens - 1)
    dims = tl.arange(0, DIM_BLOCK)
    index = rows // RATIO
    head = kv_head * RATIO + rows % RATIO
    mask = (index < num_tokens)[:, None] & (dims < DIM)[None, :]
    token = first_token + index
    q_where = token[:, None] * q_stride + (head * DIM)[:, None] + dims[None, :]
    q = tl.load(q_ptr + q_where, mask=mask, other=0.0).to(OPERAND)
    # Rows past the tile's end repeat its last position, so that they see a key and stay finite.
    row_position = first_position + tl.minimum(index, last_index)
    num_keys = first_position + last_index + 1
    begin = 0
    all_visible = (first_position + first_index + 1) // BLOCK * BLOCK
    if HAS_WINDOW:
        # No block is visible to all rows: the tile begins where its first row does, every block masked.
        begin = tl.maximum(first_position + first_index - window + 1, 0) // BLOCK * BLOCK
        all_visible = begin
    span_stride: tl.constexpr = NUM_KV_HEADS * SPAN_SIZE * ROW_WIDTH
    k_head_ptr = k_cache_ptr + kv_head * SPAN_SIZE * ROW_WIDTH
    v_head_ptr = v_cache_ptr + kv_head * SPAN_SIZE * ROW_WIDTH
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    sums = tl.zeros((ROWS, DIM_BLOCK), tl.float32)
    sums, top, total = _attend(
        q, sums, top, total, row_position, k_head_ptr, v_head_ptr, table, begin, all_visible, num_keys, scale,
        window, cap_factor, soft_cap, span_stride, ROWS, DIM, DIM_BLOCK, SPAN_SIZE, BLOCK, OPERAND, PRECISION,
        MODE, False, HAS_WINDOW, HAS_CAP,
    )  # fmt: skip
    sums, top, total = _attend(
        q, sums, top, total, row_position, k_head_ptr, v_head_ptr, table, all_visible, num_keys, num_keys,
        scale, window, cap_factor, soft_cap, span_stride, ROWS, DIM, DIM_BLOCK, SPAN_SIZE, BLOCK, OPERAND,
        PRECISION, MODE, True, HAS_WINDOW, HAS_CAP,
    )  # fmt: skip
    out_where = (token[:, None] * (NUM_KV_HEADS * RATIO) + head[:, None]) * DIM + dims[None, :]
    tl.store(out_ptr + out_where, (sums / total[:, None]).to(out_ptr.dtype.element_ty), mask=mask)


def _config(
    arch: str, dtype: torch.dtype, head_dim: int, ratio: int, is_adapted: bool, mode: CacheMode
) -> tuple[dict[str, Any], dict[str, int]]:
    """Constants and launch options: as many rows and keys a step as registers hold.

    ``is_adapted``: with a window or a soft cap, which take registers.
    """
    is_float32 = dtype == torch.float32
    dim_block = max(16, next_power_of_2(head_dim))
    rows, block, num_warps = 64, 64 if dim_block <= 64 or arch == "sm_90" else 32, 4
    if dim_block > 128:
        block, num_warps = 16 if is_adapted and arch.startswith("gfx") else 32, 8
    if is_float32:
        rows, block, num_warps = 16, 16 if dim_block > 128 else 32, 8
    if mode != CacheMode.DEFAULT:  # codes pass through registers on their way to the product
        block = max(MIN_DOT_ROWS, block // 2)
    constants = {
        "RATIO": ratio,
        "DIM": head_dim,
        "DIM_BLOCK": dim_block,
        "ROWS": rows,
        "BLOCK": block,
        **product_constants(arch, dtype),
    }
    return constants, {"num_warps": num_warps, "num_stages": 2}


def prefill_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    plan: AttentionPlan,
    scale: float,
    out: torch.Tensor,
    window: int,
    soft_cap: float,
) -> None:
    """Fill the rows of ``out`` [T, Hq, D] that belong to the plan's prefill work."""
    state: DeviceWork = plan.state
    work = state.prefill
    assert work is not None
    ratio = plan.num_q_heads // plan.num_kv_heads
    is_adapted = window > 0 or soft_cap > 0
    constants, options = _config(
        arch_of(q.device), q.dtype, plan.head_dim, ratio, is_adapted, cache_mode_of(k_cache)
    )
    exponent_factor, cap_factor = softmax_factors(scale, soft_cap)
    grid = (work.num_tiles, plan.num_kv_heads, tile_rows(ratio) // constants["ROWS"])
    prefill_kernel[grid](
        q,
        k_cache,
        v_cache,
        out,
        work.tiles,
        state.lists,
        q.stride(0),
        exponent_factor,
        window,
        cap_factor,
        soft_cap,
        NUM_KV_HEADS=plan.num_kv_heads,
        SPAN_SIZE=plan.span_size,
        HAS_WINDOW=window > 0,
        HAS_CAP=soft_cap > 0,
        **cache_constants(k_cache),
        **constants,
        **options,
    )


def variants(arch: str) -> list[Variant]:
    """Compilations to check: each dtype and typical head shapes."""
    found = []
    lists = {"tiles_ptr": "*i32", "lists_ptr": "*i32"}
    sizes = {"q_stride": "i32", **SCORE_TYPES}
    for mode, dtype, ratio, kv_heads, dim, span_size, is_local in AOT_CACHES:
        constants, options = _config(arch, AOT_DTYPES[dtype], dim, ratio, is_local, mode)
        cache, stored = aot_cache(mode, AOT_DTYPES[dtype], dim)
        shape = f"{dtype},G={ratio},Hk={kv_heads},D={dim},S={span_size},window={is_local}"
        tensors = dict.fromkeys(("k_cache_ptr", "v_cache_ptr"), cache)
        tensors |= dict.fromkeys(("q_ptr", "out_ptr"), f"*{dtype}")
        found.append(
            Variant(
                name=f"prefill{aot_suffix(mode)}[{shape}]",
                kernel=prefill_kernel,
                types={**tensors, **lists, **sizes},
                constants={
                    **constants,
                    **stored,
                    "NUM_KV_HEADS": kv_heads,
                    "SPAN_SIZE": span_size,
                    "HAS_WINDOW": is_local,
                    "HAS_CAP": is_local,
                },
                **options,
                is_matrix_product=True,
                aligned=("q_stride",),
            )
        )
    return found
