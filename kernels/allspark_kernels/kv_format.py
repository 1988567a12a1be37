"""How the KV cache stores a head: as floats, or quantised per token and head with a scale and a zero point.

The quantised block of one KV head of a span, all in one tensor so that a span stays one piece of memory:

    payload [span_size, D] int8, or [span_size, D / 2] bytes: two uint4, the lower dimension in the low nibble
    scales  [span_size] float32
    zeros   [span_size] float32

The caches are therefore [num_spans, Hk, span_size, row_bytes] with row_bytes = D + 8 or D / 2 + 8, of dtype
int8 for int8 and uint8 for uint4. A row of D floats x becomes, all in float32,

    lo = min(0, min x), hi = max(0, max x)
    scale = max((hi - lo) / R, 1e-5)
    zero = round(clamp(Qmin - lo / scale, Qmin, Qmax))
    q = round(clamp(x / scale + zero, Qmin, Qmax)),   read back as (q - zero) * scale

with R, Qmin, Qmax = 255, -128, 127 (int8) or 15, 0, 15 (uint4) and ties rounded to even. These are AllSpark's
formulas with 0 taken into the range: where all of x has one sign, theirs would cut values off. So every
element is within half a step (scale / 2) of what was written. A row with a NaN or an infinity gets NaN as its
scale and reads back as NaN.
"""

from dataclasses import dataclass
from enum import IntEnum

import torch

from .types import FLOAT_DTYPES

SMALLEST_SCALE = 1e-5
PARAMETER_BYTES = 8  # scale and zero of one row
GRANULE = 16  # quantised heads are a multiple of this many dimensions


class CacheMode(IntEnum):
    """The numbers of ModelStructConfig.cache_mode."""

    DEFAULT = 0
    INT8 = 1
    UINT4 = 2


QUANTISED_DTYPES = {torch.int8: CacheMode.INT8, torch.uint8: CacheMode.UINT4}
# Number of steps (R) and smallest code (Qmin); the largest is their sum.
CODES = {CacheMode.INT8: (255, -128), CacheMode.UINT4: (15, 0)}


@dataclass(frozen=True, slots=True)
class KVFormat:
    """Dtype and width of a cache row that holds ``head_dim`` values."""

    mode: CacheMode
    dtype: torch.dtype
    head_dim: int

    @property
    def row_width(self) -> int:
        """Elements of ``dtype`` per token and KV head: the last dimension of the caches."""
        return cache_row_width(self.dtype, self.head_dim)

    def frame_bytes(self, num_kv_heads: int, span_size: int) -> int:
        """Bytes of K or V of one layer of one span."""
        return num_kv_heads * span_size * self.row_width * self.dtype.itemsize


def kv_format(cache_mode: int, model_dtype: torch.dtype, head_dim: int) -> KVFormat:
    """The format for a cache mode: 0 stores ``model_dtype``, 1 is int8, 2 is uint4.

    Raises ValueError for another mode, for a head size that is no multiple of 16 in the quantised modes, and
    for a model dtype that is no float.
    """
    if cache_mode not in tuple(CacheMode):
        raise ValueError(f"cache_mode {cache_mode} is unknown; legal are 0, 1 (int8), 2 (uint4)")
    if model_dtype not in FLOAT_DTYPES:
        raise ValueError(f"the KV cache cannot store {model_dtype}; use float32, bfloat16 or float16")
    mode = CacheMode(cache_mode)
    if mode == CacheMode.DEFAULT:
        return KVFormat(mode, model_dtype, head_dim)
    if head_dim % GRANULE:
        raise ValueError(
            f"cache_mode {cache_mode} needs a head size that is a multiple of {GRANULE}, not {head_dim}; "
            "use cache_mode 0 for this model"
        )
    return KVFormat(mode, torch.int8 if mode == CacheMode.INT8 else torch.uint8, head_dim)


def cache_mode_of(cache: torch.Tensor) -> CacheMode:
    """How this cache stores its rows."""
    return QUANTISED_DTYPES.get(cache.dtype, CacheMode.DEFAULT)


def cache_row_width(dtype: torch.dtype, head_dim: int) -> int:
    """Last dimension of caches of ``dtype``."""
    if dtype is torch.int8:
        return head_dim + PARAMETER_BYTES
    if dtype is torch.uint8:
        return head_dim // 2 + PARAMETER_BYTES
    return head_dim
