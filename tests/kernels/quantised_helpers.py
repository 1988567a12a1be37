"""Quantised KV caches read and computed by numpy alone, from the documented layout and formulas."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from allspark_kernels import CacheMode, kv_format
from kernel_helpers import F32, Step, make_step

MODES = (CacheMode.INT8, CacheMode.UINT4)
# Steps of the range, smallest code.
RANGES = {CacheMode.INT8: (255, -128), CacheMode.UINT4: (15, 0)}
Array = npt.NDArray[np.float64]


@dataclass
class Contents:
    """codes, values [n, Hk, span_size, D]; scales, zeros [n, Hk, span_size]."""

    codes: npt.NDArray[np.int64]
    scales: npt.NDArray[np.float32]
    zeros: npt.NDArray[np.float32]

    @property
    def values(self) -> Array:
        return (self.codes - self.zeros[..., None].astype(np.float64)) * self.scales[..., None]


def empty_cache(
    mode: CacheMode, num_spans: int, kv_heads: int, span_size: int, dim: int, device: str = "cpu"
) -> torch.Tensor:
    """A cache nobody wrote to: every byte is 255, so every scale and zero is NaN."""
    layout = kv_format(mode, F32, dim)
    shape = (num_spans, kv_heads, span_size, layout.row_width)
    return torch.full(shape, -1 if mode == CacheMode.INT8 else 255, dtype=layout.dtype, device=device)


def read_cache(cache: torch.Tensor, mode: CacheMode, dim: int) -> Contents:
    """What the bytes mean: payload of a head's rows, then its scales, then its zeros."""
    spans, heads, span_size, _ = cache.shape
    blocks = cache.cpu().contiguous().numpy().view(np.uint8).reshape(spans, heads, -1)
    width = dim if mode == CacheMode.INT8 else dim // 2
    payload = blocks[..., : span_size * width].reshape(spans, heads, span_size, width)
    numbers = np.ascontiguousarray(blocks[..., span_size * width :]).view(np.float32)
    assert numbers.shape[-1] == 2 * span_size
    if mode == CacheMode.INT8:
        codes = payload.view(np.int8).astype(np.int64)
    else:
        codes = np.empty((*payload.shape[:-1], dim), np.int64)
        codes[..., 0::2], codes[..., 1::2] = payload & 15, payload >> 4
    return Contents(codes, numbers[..., :span_size], numbers[..., span_size:])


def quantised(x: torch.Tensor, mode: CacheMode) -> Contents:
    """The formulas in numpy's float32, for rows x [..., D]."""
    rows = x.detach().cpu().float().numpy()
    steps, smallest = np.float32(RANGES[mode][0]), np.float32(RANGES[mode][1])
    largest = smallest + steps
    lo = np.minimum(rows.min(-1, keepdims=True), np.float32(0))
    hi = np.maximum(rows.max(-1, keepdims=True), np.float32(0))
    scale = np.maximum((hi - lo) / steps, np.float32(1e-5))
    zero = np.rint(np.clip(smallest - lo / scale, smallest, largest))
    codes = np.rint(np.clip(rows / scale + zero, smallest, largest))
    return Contents(codes.astype(np.int64), scale[..., 0], zero[..., 0])


def store(cache: torch.Tensor, mode: CacheMode, span: int, offset: int, row: Contents) -> None:
    """Put one token's heads [Hk, D] into a slot, byte by byte."""
    heads, dim = row.codes.shape
    width = dim if mode == CacheMode.INT8 else dim // 2
    span_size = cache.shape[2]
    codes = row.codes & 255
    if mode == CacheMode.UINT4:
        codes = codes[:, 0::2] | codes[:, 1::2] << 4
    data = cache[span].numpy().view(np.uint8).reshape(heads, -1)
    data[:, offset * width : (offset + 1) * width] = codes.astype(np.uint8)
    for where, numbers in ((offset, row.scales), (span_size + offset, row.zeros)):
        at = span_size * width + 4 * where
        data[:, at : at + 4] = np.ascontiguousarray(numbers, np.float32).reshape(heads, 1).view(np.uint8)


@dataclass
class QuantisedStep:
    """A ragged step over quantised caches; ``exact`` is the same step before K and V were quantised and
    ``read`` the same step over the float64 values that the codes stand for."""

    exact: Step
    read: Step
    k_cache: torch.Tensor
    v_cache: torch.Tensor


def make_quantised_step(
    mode: CacheMode,
    q_lens: list[int],
    kv_lens: list[int],
    heads: tuple[int, int, int],
    span_size: int = 32,
    dtype: torch.dtype = F32,
    device: str = "cpu",
    seed: int = 0,
) -> QuantisedStep:
    """Like ``make_step``; slots that hold no token have NaN as scale and zero."""
    exact = make_step(q_lens, kv_lens, heads, span_size, dtype, device, seed)
    num_spans = len(exact.k_cache)
    caches, values = [], []
    for source in (exact.k_cache, exact.v_cache):
        cache = empty_cache(mode, num_spans, heads[1], span_size, heads[2])
        for b, length in enumerate(kv_lens):
            for position in range(length):
                span, offset = int(exact.table[b, position // span_size]), position % span_size
                store(cache, mode, span, offset, quantised(source[span, :, offset], mode))
        caches.append(cache.to(device))
        values.append(torch.from_numpy(read_cache(cache, mode, heads[2]).values))
    lens = (exact.q_lens, exact.kv_lens, exact.table, span_size, exact.scale)
    return QuantisedStep(exact, Step(exact.q, values[0], values[1], *lens), caches[0], caches[1])
