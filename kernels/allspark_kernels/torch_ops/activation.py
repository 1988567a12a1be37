"""Gated activations (Shazeer, 2020), and soft caps."""

import torch

from .precision import wide


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [T, 2 I] -> [T, I]: silu of the first half times the second half."""
    gate, up = wide(gate_up).chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)


def gelu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [T, 2 I] -> [T, I]: gelu (approximated by tanh) of the first half times the second half."""
    gate, up = wide(gate_up).chunk(2, dim=-1)
    return (torch.nn.functional.gelu(gate, approximate="tanh") * up).to(gate_up.dtype)


def soft_cap(x: torch.Tensor, cap: float) -> None:
    """x becomes cap tanh(x / cap)."""
    x.copy_(torch.tanh(wide(x) / cap) * cap)
