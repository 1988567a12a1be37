"""Paged decode attention, split over the KV length ("flash decoding", Dao et al., 2023).

A work item is a row (one query token) and a split (SPLIT_KEYS keys); all query heads of a KV head share
the keys in one matrix product (grouped-query attention, Ainslie et al., 2023). A fixed number of programs
walks the item list, so short rows cost nothing and the launch is the same for every step. The merge
kernel folds a row's splits in order. Split length and order are fixed: a row's result depends on its own
keys only.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from ..kv_format import CacheMode, cache_mode_of
from ..plan import AttentionPlan
from .attention_plan import MIN_DOT_ROWS, SPLIT_KEYS, DecodeWork, DeviceWork
from .kv_quant import aot_cache, aot_suffix, cache_constants, load_rows
from .product import AOT_DTYPES, SUM, product_constants, soft_capped, softmax_factors
from .variant import Variant, arch_of, next_power_of_2

BLOCK_KEYS = 64
MERGE_BLOCK = 16
MERGE_WARPS = 4


@triton.jit
def decode_split_kernel(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    rows_ptr,
    items_ptr,
    lists_ptr,
    sums_ptr,
    tops_ptr,
    totals_ptr,
    q_stride,
    scale,
    window,
    cap_factor,
    soft_cap,
    NUM_KV_HEADS: tl.constexpr,
    RATIO: tl.constexpr,
    RATIO_BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    SPAN_SIZE: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    MODE: tl.constexpr,
    ROW_WIDTH: tl.constexpr,
):
    kv_head = tl.program_id(1)
    dims = tl.arange(0, DIM_BLOCK)
    is_dim = dims < DIM
    group = tl.arange(0, RATIO_BLOCK)
    is_head = group < RATIO
    heads = kv_head * RATIO + group
    keys = tl.arange(0, BLOCK)
    zero = tl.zeros((RATIO_BLOCK, BLOCK), SUM)
    num_items = tl.load(lists_ptr)
    spans_ptr = lists_ptr + tl.load(lists_ptr + 1)
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        row = tl.load(items_ptr + item * 2)
        start = tl.load(items_ptr + item * 2 + 1) * SPLIT
        token = tl.load(rows_ptr + row * 4).to(tl.int64)
        table = spans_ptr + tl.load(rows_ptr + row * 4 + 1)
        num_keys = tl.load(rows_ptr + row * 4 + 2)
        end = tl.minimum(num_keys, start + SPLIT)
        if HAS_WINDOW:
            # Blocks begin where they would without a window; the merge leaves out splits before it.
            first_key = tl.maximum(num_keys - window, 0)
            start = tl.maximum(start, first_key // BLOCK * BLOCK)
        q_where = token * q_stride + heads[:, None] * DIM + dims[None, :]
        q = tl.load(q_ptr + q_where, mask=is_head[:, None] & is_dim[None, :], other=0.0).to(OPERAND)
        top = tl.full((RATIO_BLOCK,), float("-inf"), tl.float32)
        total = tl.zeros((RATIO_BLOCK,), tl.float32)
        sums = tl.zeros((RATIO_BLOCK, DIM_BLOCK), tl.float32)
        for block in range(start, end, BLOCK):
            position = block + keys
            is_key = position < end
            span = tl.load(table + position // SPAN_SIZE, mask=is_key, other=0).to(tl.int64)
            cached = (span * NUM_KV_HEADS + kv_head) * (SPAN_SIZE * ROW_WIDTH)
            offset = position % SPAN_SIZE
            k = load_rows(k_cache_ptr, cached, offset, is_key, DIM, DIM_BLOCK, SPAN_SIZE, OPERAND, MODE)
            v = load_rows(v_cache_ptr, cached, offset, is_key, DIM, DIM_BLOCK, SPAN_SIZE, OPERAND, MODE)
            scores = tl.dot(q, tl.trans(k), zero, input_precision=PRECISION).to(tl.float32)
            if HAS_CAP:
                scores = soft_capped(scores, cap_factor, soft_cap)
            if HAS_WINDOW:
                is_key = is_key & (position >= first_key)
            scores = tl.where(is_key[None, :], scores, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, axis=1))
            weights = tl.exp2((scores - new_top[:, None]) * scale)
            decay = tl.exp2((top - new_top) * scale)
            total = tl.fma(total, decay, tl.sum(weights, axis=1))
            kept = (sums * decay[:, None]).to(SUM)
            sums = tl.dot(weights.to(OPERAND), v, kept, input_precision=PRECISION).to(tl.float32)
            top = new_top
        out = item * (NUM_KV_HEADS * RATIO) + heads.to(tl.int64)
        tl.store(tops_ptr + out, top * scale, mask=is_head)
        tl.store(totals_ptr + out, total, mask=is_head)
        tl.store(sums_ptr + out[:, None] * DIM + dims[None, :], sums, mask=is_head[:, None] & is_dim[None, :])


@triton.jit
def decode_merge_kernel(
    rows_ptr,
    sums_ptr,
    tops_ptr,
    totals_ptr,
    out_ptr,
    NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, head = tl.program_id(0), tl.program_id(1)
    dims = tl.arange(0, DIM_BLOCK)
    is_dim = dims < DIM
    token = tl.load(rows_ptr + row * 4).to(tl.int64)
    num_splits = tl.cdiv(tl.load(rows_ptr + row * 4 + 2), SPLIT)
    first = tl.load(rows_ptr + row * 4 + 3).to(tl.int64)
    top = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    sums = tl.zeros((DIM_BLOCK,), tl.float32)
    for start in range(0, num_splits, BLOCK):
        splits = start + tl.arange(0, BLOCK)
        is_split = splits < num_splits
        part = (first + splits) * NUM_HEADS + head
        part_top = tl.load(tops_ptr + part, mask=is_split, other=float("-inf"))
        part_total = tl.load(totals_ptr + part, mask=is_split, other=0.0)
        mask = is_split[:, None] & is_dim[None, :]
        part_sums = tl.load(sums_ptr + part[:, None] * DIM + dims[None, :], mask=mask, other=0.0)
        new_top = tl.maximum(top, tl.max(part_top, axis=0))
        # Splits outside the row's window left -inf behind: they must weigh 0, not NaN.
        anchor = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(part_top - anchor)
        decay = tl.exp2(top - anchor)
        total = tl.fma(total, decay, tl.sum(weights * part_total, axis=0))
        sums = tl.fma(sums, decay, tl.sum(weights[:, None] * part_sums, axis=0))
        top = new_top
    # A padding row of a reserved plan has no keys: its output is zero.
    result = tl.where(total > 0.0, sums / tl.where(total > 0.0, total, 1.0), 0.0)
    where = (token * NUM_HEADS + head) * DIM + dims
    tl.store(out_ptr + where, result.to(out_ptr.dtype.element_ty), mask=is_dim)


def _config(
    arch: str, dtype: torch.dtype, head_dim: int, ratio: int, mode: CacheMode
) -> tuple[dict[str, Any], dict[str, int]]:
    """Constants and launch options of the split kernel: as many keys a step as registers hold."""
    is_float32 = dtype == torch.float32
    dim_block = max(16, next_power_of_2(head_dim))
    block = BLOCK_KEYS // 2 if is_float32 else BLOCK_KEYS
    block = block // 2 if dim_block > 128 or (ratio > MIN_DOT_ROWS and arch.startswith("gfx")) else block
    if mode != CacheMode.DEFAULT:  # codes pass through registers on their way to the product
        block = max(MIN_DOT_ROWS, block // 2)
    constants = {
        "RATIO": ratio,
        "RATIO_BLOCK": max(MIN_DOT_ROWS, next_power_of_2(ratio)),
        "DIM": head_dim,
        "DIM_BLOCK": dim_block,
        "SPLIT": SPLIT_KEYS,
        "BLOCK": block,
        **product_constants(arch, dtype),
    }
    is_wide = is_float32 or (dim_block > 128 and not arch.startswith("gfx"))
    is_deep = not is_float32 and not arch.startswith("gfx") and mode != CacheMode.UINT4
    return constants, {"num_warps": 8 if is_wide else 4, "num_stages": 3 if is_deep else 2}


def decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    plan: AttentionPlan,
    scale: float,
    out: torch.Tensor,
    window: int,
    soft_cap: float,
) -> None:
    """Fill the rows of ``out`` [T, Hq, D] that belong to the plan's decode work."""
    state: DeviceWork = plan.state
    work = state.decode
    assert work is not None
    space = work.workspace
    ratio = plan.num_q_heads // plan.num_kv_heads
    constants, options = _config(arch_of(q.device), q.dtype, plan.head_dim, ratio, cache_mode_of(k_cache))
    exponent_factor, cap_factor = softmax_factors(scale, soft_cap)
    if work.num_programs:
        decode_split_kernel[(work.num_programs, plan.num_kv_heads)](
            q,
            k_cache,
            v_cache,
            work.rows,
            work.items,
            state.lists,
            space.sums,
            space.tops,
            space.totals,
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
    _merge(work, plan, constants["DIM_BLOCK"], out)


def _merge(work: DecodeWork, plan: AttentionPlan, dim_block: int, out: torch.Tensor) -> None:
    space = work.workspace
    decode_merge_kernel[(work.num_rows, plan.num_q_heads)](
        work.rows,
        space.sums,
        space.tops,
        space.totals,
        out,
        NUM_HEADS=plan.num_q_heads,
        DIM=plan.head_dim,
        DIM_BLOCK=dim_block,
        SPLIT=SPLIT_KEYS,
        BLOCK=MERGE_BLOCK,
        num_warps=MERGE_WARPS,
    )


# dtype, query heads per KV head, KV heads, head size, span size, whether with window and soft cap.
AOT_SHAPES = (
    ("bf16", 8, 8, 128, 32, False),
    ("bf16", 3, 3, 64, 32, False),
    ("bf16", 1, 32, 80, 16, False),
    ("bf16", 4, 8, 256, 128, False),
    ("fp16", 8, 8, 128, 16, False),
    ("fp32", 3, 3, 64, 32, False),
    ("fp32", 8, 8, 128, 32, False),
    ("fp32", 4, 8, 256, 128, False),
    ("bf16", 2, 4, 256, 32, True),
    ("bf16", 48, 1, 128, 32, False),
)
SCORE_TYPES = {"scale": "fp32", "window": "i32", "cap_factor": "fp32", "soft_cap": "fp32"}
# The plain cache in every shape, the quantised ones in those that differ. Not among them: float32 heads of
# 256, where the quantised kernels spill up to 250 bytes on NVIDIA (their blocks cannot be smaller).
AOT_CACHES = tuple((CacheMode.DEFAULT, *shape) for shape in AOT_SHAPES) + tuple(
    (mode, *AOT_SHAPES[index]) for mode in (CacheMode.INT8, CacheMode.UINT4) for index in (0, 2, 3, 4, 6, 8)
)
WORK_TYPES = {"rows_ptr": "*i32", "sums_ptr": "*fp32", "tops_ptr": "*fp32", "totals_ptr": "*fp32"}


def variants(arch: str) -> list[Variant]:
    """Compilations to check: each dtype and typical head shapes."""
    found = []
    lists = {"items_ptr": "*i32", "lists_ptr": "*i32"}
    sizes = {"q_stride": "i32", **SCORE_TYPES}
    for mode, dtype, ratio, kv_heads, dim, span_size, is_local in AOT_CACHES:
        constants, options = _config(arch, AOT_DTYPES[dtype], dim, ratio, mode)
        cache, stored = aot_cache(mode, AOT_DTYPES[dtype], dim)
        shape = f"{dtype},G={ratio},Hk={kv_heads},D={dim},S={span_size},window={is_local}"
        tensors = {"q_ptr": f"*{dtype}", "k_cache_ptr": cache, "v_cache_ptr": cache}
        found.append(
            Variant(
                name=f"decode_split{aot_suffix(mode)}[{shape}]",
                kernel=decode_split_kernel,
                types={**tensors, **WORK_TYPES, **lists, **sizes},
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
    return found + [_merge_variant(dim) for dim in (64, 80, 256)]


def _merge_variant(dim: int) -> Variant:
    tile = {"DIM": dim, "DIM_BLOCK": next_power_of_2(dim), "SPLIT": SPLIT_KEYS, "BLOCK": MERGE_BLOCK}
    return Variant(
        name=f"decode_merge[bf16,D={dim}]",
        kernel=decode_merge_kernel,
        types={**WORK_TYPES, "out_ptr": "*bf16"},
        constants={**tile, "NUM_HEADS": 32},
        num_warps=MERGE_WARPS,
    )
