"""How kernels are specialised: GPU architectures, and the launches that the aot checker compiles.

Numbers that change from step to step are marked ``do_not_specialize``: Triton would otherwise compile a
kernel anew for the value 1 and for multiples of 16, in the middle of serving.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton

# Architectures with their own tile sizes. A newer NVIDIA GPU is served like sm_90, an older one like sm_80.
ARCHS = ("sm_80", "sm_90", "gfx942")


@dataclass(frozen=True)
class Variant:
    """One compilation of ``kernel``: argument types by name, compile-time constants, launch options."""

    name: str
    kernel: Any
    types: Mapping[str, str]
    constants: Mapping[str, Any]
    num_warps: int
    num_stages: int = 2
    # Whether the kernel's products are meant for tensor cores.
    is_matrix_product: bool = False
    # Integer arguments that are multiples of 16 in real launches (strides), like all pointers.
    aligned: tuple[str, ...] = ()


@functools.lru_cache
def arch_of(device: torch.device) -> str:
    """The architecture whose tile sizes serve ``device`` (the interpreter's CPU tensors: sm_80)."""
    if torch.version.hip:
        return "gfx942"
    is_new = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return "sm_90" if is_new else "sm_80"


def next_power_of_2(n: int) -> int:
    """Smallest power of two >= n."""
    return int(triton.next_power_of_2(n))
