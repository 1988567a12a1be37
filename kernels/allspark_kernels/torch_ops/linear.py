"""Linear layer: y = x W^T + b."""

import torch
from torch.nn import functional

from ..types import PackedLinear


def pack_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
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
        layout=layout,
        bias=kept_bias,
        unpacker=_unpack,
    )


def _unpack(packed: PackedLinear) -> torch.Tensor:
    layout: torch.Tensor = packed.layout
    return layout.to(packed.dtype)


def linear(x: torch.Tensor, w: PackedLinear, out: torch.Tensor | None) -> torch.Tensor:
    """x [T, K] -> [T, N]."""
    y = functional.linear(x, w.layout, w.bias)
    return y if out is None else out.copy_(y)
