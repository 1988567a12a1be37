"""Linear layers whose weights stay quantised in memory."""

import ctypes
import weakref

import torch

from ..quantised import QuantisedWeight
from ..types import PackedLinear
from . import library
from .library import I64, PTR
from .weights import DTYPE_CODES, LONG_CALL_BYTES, LONG_CALL_FLOPS, _padded

PANEL, HALF = 32, 16


class _Header(ctypes.Structure):
    """Mirror of ``struct qlinear`` in qlinear.c."""

    _fields_ = (
        *((name, I64) for name in ("n", "k", "kind", "group", "scale_dtype")),
        *((name, PTR) for name in ("codes", "scales", "offsets", "bias")),
    )


class QuantisedLayout:
    """Codes, scales and offsets by panels, in the library's own memory; ``address`` is what it takes."""

    __slots__ = (
        *("__weakref__", "address", "bias", "block", "form", "header", "is_quantised", "long_rows", "nbytes"),
    )

    def __init__(self, weight: QuantisedWeight, bias: torch.Tensor | None) -> None:
        (n, k), has_offset = weight.codes.shape, weight.offsets is not None
        parts = [_panels_of_codes(weight), _panels(weight.scales)]
        if weight.offsets is not None:
            parts.append(_panels(weight.offsets))
        sizes = [-(-part.nbytes // 64) * 64 for part in parts]
        self.nbytes = sum(sizes)
        self.block = library.current.freed.ask_arena_alloc(self.nbytes)
        if not self.block:
            raise MemoryError(f"no memory for a quantised weight of {self.nbytes} bytes")
        weakref.finalize(self, library.current.freed.ask_arena_free, self.block)
        at = [self.block, self.block + sizes[0], self.block + sizes[0] + sizes[1]]
        for address, part in zip(at, parts, strict=False):
            ctypes.memmove(address, part.data_ptr(), part.nbytes)
        self.form = (n, k, weight.bits, weight.group, weight.scales.dtype, has_offset, tuple(at))
        self.bias = None if bias is None else _padded(bias)
        kind = 2 * (weight.bits == 4) + has_offset
        sizes_of = (n, k, kind, weight.group, DTYPE_CODES[weight.scales.dtype])
        self.header = _Header(*sizes_of, *at, None if self.bias is None else self.bias.data_ptr())
        self.address = ctypes.addressof(self.header)
        self.long_rows = 1 if self.nbytes > LONG_CALL_BYTES else LONG_CALL_FLOPS // (2 * n * k) + 1
        self.is_quantised = True

    def unpack(self) -> QuantisedWeight:
        """The weight as it was packed."""
        n, k, bits, group, dtype, has_offset, at = self.form
        panels, groups = -(-n // PANEL), -(-k // group)
        width = HALF if bits == 4 else PANEL
        codes = _read(at[0], (panels, k, width), torch.int8)
        if bits == 4:
            both = codes.view(torch.uint8)
            codes = torch.cat((both & 15, both >> 4), 2).view(torch.int8)
        scales = [_read(start, (panels, groups, PANEL), dtype) for start in at[1 : 2 + has_offset]]
        parts = [part.transpose(1, 2).flatten(0, 1)[:n].contiguous() for part in (codes, *scales)]
        return QuantisedWeight(parts[0], parts[1], parts[2] if has_offset else None, bits, group)


def _panels(values: torch.Tensor) -> torch.Tensor:
    """[N, X] -> [panels, X, 32], rows beyond N zero."""
    padded = torch.nn.functional.pad(values, (0, 0, 0, -len(values) % PANEL))
    return padded.view(-1, PANEL, values.shape[1]).transpose(1, 2).contiguous()


def _panels_of_codes(weight: QuantisedWeight) -> torch.Tensor:
    """Codes [panels, K, 32], or [panels, K, 16] with column c in the low and c + 16 in the high half byte."""
    codes = _panels(weight.codes)
    if weight.bits == 8:
        return codes
    bytes_ = codes.view(torch.uint8)
    return (bytes_[..., :HALF] | bytes_[..., HALF:] << 4).contiguous()


def _read(address: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    result = torch.empty(shape, dtype=dtype)
    ctypes.memmove(result.data_ptr(), address, result.nbytes)
    return result


def pack_quantised(weight: QuantisedWeight, bias: torch.Tensor | None) -> PackedLinear:
    """Lay the codes out in panels of 32 output columns; bias [N] is kept in float32."""
    if weight.codes.device.type != "cpu":
        raise ValueError(f"native kernels pack CPU tensors, not {weight.codes.device}")
    layout = QuantisedLayout(weight, bias)
    return PackedLinear(
        in_features=weight.codes.shape[1],
        out_features=weight.codes.shape[0],
        dtype=torch.float32,
        device=weight.codes.device,
        nbytes=layout.nbytes + (0 if layout.bias is None else layout.bias.nbytes),
        backend="native",
        layout=layout,
        bias=layout.bias,
        unpacker=_unpack,
    )


def _unpack(packed: PackedLinear) -> torch.Tensor:
    layout: QuantisedLayout = packed.layout
    return layout.unpack().dequantise()
