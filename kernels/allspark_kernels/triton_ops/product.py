"""How matrix products are computed: operand and sum types, and the precision of float32 operands.

Kernels write ``tl.dot(a.to(OPERAND), b.to(OPERAND), acc.to(SUM), input_precision=PRECISION).to(tl.float32)``;
on a device every one of these casts but that of a narrower KV cache is void.
"""

import os

import torch
import triton
import triton.language as tl

# Triton's interpreter multiplies the bit patterns of bfloat16, and its library sums float32 in an order that
# depends on a row's place in the matrix; in float64 neither shows.
_IS_INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
SUM = tl.constexpr(tl.float64 if _IS_INTERPRETED else tl.float32)

_TYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}
AOT_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


LOG2_E = 1.4426950408889634


@triton.jit
def soft_capped(scores, factor, cap):
    """cap tanh(scores factor) in float32; tanh through exp2, which every target has."""
    e = tl.exp2(tl.abs(scores * factor) * -2.8853900817779268)
    size = cap * ((1.0 - e) / (1.0 + e))
    return tl.where(scores < 0.0, -size, size)


def softmax_factors(scale: float, soft_cap: float) -> tuple[float, float]:
    """What attention kernels take for ``scale``: the factor of scores in exp2, and the one inside tanh."""
    return (LOG2_E, scale / soft_cap) if soft_cap else (scale * LOG2_E, 0.0)


def product_constants(arch: str, dtype: torch.dtype) -> dict[str, tl.dtype | str]:
    """OPERAND and PRECISION of products of ``dtype`` on ``arch``.

    NVIDIA tensor cores take 10-bit mantissas of float32: three products of split operands keep about 21
    bits, the accuracy of float32 arithmetic ("tf32x3"). AMD matrix cores take float32 whole ("ieee").
    """
    precision = "ieee" if arch.startswith("gfx") else "tf32x3"
    return {"OPERAND": tl.float64 if _IS_INTERPRETED else _TYPES[dtype], "PRECISION": precision}
