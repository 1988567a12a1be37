"""Linear layer: y = x W^T + b."""

from typing import NamedTuple

import torch
from torch.nn import functional

from ..quantised import QuantisedWeight
from ..types import PackedLinear
from .precision import wide


class _Layout(NamedTuple):
    weight: torch.Tensor
    input_dtype: torch.dtype  # what x is rounded to


def pack_linear(weight: torch.Tensor, bias: torch.Tensor | None, rounds_inputs: bool) -> PackedLinear:
    """Keep the weight in the compute dtype: float32 on CPU (half-precision products are slow there)."""
    on_cpu = weight.device.type == "cpu"
    layout = weight.detach().to(torch.float32 if on_cpu and weight.dtype != torch.float64 else weight.dtype)
    layout = layout.contiguous()
    kept_bias = None if bias is None else bias.detach().to(layout.dtype).contiguous()
    return PackedLinear(
        in_features=weight.shape[1],
        out_features=weight.shape[0],
        dtype=weight.dtype,
        device=weight.device,
        nbytes=layout.nbytes + (0 if kept_bias is None else kept_bias.nbytes),
        backend="torch",
        layout=_Layout(layout, weight.dtype if rounds_inputs else layout.dtype),
        bias=kept_bias,
        unpacker=_unpack,
    )


def _unpack(packed: PackedLinear) -> torch.Tensor:
    layout: _Layout = packed.layout
    return layout.weight.to(packed.dtype)


def pack_quantised(weight: QuantisedWeight, bias: torch.Tensor | None) -> PackedLinear:
    """Keep the codes; each product widens them anew."""
    parts = (weight.codes, weight.scales, weight.offsets, bias)
    return PackedLinear(
        in_features=weight.codes.shape[1],
        out_features=weight.codes.shape[0],
        dtype=torch.float32,
        device=weight.codes.device,
        nbytes=sum(part.nbytes for part in parts if part is not None),
        backend="torch",
        layout=weight,
        bias=bias,
        unpacker=_dequantise,
    )


def _dequantise(packed: PackedLinear) -> torch.Tensor:
    weight: QuantisedWeight = packed.layout
    return weight.dequantise()


def linear(x: torch.Tensor, w: PackedLinear, out: torch.Tensor | None) -> torch.Tensor:
    """x [T, K] -> [T, N]."""
    if isinstance(w.layout, QuantisedWeight):
        weight = w.layout.dequantise().to(wide(x).dtype)
        y = functional.linear(wide(x), weight, None if w.bias is None else w.bias.to(weight.dtype)).to(
            x.dtype
        )
        return y if out is None else out.copy_(y)
    layout: _Layout = w.layout
    if layout.input_dtype.itemsize < x.dtype.itemsize:
        x = x.to(layout.input_dtype).to(x.dtype)
    y = functional.linear(x, layout.weight, w.bias)
    return y if out is None else out.copy_(y)
