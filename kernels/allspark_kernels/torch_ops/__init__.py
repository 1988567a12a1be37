"""Plain PyTorch implementations: the oracle of every kernel, and a path that runs on any device."""

from .activation import gelu_mul, silu_mul, soft_cap
from .attention import paged_attention, prepare_plan
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
