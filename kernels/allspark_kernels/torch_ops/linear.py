"""Linear layer: y = x W^T + b."""

from typing import NamedTuple

import torch
from torch.nn import functional

from ..types import PackedLinear


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


def linear(x: torch.Tensor, w: PackedLinear, out: torch.Tensor | None) -> torch.Tensor:
    """x [T, K] -> [T, N]."""
    layout: _Layout = w.layout
    if layout.input_dtype.itemsize < x.dtype.itemsize:
        x = x.to(layout.input_dtype).to(x.dtype)
    y = functional.linear(x, layout.weight, w.bias)
    return y if out is None else out.copy_(y)
