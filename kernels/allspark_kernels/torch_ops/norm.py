"""Root mean square layer normalisation (Zhang and Sennrich, 2019): x / sqrt(mean(x^2) + eps) * weight."""

import torch

from .precision import wide


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [T, H], weight [H] -> [T, H]."""
    y = wide(x)
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * wide(weight)).to(x.dtype)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """residual += x in place; returns rms_norm(residual)."""
    residual.add_(x)
    return rms_norm(residual, weight, eps)
