"""SwiGLU activation: silu(gate) * up, streaming."""

import torch
import triton
import triton.language as tl

from .variant import Variant

BLOCK = 1024
NUM_WARPS = 4


@triton.jit
def silu_mul_kernel(gate_up_ptr, out_ptr, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    gate = tl.load(gate_up_ptr + row * 2 * width + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * width + width + columns, mask=mask, other=0.0).to(tl.float32)
    out = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * width + columns, out.to(out_ptr.dtype.element_ty), mask=mask)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [T, 2 I] -> [T, I]."""
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_rows, width), dtype=gate_up.dtype, device=gate_up.device)
    if num_rows:
        grid = (num_rows, triton.cdiv(width, BLOCK))
        silu_mul_kernel[grid](gate_up, out, width, BLOCK=BLOCK, num_warps=NUM_WARPS)
    return out


def variants(_arch: str) -> list[Variant]:
    """Compilations to check: each dtype."""
    return [
        Variant(
            name=f"silu_mul[{dtype}]",
            kernel=silu_mul_kernel,
            types={"gate_up_ptr": f"*{dtype}", "out_ptr": f"*{dtype}", "width": "i32"},
            constants={"BLOCK": BLOCK},
            num_warps=NUM_WARPS,
            aligned=("width",),
        )
        for dtype in ("bf16", "fp32")
    ]
