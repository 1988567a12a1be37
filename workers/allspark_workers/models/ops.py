"""The kernels a forward pass calls, as one object, so that measuring them costs nothing when switched off."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from time import perf_counter
from typing import Any

import allspark_kernels as kernels
import torch

from allspark_workers.engine.device import wait_for


def _embed(table: torch.Tensor, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return table.index_select(0, ids).to(dtype)


@dataclass(frozen=True, slots=True)
class KernelOps:
    """Signatures: `allspark_kernels`. `embed(table [V, H], ids [T], dtype) -> [T, H]`."""

    embed: Callable[..., torch.Tensor] = _embed
    linear: Callable[..., torch.Tensor] = kernels.linear
    lm_head: Callable[..., torch.Tensor] = kernels.linear
    rms_norm: Callable[..., torch.Tensor] = kernels.rms_norm
    add_rms_norm: Callable[..., torch.Tensor] = kernels.add_rms_norm
    rotary_kv_write: Callable[..., None] = kernels.rotary_kv_write
    paged_attention: Callable[..., torch.Tensor] = kernels.paged_attention
    silu_mul: Callable[..., torch.Tensor] = kernels.silu_mul
    gelu_mul: Callable[..., torch.Tensor] = kernels.gelu_mul
    soft_cap: Callable[..., None] = kernels.soft_cap
    route_experts: Callable[..., kernels.Routing] = kernels.route_experts
    grouped_linear: Callable[..., torch.Tensor] = kernels.grouped_linear
    combine_experts: Callable[..., torch.Tensor] = kernels.combine_experts
    sample: Callable[..., torch.Tensor] = kernels.sample
    lora_add: Callable[..., None] = kernels.lora_add


DIRECT = KernelOps()

_TITLES = {
    "embed": "Embedding",
    "linear": "Linear",
    "lm_head": "LmHead",
    "rms_norm": "RMSNorm",
    "add_rms_norm": "AddRMSNorm",
    "rotary_kv_write": "RotaryKVWrite",
    "paged_attention": "PagedAttention",
    "silu_mul": "SiluMul",
    "gelu_mul": "GeluMul",
    "soft_cap": "SoftCap",
    "route_experts": "RouteExperts",
    "grouped_linear": "GroupedLinear",
    "combine_experts": "CombineExperts",
    "sample": "Sample",
    "lora_add": "LoraAdd",
}


def timed_ops(record: Callable[[str, str, float], None], device: torch.device) -> KernelOps:
    """The same operations, each reported as `record("forward", name, seconds)`; a GPU is waited for."""

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = perf_counter()
            result = function(*args, **kwargs)
            wait_for(device)
            record("forward", name, perf_counter() - start)
            return result

        return call

    wrapped = {f.name: timed(_TITLES[f.name], getattr(DIRECT, f.name)) for f in fields(KernelOps)}
    return KernelOps(**wrapped)
