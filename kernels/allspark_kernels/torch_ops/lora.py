"""Low-rank adapters: out += (x A^T) B^T for the rows of each adapter."""

import torch

from ..lora import LoraPlan, LoraSite
from .precision import wide


def lora_add(x: torch.Tensor, site: LoraSite, plan: LoraPlan, out: torch.Tensor) -> None:
    """Rows of x [T, K] go through their adapter and are added to their rows of out [T, N]."""
    for slot, start, count in plan.groups:
        own = site.weights[slot]
        if own is None:
            continue
        rows = plan.rows[start : start + count].long()
        low = wide(x[rows]) @ wide(own.down).to(wide(x).dtype).T
        deltas = [
            part @ up.to(part.dtype)
            for part, up in zip(low.split_with_sizes(own.ranks, 1), own.ups, strict=True)
        ]
        out[rows] = (wide(out[rows]) + torch.cat(deltas, 1)).to(out.dtype)
