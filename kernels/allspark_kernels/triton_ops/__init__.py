"""Triton implementations, for CUDA devices (and, under TRITON_INTERPRET=1, for CPU tensors in tests)."""

import os

# Triton changes this default between versions; kernels must round alike in all of them.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

from .activation import gelu_mul, silu_mul, soft_cap
from .attention import paged_attention
from .attention_plan import prepare_plan
from .experts import combine_experts, grouped_linear, pack_experts, route_experts
from .linear import linear, pack_linear, pack_quantised
from .lora import lora_add
from .norm import add_rms_norm, rms_norm
from .rotary import rotary_kv_write
from .sampling import mark_seen, sample

__all__ = [
    "add_rms_norm",
    "combine_experts",
    "gelu_mul",
    "grouped_linear",
    "linear",
    "lora_add",
    "mark_seen",
    "pack_experts",
    "pack_linear",
    "pack_quantised",
    "paged_attention",
    "prepare_plan",
    "rms_norm",
    "rotary_kv_write",
    "route_experts",
    "sample",
    "silu_mul",
    "soft_cap",
]
