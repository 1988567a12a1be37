"""Quantised rows of the KV cache in plain PyTorch; layout and formulas: ``kv_format``."""

import torch

from ..kv_format import CODES, SMALLEST_SCALE, CacheMode, cache_mode_of


def quantise(x: torch.Tensor, mode: CacheMode) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [..., D] float -> codes [..., D] int32, scale [..., 1], zero [..., 1] float32."""
    steps, smallest = CODES[mode]
    largest = smallest + steps
    x = x.float()
    lo = x.amin(-1, keepdim=True).clamp(max=0.0)
    hi = x.amax(-1, keepdim=True).clamp(min=0.0)
    scale = ((hi - lo) / steps).clamp(min=SMALLEST_SCALE)
    scale = torch.where(x.isfinite().all(-1, keepdim=True), scale, float("nan"))
    zero = (smallest - lo / scale).clamp(smallest, largest).round()
    codes = (x / scale + zero).clamp(smallest, largest).round()
    return codes.nan_to_num(0.0).to(torch.int32), scale, zero


def store_rows(cache: torch.Tensor, span: torch.Tensor, offset: torch.Tensor, x: torch.Tensor) -> None:
    """Quantise x [T, Hk, D] into row offset[t] of span[t] of a cache."""
    mode = cache_mode_of(cache)
    codes, scale, zero = quantise(x, mode)
    if mode == CacheMode.UINT4:
        codes = codes[..., 0::2] | codes[..., 1::2] << 4
    payload, scales, zeros = _parts(cache, x.shape[-1])
    payload[span, :, offset] = codes.to(cache.dtype)
    scales[span, :, offset] = scale.squeeze(-1)
    zeros[span, :, offset] = zero.squeeze(-1)


def load_spans(cache: torch.Tensor, spans: torch.Tensor, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """The values of whole spans [p, Hk, span_size, D] in ``dtype``; rows that hold no token give anything."""
    mode = cache_mode_of(cache)
    payload, scales, zeros = _parts(cache[spans], head_dim)
    if mode == CacheMode.UINT4:
        payload = torch.stack((payload & 15, payload >> 4), dim=-1).flatten(-2)
    values = (payload.float() - zeros.unsqueeze(-1)) * scales.unsqueeze(-1)
    return values.to(dtype)


def _parts(cache: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views of the payload [n, Hk, span_size, bytes], the scales and the zeros [n, Hk, span_size]."""
    num_spans, heads, span_size, row_bytes = cache.shape
    width = head_dim if cache_mode_of(cache) == CacheMode.INT8 else head_dim // 2
    blocks = cache.view(num_spans, heads, span_size * row_bytes)
    payload, parameters = blocks[..., : span_size * width], blocks[..., span_size * width :]
    scales, zeros = parameters.view(torch.float32).chunk(2, dim=-1)
    return payload.view(num_spans, heads, span_size, width), scales, zeros
