"""Rotary position embedding (Su et al., 2021), half-split pairing, and the write of K and V to the cache."""

import torch

from ..kv_format import CacheMode, cache_mode_of
from .kv_quant import store_rows
from .precision import wide


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = cos.shape[-1]
    y = wide(x)
    low, high = y[..., :half], y[..., half : 2 * half]
    return torch.cat((low * cos - high * sin, high * cos + low * sin, y[..., 2 * half :]), dim=-1)


def rotary_kv_write(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
) -> None:
    """Rotate q [T, Hq, D] in place and k [T, Hk, D]; store k and v at slots >= 0 of the cache."""
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
    q.copy_(_rotate(q, cos, sin))
    rotated = _rotate(k, cos, sin)  # not rounded to the dtype of k: a cache may be wider or quantised
    span_size = k_cache.shape[2]
    kept = slots >= 0
    if not bool(kept.all()):
        rotated, v, slots = rotated[kept], v[kept], slots[kept]
    span, offset = slots // span_size, slots % span_size
    if cache_mode_of(k_cache) != CacheMode.DEFAULT:
        store_rows(k_cache, span, offset, rotated)
        store_rows(v_cache, span, offset, v)
        return
    k_cache[span, :, offset] = rotated.to(k_cache.dtype)
    v_cache[span, :, offset] = v.to(v_cache.dtype)
