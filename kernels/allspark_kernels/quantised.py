"""Quantised weights: codes of 8 or 4 bits with a scale, and perhaps an offset, per group of a row.

    w[n, k] = scale[n, k // group] * code[n, k] + offset[n, k // group]

computed in float32: the product is rounded, then the sum. Codes are int8 with 8 bits. With 4 bits they are
0..15, and 8 less where there is no offset. This covers rounding per output channel and per group as well as
the block formats of GGUF.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

BITS: Final = (4, 8)
SCALE_DTYPES: Final = (torch.float16, torch.float32)
# Smallest normal number of float16: a group of zeros gets it, so that no scale divides by zero.
_TINY: Final = 2.0**-14


@dataclass(frozen=True, slots=True)
class QuantFormat:
    """``bits`` of a code and the ``group`` of k's that share a scale (0: a whole row of the weight)."""

    bits: int
    group: int

    def __post_init__(self) -> None:
        if self.bits not in BITS or self.group < 0:
            raise ValueError(f"codes have 4 or 8 bits and groups a size >= 0, not {self.bits}, {self.group}")


@dataclass(frozen=True, slots=True, eq=False)
class QuantisedWeight:
    """codes [N, K] int8 (4 bits: 0..15); scales and offsets [N, ceil(K / group)] float16 or float32."""

    codes: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor | None
    bits: int
    group: int

    def __post_init__(self) -> None:
        shape = (self.codes.shape[0], math.ceil(self.codes.shape[1] / self.group))
        parts = [self.scales] if self.offsets is None else [self.scales, self.offsets]
        if self.bits not in BITS or self.codes.dtype != torch.int8 or self.codes.ndim != 2:
            raise ValueError(
                f"codes must be int8 [N, K] of 4 or 8 bits, not {self.codes.dtype} of {self.bits}"
            )
        for part in parts:
            if part.shape != shape or part.dtype not in SCALE_DTYPES or part.dtype != self.scales.dtype:
                raise ValueError(f"scales must be float16 or float32 {shape}, not {part.dtype} {part.shape}")

    def dequantise(self) -> torch.Tensor:
        """The weight [N, K] in float32, as every implementation computes it."""
        columns = self.codes.shape[1]
        codes = self.codes.float()
        if self.bits == 4 and self.offsets is None:
            codes = codes - 8.0
        weight = _spread(self.scales, self.group, columns) * codes
        return weight if self.offsets is None else weight + _spread(self.offsets, self.group, columns)

    def rows(self, order: torch.Tensor) -> "QuantisedWeight":
        """The rows in another order, by index [N] int64."""
        offsets = None if self.offsets is None else self.offsets[order]
        return QuantisedWeight(self.codes[order], self.scales[order], offsets, self.bits, self.group)


def _spread(values: torch.Tensor, group: int, columns: int) -> torch.Tensor:
    return values.float().repeat_interleave(group, 1)[:, :columns]


def quantise(weight: torch.Tensor, form: QuantFormat) -> QuantisedWeight:
    """Round weight [N, K] to the nearest codes.

    8 bits: scale = max |w| / 127, no offset. 4 bits: offset = min w, scale = (max w - min w) / 15. A value is
    off by at most half a scale, and by what rounding scale and offset (kept in float16 per group, in float32
    per row) adds.
    """
    rows, columns = weight.shape
    group = form.group or columns
    dtype = torch.float16 if form.group else torch.float32
    padding = -columns % group
    # Padding repeats the last column: it widens no group.
    wide = (
        torch.cat((weight.float(), weight[:, -1:].float().expand(rows, padding)), 1)
        if padding
        else weight.float()
    )
    groups = wide.view(rows, -1, group)
    if form.bits == 8:
        scales = (groups.abs().amax(2) / 127).clamp_min_(_TINY).to(dtype)
        codes = (groups / scales.float().unsqueeze(2)).round_().clamp_(-127, 127)
        offsets = None
    else:
        low, high = groups.aminmax(dim=2)
        offsets = low.to(dtype)
        scales = ((high - low) / 15).clamp_min_(_TINY).to(dtype)
        codes = (groups - offsets.float().unsqueeze(2)) / scales.float().unsqueeze(2)
        codes = codes.round_().clamp_(0, 15)
    codes = codes.to(torch.int8).view(rows, -1)[:, :columns].contiguous()
    return QuantisedWeight(codes, scales, offsets, form.bits, group)


def stack_quantised(parts: Sequence[QuantisedWeight]) -> QuantisedWeight:
    """One weight with the rows of all, which must agree in K; every value stays exactly what it was.

    Formats that differ meet in one that holds both: 8 bits, the smaller group, float32, an offset.
    """
    bits = max(part.bits for part in parts)
    group = math.gcd(*(part.group for part in parts))
    has_offset = any(part.offsets is not None for part in parts)
    scale_dtype = torch.float32 if any(p.scales.dtype == torch.float32 for p in parts) else torch.float16
    codes, scales, offsets = [], [], []
    for part in parts:
        is_centred = part.bits == 4 and part.offsets is None and (bits == 8 or has_offset)
        if is_centred and bits == 4:
            raise ValueError("4-bit codes with and without offset cannot be stacked")
        codes.append(part.codes - 8 if is_centred else part.codes)
        count = math.ceil(part.codes.shape[1] / group)
        scales.append(part.scales.repeat_interleave(part.group // group, 1)[:, :count].to(scale_dtype))
        own = torch.zeros_like(part.scales) if part.offsets is None else part.offsets
        offsets.append(own.repeat_interleave(part.group // group, 1)[:, :count].to(scale_dtype))
    return QuantisedWeight(
        torch.cat(codes), torch.cat(scales), torch.cat(offsets) if has_offset else None, bits, group
    )


Weight = torch.Tensor | QuantisedWeight
