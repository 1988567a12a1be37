"""Block formats of GGUF as codes with scales, so that their matrices can stay quantised in memory.

Block layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h. The values are, bit for bit,
those that dequantising gives. Formats that are not here are dequantised.
"""

from __future__ import annotations

from collections.abc import Callable

import gguf
import numpy as np
import torch
from allspark_kernels import QuantisedWeight
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray

from allspark_workers.models.gguf_header import TensorInfo

Bytes = NDArray[np.uint8]


def quantised_weight(tensor: TensorInfo) -> QuantisedWeight | None:
    """The matrix [rows, columns] as codes; None if its format is kept in no such form."""
    read = _READERS.get(tensor.kind)
    if read is None or len(tensor.shape) < 2:
        return None
    _, block_bytes = gguf.GGML_QUANT_SIZES[tensor.kind]
    return read(tensor.data.reshape(tensor.data.shape[0], -1, block_bytes))


def _q8_0(blocks: Bytes) -> QuantisedWeight:
    """32 values: float16 scale, int8 codes."""
    return _weight(blocks[..., 2:].view(np.int8), _halves(blocks, 0), None, 8, 32)


def _q4_0(blocks: Bytes) -> QuantisedWeight:
    """32 values: float16 scale, codes around 8, first half in the low half bytes."""
    return _weight(_half_bytes(blocks[..., 2:]), _halves(blocks, 0), None, 4, 32)


def _q4_1(blocks: Bytes) -> QuantisedWeight:
    """32 values: float16 scale and minimum, codes as in Q4_0."""
    return _weight(_half_bytes(blocks[..., 4:]), _halves(blocks, 0), _halves(blocks, 2), 4, 32)


def _q4_k(blocks: Bytes) -> QuantisedWeight:
    """256 values in 8 groups: float16 factors of 6-bit scales and minima, codes of two groups at a time."""
    rows, count, _ = blocks.shape
    scales, minima = gguf.quants.Q4_K.get_scale_min(blocks[..., 4:16].reshape(-1, 12))
    factor, shift = _halves(blocks, 0).astype(np.float32), _halves(blocks, 2).astype(np.float32)
    scales = factor[..., None] * scales.reshape(rows, count, 8).astype(np.float32)
    offsets = -(shift[..., None] * minima.reshape(rows, count, 8).astype(np.float32))
    codes = _half_bytes(blocks[..., 16:].reshape(rows, count, 4, 32))
    return _weight(codes, scales, offsets, 4, 32)


def _q6_k(blocks: Bytes) -> QuantisedWeight:
    """256 values in 16 groups: low 4 and high 2 bits of codes around 32, int8 scales, their factor."""
    rows, count, _ = blocks.shape
    low = _half_bytes(blocks[..., :128].reshape(rows, count, 2, 64)).reshape(rows, count, 2, 4, 32)
    packed = blocks[..., 128:192].reshape(rows, count, 2, 1, 32)
    high = packed >> np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 1, 4, 1) & 3
    codes = (low.view(np.uint8) | high << 4).view(np.int8) - np.int8(32)
    factor = _halves(blocks, 208).astype(np.float32)
    scales = factor[..., None] * blocks[..., 192:208].view(np.int8).astype(np.float32)
    return _weight(codes, scales, None, 8, 16)


_READERS: dict[Kind, Callable[[Bytes], QuantisedWeight]] = {
    Kind.Q8_0: _q8_0,
    Kind.Q4_0: _q4_0,
    Kind.Q4_1: _q4_1,
    Kind.Q4_K: _q4_k,
    Kind.Q6_K: _q6_k,
}

# Bits of a value with its share of scales and offsets, as the kernels hold it.
KEPT_BITS = {Kind.Q8_0: 9, Kind.Q4_0: 5, Kind.Q4_1: 5, Kind.Q4_K: 6, Kind.Q6_K: 10}


def _halves(blocks: Bytes, at: int) -> NDArray[np.float16]:
    """The float16 at byte `at` of every block."""
    return np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)[..., 0]


def _half_bytes(packed: Bytes) -> NDArray[np.int8]:
    """[..., n] bytes to [..., 2 n] codes: all low half bytes, then all high ones."""
    return np.concatenate((packed & 15, packed >> 4), axis=-1).view(np.int8)


def _weight(
    codes: NDArray[np.int8],
    scales: NDArray[np.floating],
    offsets: NDArray[np.floating] | None,
    bits: int,
    group: int,
) -> QuantisedWeight:
    rows = codes.shape[0]

    def tensor(values: NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(np.array(values.reshape(rows, -1), order="C"))

    return QuantisedWeight(
        tensor(codes), tensor(scales), None if offsets is None else tensor(offsets), bits, group
    )
