"""Linear layer y = x W^T + b on tensor cores, with results that do not depend on the number of rows.

K is cut into splits of a fixed length. Each split is summed by the matrix unit in blocks of BLOCK_K; the
splits are then added in order, in float32. A large batch adds them inside one program; a small one gives
every split its own program (that is what fills a GPU when there are few rows) and a second kernel adds
the parts in the same order. Tile height is the only thing that varies, and it does not enter any sum.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from ..quantised import QuantisedWeight
from ..types import PackedLinear
from .product import AOT_DTYPES, SUM, product_constants
from .variant import Variant, arch_of
from .weight_tile import PLAIN, Layout, form_constants, lay_out, plain_constants, tile_arguments, weight_tile

# Up to this many rows every split of K gets its own program.
FEW_ROWS = 64
GROUP_ROWS = 8
# Length of a split of K. It decides how sums are grouped.
SPLIT_K = 1024


@triton.jit
def _split_sum(
    x_rows,
    w_ptr,
    scales_ptr,
    offsets_ptr,
    columns,
    row_mask,
    column_mask,
    start,
    K,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
    FORM: tl.constexpr,
    SCALE_GROUP: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    acc,
):
    """Sum of x w^T over K in [start, start + SPLIT_K), in blocks of BLOCK_K."""
    ks = tl.arange(0, BLOCK_K)
    for k in range(start, min(start + SPLIT_K, K), BLOCK_K):
        inside = k + ks < K
        x = tl.load(x_rows + (k + ks)[None, :], mask=row_mask[:, None] & inside[None, :], other=0.0)
        w = weight_tile(
            w_ptr, scales_ptr, offsets_ptr, columns, column_mask, k + ks, K,
            FORM, SCALE_GROUP, HAS_OFFSET, OPERAND,
        )  # fmt: skip
        part = tl.dot(x.to(OPERAND), w, acc.to(SUM), input_precision=PRECISION)
        acc = part.to(tl.float32)
    return acc


@triton.jit(do_not_specialize=["M"])
def linear_kernel(
    x_ptr,
    w_ptr,
    scales_ptr,
    offsets_ptr,
    bias_ptr,
    out_ptr,
    M,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_PARTIAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GROUP: tl.constexpr,
    FORM: tl.constexpr,
    SCALE_GROUP: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
):
    # Neighbouring programs share rows of W: GROUP row tiles are walked before the next column tile.
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    program = tl.program_id(0)
    group = program // (GROUP * tiles_n)
    height = min(tiles_m - group * GROUP, GROUP)
    tile_m = group * GROUP + (program % (GROUP * tiles_n)) % height
    tile_n = (program % (GROUP * tiles_n)) // height
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    row_mask, column_mask = rows < M, columns < N
    x_rows = x_ptr + rows.to(tl.int64)[:, None] * K
    w_columns = columns.to(tl.int64)
    mask = row_mask[:, None] & column_mask[None, :]
    where = rows.to(tl.int64)[:, None] * N + columns[None, :]
    zero = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if IS_PARTIAL:
        split = tl.program_id(1)
        part = _split_sum(
            x_rows,
            w_ptr,
            scales_ptr,
            offsets_ptr,
            w_columns,
            row_mask,
            column_mask,
            split * SPLIT_K,
            K,
            BLOCK_K,
            SPLIT_K,
            OPERAND,
            PRECISION,
            FORM,
            SCALE_GROUP,
            HAS_OFFSET,
            zero,
        )
        tl.store(out_ptr + split.to(tl.int64) * M * N + where, part, mask=mask)
    else:
        total = _split_sum(
            x_rows, w_ptr, scales_ptr, offsets_ptr, w_columns, row_mask, column_mask, 0, K,
            BLOCK_K, SPLIT_K, OPERAND, PRECISION, FORM, SCALE_GROUP, HAS_OFFSET, zero,
        )  # fmt: skip
        for start in range(SPLIT_K, K, SPLIT_K):
            total += _split_sum(
                x_rows, w_ptr, scales_ptr, offsets_ptr, w_columns, row_mask, column_mask, start, K,
                BLOCK_K, SPLIT_K, OPERAND, PRECISION, FORM, SCALE_GROUP, HAS_OFFSET, zero,
            )  # fmt: skip
        if HAS_BIAS:
            total += tl.load(bias_ptr + columns, mask=column_mask, other=0.0).to(tl.float32)[None, :]
        tl.store(out_ptr + where, total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M", "num_splits"])
def linear_reduce_kernel(
    parts_ptr, bias_ptr, out_ptr, M, N, num_splits, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < N
    part = parts_ptr + row * N + columns
    total = tl.load(part, mask=mask, other=0.0)
    for _ in range(1, num_splits):
        part += M.to(tl.int64) * N
        total += tl.load(part, mask=mask, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * N + columns, total.to(out_ptr.dtype.element_ty), mask=mask)


REDUCE_BLOCK = 1024
REDUCE_WARPS = 4


def _config(
    arch: str, dtype: torch.dtype, few_rows: bool, is_quantised: bool = False
) -> tuple[dict[str, Any], dict[str, int]]:
    """Constants and launch options. BLOCK_N, BLOCK_K and SPLIT_K are the same for every number of rows."""
    if dtype == torch.float32:
        shape, options = (64, 64, 16), {"num_warps": 4, "num_stages": 2}
    else:
        # One warp group of a Hopper GPU multiplies 64 rows: 4 warps take 64, 8 warps take 128.
        # Widening codes takes registers: half the columns then.
        columns = 64 if is_quantised else 128
        shape = (64 if few_rows else 128, columns, 64)
        stages = 2 if arch.startswith("gfx") or is_quantised else 4 if few_rows else 3
        options = {"num_warps": 4 if few_rows else 8, "num_stages": stages}
    names = ("BLOCK_M", "BLOCK_N", "BLOCK_K")
    constants = dict(zip(names, shape, strict=True))
    return {**constants, "SPLIT_K": SPLIT_K, "GROUP": GROUP_ROWS, **product_constants(arch, dtype)}, options


def pack_linear(weight: torch.Tensor, bias: torch.Tensor | None, rounds_inputs: bool) -> PackedLinear:
    """Keep the weight row-major [N, K]: both operands of the product then stream along K.

    `rounds_inputs` needs nothing here: ``linear`` takes x in the weight's dtype only.
    """
    layout = weight.detach().contiguous()
    kept_bias = None if bias is None else bias.detach().contiguous()
    return PackedLinear(
        in_features=weight.shape[1],
        out_features=weight.shape[0],
        dtype=weight.dtype,
        device=weight.device,
        nbytes=layout.nbytes + (0 if kept_bias is None else kept_bias.nbytes),
        backend="triton",
        layout=layout,
        bias=kept_bias,
        unpacker=_unpack,
    )


def pack_quantised(weight: QuantisedWeight, bias: torch.Tensor | None) -> PackedLinear:
    """Keep the codes row-major; they are widened in the tile."""
    layout = lay_out(weight)
    kept_bias = None if bias is None else bias.detach().contiguous()
    return PackedLinear(
        in_features=weight.codes.shape[1],
        out_features=weight.codes.shape[0],
        dtype=torch.float32,
        device=weight.codes.device,
        nbytes=layout.nbytes + (0 if kept_bias is None else kept_bias.nbytes),
        backend="triton",
        layout=layout,
        bias=kept_bias,
        unpacker=_unpack,
    )


def _unpack(packed: PackedLinear) -> torch.Tensor:
    layout: Layout = packed.layout
    return layout.clone() if isinstance(layout, torch.Tensor) else layout.dequantise()


def linear(x: torch.Tensor, w: PackedLinear, out: torch.Tensor | None) -> torch.Tensor:
    """x [T, K] -> [T, N]."""
    m, k = x.shape
    n = w.out_features
    if out is None:
        out = torch.empty((m, n), dtype=x.dtype, device=x.device)
    if m == 0:
        return out
    few_rows = m <= FEW_ROWS
    weights, form = tile_arguments(w.layout)
    tile, options = _config(arch_of(x.device), x.dtype, few_rows, form["FORM"] != PLAIN)
    tiles = triton.cdiv(m, tile["BLOCK_M"]) * triton.cdiv(n, tile["BLOCK_N"])
    num_splits = triton.cdiv(k, tile["SPLIT_K"])
    has_bias = w.bias is not None
    bias = w.bias if w.bias is not None else weights[0]
    if not few_rows or num_splits == 1:
        linear_kernel[(tiles,)](
            x, *weights, bias, out, m, n, k, **tile, IS_PARTIAL=False, HAS_BIAS=has_bias, **form, **options
        )
        return out
    parts = torch.empty((num_splits, m, n), dtype=torch.float32, device=x.device)
    linear_kernel[(tiles, num_splits)](
        x, *weights, bias, parts, m, n, k, **tile, IS_PARTIAL=True, HAS_BIAS=False, **form, **options
    )
    linear_reduce_kernel[(m, triton.cdiv(n, REDUCE_BLOCK))](
        parts, bias, out, m, n, num_splits, BLOCK=REDUCE_BLOCK, HAS_BIAS=has_bias, num_warps=REDUCE_WARPS
    )
    return out


# Few rows, partial sums, bias.
AOT_LAUNCHES = ((False, False, True), (True, False, True), (True, True, False))


# Activations, few rows, bits, group, offsets.
AOT_FORMS = (
    ("bf16", False, 8, 0, False),
    ("bf16", True, 8, 0, False),
    ("bf16", False, 4, 128, True),
    ("bf16", False, 4, 32, True),
    ("bf16", True, 4, 32, True),
    ("fp32", True, 4, 64, True),
)


def _quantised_variant(
    arch: str, dtype: str, few_rows: bool, bits: int, group: int, has_offset: bool
) -> Variant:
    tile, options = _config(arch, AOT_DTYPES[dtype], few_rows, True)
    types = dict.fromkeys(("x_ptr", "bias_ptr"), f"*{dtype}") | {"M": "i32", "N": "i32", "K": "i32"}
    types |= {"w_ptr": "*i8" if bits == 8 else "*u8", "out_ptr": "*fp32" if few_rows else f"*{dtype}"}
    types |= dict.fromkeys(("scales_ptr", "offsets_ptr"), "*fp16" if group else "*fp32")
    form = form_constants(bits, group, has_offset)
    return Variant(
        name=f"linear[{dtype},bits={bits},group={group},BLOCK_M={tile['BLOCK_M']},partial={few_rows}]",
        kernel=linear_kernel,
        types=types,
        constants={**tile, "IS_PARTIAL": few_rows, "HAS_BIAS": not few_rows, **form},
        **options,
        is_matrix_product=True,
        aligned=("N", "K"),
    )


def variants(arch: str) -> list[Variant]:
    """Compilations to check: each dtype, many and few rows, and the sum over the splits."""
    found = []
    for dtype, launches in (("bf16", AOT_LAUNCHES), ("fp16", AOT_LAUNCHES[:1]), ("fp32", AOT_LAUNCHES[1:])):
        types = dict.fromkeys(("x_ptr", "w_ptr", "scales_ptr", "offsets_ptr", "bias_ptr"), f"*{dtype}")
        types |= {"M": "i32", "N": "i32", "K": "i32"}
        for few_rows, is_partial, has_bias in launches:
            tile, options = _config(arch, AOT_DTYPES[dtype], few_rows)
            found.append(
                Variant(
                    name=f"linear[{dtype},BLOCK_M={tile['BLOCK_M']},partial={is_partial}]",
                    kernel=linear_kernel,
                    types={**types, "out_ptr": "*fp32" if is_partial else f"*{dtype}"},
                    constants={**tile, "IS_PARTIAL": is_partial, "HAS_BIAS": has_bias, **plain_constants()},
                    **options,
                    is_matrix_product=True,
                    aligned=("N", "K"),
                )
            )
    found += [_quantised_variant(arch, *form) for form in AOT_FORMS]
    sizes = {"M": "i32", "N": "i32", "num_splits": "i32"}
    found.append(
        Variant(
            name="linear_reduce[bf16]",
            kernel=linear_reduce_kernel,
            types={"parts_ptr": "*fp32", "bias_ptr": "*bf16", "out_ptr": "*bf16", **sizes},
            constants={"BLOCK": REDUCE_BLOCK, "HAS_BIAS": True},
            num_warps=REDUCE_WARPS,
            aligned=("N",),
        )
    )
    return found
