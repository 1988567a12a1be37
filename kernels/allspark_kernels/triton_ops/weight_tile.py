"""Tiles of a weight for matrix products, as it is or widened from quantised codes."""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from ..quantised import QuantisedWeight, Weight

# What a kernel is told of a weight: plain, 8-bit codes, 4-bit codes in pairs of k.
PLAIN, CODES_8, CODES_4 = 0, 8, 4


@triton.jit
def weight_tile(
    w_ptr,
    scales_ptr,
    offsets_ptr,
    rows,
    row_mask,
    ks,
    K,
    FORM: tl.constexpr,
    SCALE_GROUP: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """w[rows, ks] transposed: [BLOCK_K, BLOCK_N] of OPERAND; rows int64, ks from the multiple of a block on.

    SCALE_GROUP 0: one scale a row.
    """
    inside = ks < K
    mask = inside[:, None] & row_mask[None, :]
    if FORM == 0:
        w = tl.load(w_ptr + rows[None, :] * K + ks[:, None], mask=mask, other=0.0)
    else:
        if FORM == 8:
            codes = tl.load(w_ptr + rows[None, :] * K + ks[:, None], mask=mask, other=0).to(tl.int32)
        else:
            pairs = tl.load(w_ptr + rows[None, :] * ((K + 1) // 2) + (ks // 2)[:, None], mask=mask, other=0)
            codes = (pairs.to(tl.int32) >> ((ks % 2) * 4)[:, None]) & 15
            if not HAS_OFFSET:
                codes = codes - 8
        where = rows[None, :] + (ks * 0)[:, None]
        if SCALE_GROUP > 0:
            where = rows[None, :] * tl.cdiv(K, SCALE_GROUP) + (ks // SCALE_GROUP)[:, None]
        w = codes.to(tl.float32) * tl.load(scales_ptr + where, mask=mask, other=0.0).to(tl.float32)
        if HAS_OFFSET:
            w += tl.load(offsets_ptr + where, mask=mask, other=0.0).to(tl.float32)
    return w.to(OPERAND)


@dataclass(frozen=True, slots=True, eq=False)
class QuantisedTensors:
    """codes [..., N, K] int8 or [..., N, ceil(K / 2)] uint8, with the even k in the low half byte.

    scales, offsets [..., N, groups].
    """

    codes: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor | None
    bits: int
    group: int
    columns: int

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        offsets = 0 if self.offsets is None else self.offsets.nbytes
        return self.codes.nbytes + self.scales.nbytes + offsets

    def dequantise(self) -> torch.Tensor:
        """The weight [N, K] in float32."""
        codes = self.codes
        if self.bits == 4:
            pairs = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)[..., : self.columns]
            codes = pairs.to(torch.int8)
        return QuantisedWeight(codes, self.scales, self.offsets, self.bits, self.group).dequantise()


Layout = torch.Tensor | QuantisedTensors


def stack_layouts(layouts: list[Layout]) -> Layout:
    """Experts of one form behind each other, with one more dimension in front."""
    first = layouts[0]
    if isinstance(first, torch.Tensor):
        return torch.stack([layout for layout in layouts if isinstance(layout, torch.Tensor)])
    quantised = [layout for layout in layouts if isinstance(layout, QuantisedTensors)]
    offsets = [layout.offsets for layout in quantised if layout.offsets is not None]
    return QuantisedTensors(
        torch.stack([layout.codes for layout in quantised]),
        torch.stack([layout.scales for layout in quantised]),
        torch.stack(offsets) if offsets else None,
        first.bits,
        first.group,
        first.columns,
    )


def lay_out(weight: Weight) -> Layout:
    """Row-major, 4-bit codes in pairs."""
    if isinstance(weight, torch.Tensor):
        return weight.detach().contiguous()
    codes, columns = weight.codes.contiguous(), weight.codes.shape[1]
    if weight.bits == 4:
        even = torch.nn.functional.pad(codes.view(torch.uint8), (0, columns % 2))
        codes = (even[:, 0::2] | even[:, 1::2] << 4).contiguous()
    offsets = None if weight.offsets is None else weight.offsets.contiguous()
    return QuantisedTensors(codes, weight.scales.contiguous(), offsets, weight.bits, weight.group, columns)


def tile_arguments(layout: Layout) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
    """Pointers to weight, scales and offsets, and the constants of ``weight_tile``."""
    if isinstance(layout, torch.Tensor):
        return (layout,) * 3, plain_constants()
    group = 0 if layout.group >= layout.columns else layout.group
    pointers = (layout.codes, layout.scales, layout.scales if layout.offsets is None else layout.offsets)
    return pointers, form_constants(layout.bits, group, layout.offsets is not None)


def plain_constants() -> dict[str, Any]:
    """Constants of a weight that is no code."""
    return form_constants(PLAIN, 0, False)


def form_constants(form: int, group: int, has_offset: bool) -> dict[str, Any]:
    """Constants of ``weight_tile`` by name."""
    return {"FORM": form, "SCALE_GROUP": group, "HAS_OFFSET": has_offset}
