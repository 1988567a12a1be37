"""The dtype in which an oracle computes: float64 if its input is, else float32."""

import torch


def wide(x: torch.Tensor) -> torch.Tensor:
    """``x`` in float64 if it is float64, else in float32."""
    return x if x.dtype == torch.float64 else x.float()
