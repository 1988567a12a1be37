"""RMSNorm, alone or fused with the residual addition. One read and one write of each tensor."""

import torch
import triton
import triton.language as tl

from .variant import Variant, next_power_of_2

# Elements of one program's tile: short rows (attention heads) are taken several at a time.
TILE_ELEMENTS = 1024


@triton.jit(do_not_specialize=["num_rows"])
def rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    num_rows,
    x_stride,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    mask = (rows < num_rows)[:, None] & (columns < WIDTH)[None, :]
    source = rows.to(tl.int64)[:, None] * x_stride + columns[None, :]
    target = rows.to(tl.int64)[:, None] * WIDTH + columns[None, :]
    x = tl.load(x_ptr + source, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        x += tl.load(residual_ptr + target, mask=mask, other=0.0).to(tl.float32)
        # The norm is taken of what the residual stream will hold, that is after rounding.
        rounded = x.to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + target, rounded, mask=mask)
        x = rounded.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=1) / WIDTH + eps)
    weight = tl.load(weight_ptr + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    out = x * scale[:, None] * weight[None, :]
    tl.store(out_ptr + target, out.to(out_ptr.dtype.element_ty), mask=mask)


def _config(width: int) -> tuple[dict[str, int], int]:
    """Tile and warps for rows of ``width``: of nothing else, so that rows do not influence each other."""
    block = max(16, next_power_of_2(width))
    rows = max(1, TILE_ELEMENTS // block)
    num_warps = min(16, max(4, block // 512))
    return {"WIDTH": width, "BLOCK": block, "ROWS": rows}, num_warps


def _launch(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, has_residual: bool
) -> torch.Tensor:
    num_rows, width = x.shape
    out = torch.empty((num_rows, width), dtype=x.dtype, device=x.device)
    if num_rows:
        constants, num_warps = _config(width)
        grid = (triton.cdiv(num_rows, constants["ROWS"]),)
        rms_norm_kernel[grid](
            x,
            residual,
            weight,
            out,
            num_rows,
            x.stride(0),
            eps,
            **constants,
            HAS_RESIDUAL=has_residual,
            num_warps=num_warps,
        )
    return out


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [T, H], weight [H] -> [T, H]."""
    return _launch(x, x, weight, eps, False)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """residual += x in place; returns rms_norm(residual)."""
    return _launch(x, residual, weight, eps, True)


def variants(_arch: str) -> list[Variant]:
    """Compilations to check: hidden sizes from a head to a large model, with and without residual."""
    found = []
    for dtype in ("bf16", "fp32"):
        for width in (4096, 64, 16384):
            constants, num_warps = _config(width)
            for has_residual in (True, False):
                found.append(
                    Variant(
                        name=f"rms_norm[{dtype},H={width},residual={has_residual}]",
                        kernel=rms_norm_kernel,
                        types={
                            "x_ptr": f"*{dtype}",
                            "residual_ptr": f"*{dtype}",
                            "weight_ptr": f"*{dtype}",
                            "out_ptr": f"*{dtype}",
                            "num_rows": "i32",
                            "x_stride": "i32",
                            "eps": "fp32",
                        },
                        constants={**constants, "HAS_RESIDUAL": has_residual},
                        num_warps=num_warps,
                        aligned=("x_stride",),
                    )
                )
    return found
