"""The matrix product of every kernel: float32 sums, no reduced-precision inputs."""

import os

import triton
import triton.language as tl

# Triton's interpreter multiplies the bit patterns of bfloat16; products of values widened to float32 are
# exact, as they are on the device.
WIDEN = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") == "1")


@triton.jit
def dot(a, b, acc):
    """acc + a @ b with float32 accumulation; "ieee" keeps float32 inputs from being cut to TF32."""
    if WIDEN:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")
