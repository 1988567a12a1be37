"""Native CPU kernels: a C library for x86-64 (AVX-512 or AVX2) and AArch64, called through ctypes.

Importing this package always works; ``available()`` says whether the library can run here. Results do not
depend on the instruction set, the number of threads or the other rows of a batch, bit for bit.
"""

try:
    from .attention import paged_attention, prepare_plan
    from .elementwise import add_rms_norm, gelu_mul, rms_norm, rotary_kv_write, silu_mul, soft_cap
    from .experts import combine_experts, grouped_linear, pack_experts, route_experts
    from .graph import capture
    from .lora import lora_add
    from .quantised import pack_quantised
    from .sampling import mark_seen, sample
    from .threads import get_num_threads, set_num_threads
    from .weights import linear, pack_linear
except ImportError as error:
    unavailable_reason: str | None = str(error)
else:
    unavailable_reason = None

__all__ = [
    "add_rms_norm",
    "available",
    "capture",
    "combine_experts",
    "gelu_mul",
    "get_num_threads",
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
    "set_num_threads",
    "silu_mul",
    "soft_cap",
    "unavailable_reason",
]


def available() -> bool:
    """Whether the library was built and this CPU can run it; ``unavailable_reason`` says why not."""
    return unavailable_reason is None
