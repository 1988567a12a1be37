"""Mixture of experts: routing, a grouped product over tokens sorted by expert, and the weighted sum.

Pairs (token, choice) are sorted by expert and cut into tiles of one expert each; a program multiplies one
tile with one block of that expert's columns. The number of tiles depends on the data, so as many programs
are launched as there could be, and those without a tile end at once: nothing waits for the device. K is
summed in blocks of BLOCK_K in order. Every tile has one height, whatever the batch: a lower one would be
multiplied by another matrix instruction, which may add in another order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from ..experts import PackedExperts, Routing
from ..quantised import QuantisedWeight, Weight
from .product import AOT_DTYPES, SUM, product_constants
from .variant import Variant, arch_of, next_power_of_2
from .weight_tile import (
    PLAIN,
    form_constants,
    lay_out,
    plain_constants,
    stack_layouts,
    tile_arguments,
    weight_tile,
)

TILE_ROWS = 64
COMBINE_BLOCK, WARPS = 512, 4


@dataclass(frozen=True, slots=True, eq=False)
class SortedPairs:
    """order [T * k] int32: pairs by expert; tiles [n, 3] int32: expert, first index into order, pairs."""

    order: torch.Tensor
    tiles: torch.Tensor


@triton.jit
def route_kernel(
    logits_ptr, ids_ptr, weights_ptr, E, TOP_K: tl.constexpr, BLOCK: tl.constexpr, IS_NORMALISED: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, BLOCK)
    mask = experts < E
    logits = tl.load(logits_ptr + row * E + experts, mask=mask, other=float("-inf")).to(tl.float32)
    logits = tl.where(logits == logits, logits, float("-inf"))
    top = tl.max(logits, axis=0)
    top = tl.where(top == float("-inf"), 0.0, top)
    weights = tl.exp(logits - top)
    weights = weights / tl.sum(weights, axis=0)
    chosen = 1.0
    if IS_NORMALISED:
        chosen = 0.0
        free = mask
        for _ in tl.static_range(TOP_K):
            best = tl.max(tl.where(free, logits, float("-inf")), axis=0)
            expert = tl.min(tl.where(free & (logits == best), experts, BLOCK), axis=0)
            chosen += tl.sum(tl.where(experts == expert, weights, 0.0), axis=0)
            free = free & (experts != expert)
    free = mask
    for j in tl.static_range(TOP_K):
        best = tl.max(tl.where(free, logits, float("-inf")), axis=0)
        expert = tl.min(tl.where(free & (logits == best), experts, BLOCK), axis=0)
        weight = tl.sum(tl.where(experts == expert, weights, 0.0), axis=0)
        free = free & (experts != expert)
        tl.store(ids_ptr + row * TOP_K + j, expert)
        tl.store(weights_ptr + row * TOP_K + j, weight / chosen)


@triton.jit
def grouped_linear_kernel(
    x_ptr,
    w_ptr,
    scales_ptr,
    offsets_ptr,
    out_ptr,
    order_ptr,
    tiles_ptr,
    N,
    K,
    SHARE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
    FORM: tl.constexpr,
    SCALE_GROUP: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
):
    tile = tiles_ptr + tl.program_id(0) * 3
    count = tl.load(tile + 2)
    if count == 0:
        return
    expert, first = tl.load(tile).to(tl.int64), tl.load(tile + 1)
    within = tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_mask, column_mask = within < count, columns < N
    pairs = tl.load(order_ptr + first + within, mask=row_mask, other=0).to(tl.int64)
    x_rows = x_ptr + (pairs // SHARE)[:, None] * K
    w_rows = expert * N + columns
    ks = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        inside = k + ks < K
        x = tl.load(x_rows + (k + ks)[None, :], mask=row_mask[:, None] & inside[None, :], other=0.0)
        w = weight_tile(
            w_ptr, scales_ptr, offsets_ptr, w_rows, column_mask, k + ks, K,
            FORM, SCALE_GROUP, HAS_OFFSET, OPERAND,
        )  # fmt: skip
        part = tl.dot(x.to(OPERAND), w, acc.to(SUM), input_precision=PRECISION)
        acc = part.to(tl.float32)
    where = out_ptr + pairs[:, None] * N + columns[None, :]
    tl.store(where, acc.to(out_ptr.dtype.element_ty), mask=row_mask[:, None] & column_mask[None, :])


@triton.jit
def combine_kernel(
    parts_ptr,
    weights_ptr,
    shared_ptr,
    gate_ptr,
    out_ptr,
    H,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    HAS_GATE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < H
    total = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(TOP_K):
        weight = tl.load(weights_ptr + row * TOP_K + j)
        part = tl.load(parts_ptr + (row * TOP_K + j) * H + columns, mask=mask, other=0.0).to(tl.float32)
        total = tl.fma(part, weight, total)
    if HAS_SHARED:
        shared = tl.load(shared_ptr + row * H + columns, mask=mask, other=0.0).to(tl.float32)
        if HAS_GATE:
            shared = shared / (1.0 + tl.exp(-tl.load(gate_ptr + row).to(tl.float32)))
        total += shared
    tl.store(out_ptr + row * H + columns, total.to(out_ptr.dtype.element_ty), mask=mask)


def pack_experts(weights: Sequence[Weight], rounds_inputs: bool) -> PackedExperts:
    """Experts behind each other, row-major: [E, N, K]. Activations have the weights' dtype already."""
    first = weights[0]
    stored = first.codes if isinstance(first, QuantisedWeight) else first
    layout = stack_layouts([lay_out(weight) for weight in weights])
    return PackedExperts(
        num_experts=len(weights),
        in_features=stored.shape[1],
        out_features=stored.shape[0],
        dtype=torch.float32 if isinstance(first, QuantisedWeight) else stored.dtype,
        device=stored.device,
        nbytes=layout.nbytes,
        backend="triton",
        layout=layout,
        is_quantised=isinstance(first, QuantisedWeight),
    )


def route_experts(logits: torch.Tensor, top_k: int, is_normalised: bool) -> Routing:
    """logits [T, E] -> the top_k experts of each token, and the pairs sorted by expert."""
    tokens, num_experts = logits.shape
    ids = torch.empty((tokens, top_k), dtype=torch.int32, device=logits.device)
    weights = torch.empty((tokens, top_k), dtype=torch.float32, device=logits.device)
    if tokens:
        block = next_power_of_2(num_experts)
        route_kernel[(tokens,)](
            logits, ids, weights, num_experts, top_k, block, is_normalised, num_warps=WARPS
        )
    return Routing(ids, weights, num_experts, _sort_pairs(ids, num_experts))


def _sort_pairs(ids: torch.Tensor, num_experts: int) -> SortedPairs:
    """Tiles of at most TILE_ROWS pairs; their number is bounded by what every expert could begin."""
    pairs = ids.flatten()
    num_pairs = pairs.numel()
    order = torch.sort(pairs, stable=True).indices.int()
    counts = torch.zeros(num_experts, dtype=torch.int64, device=ids.device)
    counts.scatter_add_(0, pairs.long(), torch.ones_like(pairs, dtype=torch.int64))
    num_tiles = (counts + TILE_ROWS - 1) // TILE_ROWS
    last_tiles, last_pairs = num_tiles.cumsum(0), counts.cumsum(0)
    bound = min(num_pairs, num_experts + num_pairs // TILE_ROWS)
    tile = torch.arange(bound, device=ids.device)
    expert = torch.searchsorted(last_tiles, tile, right=True).clamp_(max=num_experts - 1)
    offset = (tile - (last_tiles - num_tiles)[expert]) * TILE_ROWS
    first = (last_pairs - counts)[expert] + offset
    count = (counts[expert] - offset).clamp_(0, TILE_ROWS)
    tiles = torch.stack((expert, first, count), 1).int().contiguous()
    return SortedPairs(order, tiles)


def _config(arch: str, dtype: torch.dtype, form: dict[str, Any]) -> tuple[dict[str, Any], dict[str, int]]:
    """Constants and launch options."""
    is_float32 = dtype == torch.float32
    is_quantised = form["FORM"] != PLAIN
    block_n, block_k = (64, 16) if is_float32 else (64 if is_quantised else 128, 64)
    constants = {
        "BLOCK_M": TILE_ROWS,
        "BLOCK_N": block_n,
        "BLOCK_K": block_k,
        **product_constants(arch, dtype),
    }
    return constants, {
        "num_warps": 4,
        "num_stages": 2 if is_float32 or is_quantised or arch.startswith("gfx") else 4,
    }


def grouped_linear(x: torch.Tensor, w: PackedExperts, routing: Routing) -> torch.Tensor:
    """x [T, K] or [T, k, K] -> [T, k, N]."""
    tokens, top_k = routing.ids.shape
    pairs: SortedPairs = routing.state
    out = torch.empty((tokens, top_k, w.out_features), dtype=x.dtype, device=x.device)
    weights, form = tile_arguments(w.layout)
    constants, options = _config(arch_of(x.device), x.dtype, form)
    if tokens:
        grid = (pairs.tiles.shape[0], triton.cdiv(w.out_features, constants["BLOCK_N"]))
        share = top_k if x.ndim == 2 else 1
        sizes = (w.out_features, w.in_features, share)
        grouped_linear_kernel[grid](
            x, *weights, out, pairs.order, pairs.tiles, *sizes, **constants, **form, **options
        )
    return out


def combine_experts(
    parts: torch.Tensor, routing: Routing, shared: torch.Tensor | None, shared_gate: torch.Tensor | None
) -> torch.Tensor:
    """parts [T, k, H] -> [T, H]; experts are added best first, the shared one last."""
    tokens, top_k, width = parts.shape
    out = torch.empty((tokens, width), dtype=parts.dtype, device=parts.device)
    if tokens:
        combine_kernel[(tokens, triton.cdiv(width, COMBINE_BLOCK))](
            parts,
            routing.weights,
            parts if shared is None else shared,
            parts if shared_gate is None else shared_gate,
            out,
            width,
            TOP_K=top_k,
            BLOCK=COMBINE_BLOCK,
            HAS_SHARED=shared is not None,
            HAS_GATE=shared_gate is not None,
            num_warps=WARPS,
        )
    return out


AOT_QUANTISED = ("bf16", torch.bfloat16, form_constants(4, 128, True))


def variants(arch: str) -> list[Variant]:
    """Compilations to check: routing, the product in each dtype, the sum."""
    route_types = {"logits_ptr": "*bf16", "ids_ptr": "*i32", "weights_ptr": "*fp32", "E": "i32"}
    route_constants = {"TOP_K": 8, "BLOCK": 128, "IS_NORMALISED": True}
    found = [Variant("route[bf16,E=128,k=8]", route_kernel, route_types, route_constants, WARPS)]
    for name, dtype, form in (*((n, d, plain_constants()) for n, d in AOT_DTYPES.items()), AOT_QUANTISED):
        constants, options = _config(arch, dtype, form)
        code = form["FORM"]
        types = dict.fromkeys(("x_ptr", "out_ptr"), f"*{name}")
        types |= {"w_ptr": f"*{name}" if code == 0 else "*u8", "order_ptr": "*i32", "tiles_ptr": "*i32"}
        types |= dict.fromkeys(("scales_ptr", "offsets_ptr"), f"*{name}" if code == 0 else "*fp16")
        found.append(
            Variant(
                name=f"grouped_linear[{name},form={code}]",
                kernel=grouped_linear_kernel,
                types={**types, "N": "i32", "K": "i32"},
                constants={**constants, "SHARE": 8, **form},
                **options,
                is_matrix_product=True,
                aligned=("N", "K"),
            )
        )
    names = ("parts_ptr", "shared_ptr", "gate_ptr", "out_ptr")
    types = {**dict.fromkeys(names, "*bf16"), "weights_ptr": "*fp32", "H": "i32"}
    constants = {"TOP_K": 8, "BLOCK": COMBINE_BLOCK, "HAS_SHARED": True, "HAS_GATE": True}
    found.append(Variant("combine[bf16,k=8]", combine_kernel, types, constants, WARPS, aligned=("H",)))
    return found
