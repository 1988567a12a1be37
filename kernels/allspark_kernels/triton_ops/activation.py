"""Gated activations, act(gate) * up, and soft caps, streaming."""

import torch
import triton
import triton.language as tl

from .product import soft_capped
from .variant import Variant

BLOCK = 1024
NUM_WARPS = 4


@triton.jit
def silu_mul_kernel(gate_up_ptr, out_ptr, width, BLOCK: tl.constexpr, IS_GELU: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    gate = tl.load(gate_up_ptr + row * 2 * width + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * width + width + columns, mask=mask, other=0.0).to(tl.float32)
    slope = gate
    if IS_GELU:
        # 0.5 (1 + tanh z) = 1 / (1 + exp(-2 z)) with z = sqrt(2 / pi) (g + 0.044715 g^3)
        slope = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    out = gate / (1.0 + tl.exp(-slope)) * up
    tl.store(out_ptr + row * width + columns, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["size"])
def soft_cap_kernel(x_ptr, size, cap, BLOCK: tl.constexpr):
    where = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = where < size
    x = tl.load(x_ptr + where, mask=mask, other=0.0).to(tl.float32)
    tl.store(x_ptr + where, soft_capped(x, 1.0 / cap, cap).to(x_ptr.dtype.element_ty), mask=mask)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [T, 2 I] -> [T, I]."""
    return _gated(gate_up, False)


def gelu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [T, 2 I] -> [T, I]."""
    return _gated(gate_up, True)


def soft_cap(x: torch.Tensor, cap: float) -> None:
    """x becomes cap tanh(x / cap)."""
    if x.numel():
        grid = (triton.cdiv(x.numel(), BLOCK),)
        soft_cap_kernel[grid](x, x.numel(), cap, BLOCK=BLOCK, num_warps=NUM_WARPS)


def _gated(gate_up: torch.Tensor, is_gelu: bool) -> torch.Tensor:
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_rows, width), dtype=gate_up.dtype, device=gate_up.device)
    if num_rows:
        grid = (num_rows, triton.cdiv(width, BLOCK))
        silu_mul_kernel[grid](gate_up, out, width, BLOCK=BLOCK, IS_GELU=is_gelu, num_warps=NUM_WARPS)
    return out


def variants(_arch: str) -> list[Variant]:
    """Compilations to check: each dtype and activation."""
    found = [
        Variant(
            name=f"{name}[{dtype}]",
            kernel=silu_mul_kernel,
            types={"gate_up_ptr": f"*{dtype}", "out_ptr": f"*{dtype}", "width": "i32"},
            constants={"BLOCK": BLOCK, "IS_GELU": name == "gelu_mul"},
            num_warps=NUM_WARPS,
            aligned=("width",),
        )
        for name in ("silu_mul", "gelu_mul")
        for dtype in ("bf16", "fp32")
    ]
    types = {"x_ptr": "*bf16", "size": "i32", "cap": "fp32"}
    found.append(Variant("soft_cap[bf16]", soft_cap_kernel, types, {"BLOCK": BLOCK}, NUM_WARPS))
    return found
