"""What the ahead-of-time checker needs to know about one way a kernel is launched."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import triton

# The dtypes a model can be served in; fp16 takes the same code as bf16 and is compiled once per kernel.
AOT_DTYPES = ("bf16", "fp16", "fp32")


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
    aligned: tuple[str, ...] = field(default=())


def next_power_of_2(n: int) -> int:
    """Smallest power of two >= n."""
    return int(triton.next_power_of_2(n))


AMD_STAGES = 2


def pipeline_depth(num_stages: int) -> int:
    """Stages of a software pipeline on this GPU vendor: AMD has 64 KiB of shared memory, and wants two."""
    return AMD_STAGES if torch.version.hip else num_stages
