"""Paged attention of a whole step: decode rows and prefill tiles, each by its own kernel."""

import torch

from ..plan import AttentionPlan
from .attention_plan import DeviceWork
from .decode_attention import decode_attention
from .prefill_attention import prefill_attention


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    plan: AttentionPlan,
    scale: float,
    out: torch.Tensor | None,
    window: int,
    soft_cap: float,
) -> torch.Tensor:
    """q [T, Hq, D], caches [num_spans, Hk, span_size, D] -> [T, Hq, D]."""
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    work: DeviceWork = plan.state
    if work.prefill is not None:
        prefill_attention(q, k_cache, v_cache, plan, scale, out, window, soft_cap)
    if work.decode is not None:
        decode_attention(q, k_cache, v_cache, plan, scale, out, window, soft_cap)
    return out
