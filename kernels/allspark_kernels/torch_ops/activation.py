"""SwiGLU activation (Shazeer, 2020): silu(gate) * up."""

import torch

from .precision import wide


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [T, 2 I] -> [T, I]: silu of the first half times the second half."""
    gate, up = wide(gate_up).chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)
