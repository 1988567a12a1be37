"""Normalisation, SwiGLU and rotary embedding with the write to the KV cache."""

import torch

from . import library
from .weights import DTYPE_CODES

MAX_HEAD_DIM = 512
# Of kv_quant.h: quantised rows.
CACHE_CODES = {**DTYPE_CODES, torch.int8: 16, torch.uint8: 17}


def _need_float32(*tensors: torch.Tensor) -> None:
    for x in tensors:
        if x.dtype is not torch.float32:
            raise ValueError(f"activations and norm weights on the CPU are float32, not {x.dtype}")


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [T, H] float32, rows ``x.stride(0)`` apart, weight [H] -> [T, H]."""
    _need_float32(x, weight)
    rows, width = x.shape
    out = torch.empty((rows, width), dtype=torch.float32)
    library.current.held.ask_rms_norm(
        x.data_ptr(), x.stride(0), None, weight.data_ptr(), eps, out.data_ptr(), rows, width
    )
    return out


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """residual += x in place, then rms_norm(residual); all float32 [T, H]."""
    _need_float32(x, residual, weight)
    rows, width = x.shape
    out = torch.empty((rows, width), dtype=torch.float32)
    library.current.held.ask_rms_norm(
        x.data_ptr(), width, residual.data_ptr(), weight.data_ptr(), eps, out.data_ptr(), rows, width
    )
    return out


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [T, 2 I] float32 -> [T, I]."""
    _need_float32(gate_up)
    rows, width = gate_up.shape
    out = torch.empty((rows, width // 2), dtype=torch.float32)
    library.current.held.ask_silu_mul(gate_up.data_ptr(), out.data_ptr(), rows, width // 2)
    return out


def gelu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [T, 2 I] float32 -> [T, I]."""
    _need_float32(gate_up)
    rows, width = gate_up.shape
    out = torch.empty((rows, width // 2), dtype=torch.float32)
    library.current.held.ask_gelu_mul(gate_up.data_ptr(), out.data_ptr(), rows, width // 2)
    return out


def soft_cap(x: torch.Tensor, cap: float) -> None:
    """x [T, N] float32 becomes cap tanh(x / cap)."""
    _need_float32(x)
    library.current.held.ask_soft_cap(x.data_ptr(), x.shape[0], x.shape[1], float(cap))


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
    """Rotate q [T, Hq, D] in place, write rotated k and v to the caches, rounded to even or quantised.

    Raises ValueError, with nothing written, if a position or slot lies outside its table.
    """
    _need_float32(q, k, v)
    if not (cos_sin.is_contiguous() and positions.is_contiguous() and slots.is_contiguous()):
        raise ValueError("cos_sin, positions and slots must be contiguous")
    tokens, q_heads, dim = q.shape
    num_spans, kv_heads, span_size, _ = k_cache.shape
    if dim > MAX_HEAD_DIM:
        raise ValueError(f"native kernels serve heads of up to {MAX_HEAD_DIM} dimensions, not {dim}")
    outside = library.current.held.ask_rotary_kv_write(
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        q.stride(0),
        k.stride(0),
        v.stride(0),
        cos_sin.data_ptr(),
        cos_sin.shape[0],
        positions.data_ptr(),
        slots.data_ptr(),
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        cache_code(k_cache, v_cache),
        num_spans * span_size,
        tokens,
        q_heads,
        kv_heads,
        dim,
        cos_sin.shape[1],
        span_size,
    )
    if outside:
        raise ValueError("a position lies outside cos_sin, or a slot outside the cache")


def cache_code(k_cache: torch.Tensor, v_cache: torch.Tensor) -> int:
    """The library's number for how the caches store rows; raises ValueError if they differ or it has none."""
    code = CACHE_CODES.get(k_cache.dtype)
    if code is None or v_cache.dtype is not k_cache.dtype:
        raise ValueError(
            f"caches must be of one dtype of a KV format, not {k_cache.dtype} and {v_cache.dtype}"
        )
    return code
