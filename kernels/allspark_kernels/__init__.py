"""AllSpark kernels: each operation has one signature; its device decides which implementation runs.

Triton serves CUDA, a native C library serves the CPU, and plain PyTorch is the oracle of both. The
package depends on nothing else of the fleet, so it can be taken alone to a GPU machine.
"""

from .api import (
    add_rms_norm,
    gelu_mul,
    linear,
    lora_add,
    mark_seen,
    pack_linear,
    pack_quantised,
    paged_attention,
    rms_norm,
    rotary_kv_write,
    sample,
    silu_mul,
    soft_cap,
)
from .api_experts import combine_experts, grouped_linear, pack_experts, route_experts
from .backend import backend_for, compute_dtype, use_backend
from .experts import PackedExperts, Routing
from .graphs import GraphPool, capture, no_capture
from .kv_format import CacheMode, KVFormat, kv_format
from .lora import NO_ADAPTER, LoraPlan, LoraSite, LoraTable, LoraWeights, plan_lora
from .plan import AttentionPlan, plan_attention, reserve_decode_plan
from .quantised import QuantFormat, QuantisedWeight, quantise, stack_quantised
from .types import PackedLinear, SamplingBatch

__all__ = [
    "NO_ADAPTER",
    "AttentionPlan",
    "CacheMode",
    "GraphPool",
    "KVFormat",
    "LoraPlan",
    "LoraSite",
    "LoraTable",
    "LoraWeights",
    "PackedExperts",
    "PackedLinear",
    "QuantFormat",
    "QuantisedWeight",
    "Routing",
    "SamplingBatch",
    "add_rms_norm",
    "backend_for",
    "capture",
    "combine_experts",
    "compute_dtype",
    "gelu_mul",
    "grouped_linear",
    "kv_format",
    "linear",
    "lora_add",
    "mark_seen",
    "no_capture",
    "pack_experts",
    "pack_linear",
    "pack_quantised",
    "paged_attention",
    "plan_attention",
    "plan_lora",
    "quantise",
    "reserve_decode_plan",
    "rms_norm",
    "rotary_kv_write",
    "route_experts",
    "sample",
    "silu_mul",
    "soft_cap",
    "stack_quantised",
    "use_backend",
]
