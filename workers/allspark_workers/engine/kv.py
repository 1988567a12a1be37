"""Size and allocate the paged KV cache."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from allspark_kernels import KVFormat, kv_format

from allspark_workers.engine.errors import ModelMemoryError, UnsupportedModelError
from allspark_workers.engine.promises import available_bytes
from allspark_workers.engine.types import ModelConfig
from allspark_workers.models.decoder import KVCache
from allspark_workers.models.loader import Model

logger = logging.getLogger(__name__)

# Without `kv_bytes`: what may be taken of the memory that is free after the weights are loaded.
_CPU_SHARE = 0.25
_CPU_BOUND_BYTES = 8 << 30
_CUDA_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class KVLayout:
    """`num_spans` spans of `span_size` tokens; a frame (K or V of one layer of a span) has `frame_bytes`."""

    num_spans: int
    span_size: int
    frame_bytes: int
    num_layers: int
    format: KVFormat

    @property
    def bytes_per_span(self) -> int:
        """K and V of all layers of one span."""
        return 2 * self.num_layers * self.frame_bytes

    def with_spans(self, num_spans: int) -> KVLayout:
        """The same layout with another number of spans."""
        return replace(self, num_spans=num_spans)

    @property
    def num_tokens(self) -> int:
        """Tokens the whole pool holds."""
        return self.num_spans * self.span_size


def plan_kv(model: Model, config: ModelConfig) -> KVLayout:
    """How many spans: those of `kv_frames`, or the budget, but then no more than a full batch of the longest
    requests can use.

    Raises ModelMemoryError if not even one span fits, or not what is asked for, UnsupportedModelError if the
    cache mode cannot store heads of this model.
    """
    arch, span_size = model.arch, config.span_tokens
    try:
        stored_as = kv_format(config.cache_mode, model.dtype, arch.head_dim)
    except ValueError as error:
        raise UnsupportedModelError(str(error)) from error
    frame_bytes = stored_as.frame_bytes(arch.num_kv_heads, span_size)
    one_span = KVLayout(1, span_size, frame_bytes, arch.num_layers, stored_as).bytes_per_span
    budget = config.kv_bytes or _default_budget(model.device)
    useful = config.batch_limit * -(-model.max_length // span_size)
    wanted = config.kv_frames // (2 * arch.num_layers)
    if config.kv_frames and not 1 <= wanted <= budget // one_span:
        raise ModelMemoryError(
            f"{config.kv_frames} frames of KV memory, {2 * arch.num_layers} of them for a span: at least one "
            f"span is needed, and the memory for KV spans on {model.device}, {budget} bytes, "
            f"holds {budget // one_span}"
        )
    num_spans = wanted or min(budget // one_span, useful)
    if num_spans < 1:
        raise ModelMemoryError(
            f"{budget} bytes for KV spans on {model.device} do not hold one span of {one_span} bytes"
        )
    if num_spans * span_size < model.max_length:
        logger.warning(
            "the KV pool holds %d tokens: requests are limited to that, not to %d",
            num_spans * span_size,
            model.max_length,
        )
    return KVLayout(num_spans, span_size, frame_bytes, arch.num_layers, stored_as)


def _default_budget(device: torch.device) -> int:
    free = available_bytes(device)
    if device.type == "cuda":
        return int(free * _CUDA_SHARE)
    return min(int(free * _CPU_SHARE), _CPU_BOUND_BYTES)


def allocate_kv(model: Model, layout: KVLayout) -> KVCache:
    """Reserve the memory; on the CPU pages become resident only when tokens are written to them.

    Raises ModelMemoryError if the device refuses.
    """
    arch = model.arch
    width = layout.format.row_width
    shape = (arch.num_layers, 2, layout.num_spans, arch.num_kv_heads, layout.span_size, width)
    try:
        pool = torch.empty(shape, dtype=layout.format.dtype, device=model.device)
    except (torch.OutOfMemoryError, RuntimeError) as error:
        total = layout.num_spans * layout.bytes_per_span
        raise ModelMemoryError(
            f"cannot allocate {total} bytes for {layout.num_spans} KV spans on {model.device}: {error}"
        ) from error
    return KVCache(tuple(pool[:, 0].unbind(0)), tuple(pool[:, 1].unbind(0)))


def copy_spans(cache: KVCache, copies: Mapping[int, int]) -> None:
    """Give each span (key) the content that another one (value) had before."""
    if not copies:
        return
    device = cache.keys[0].device
    targets = torch.tensor(list(copies), dtype=torch.int64, device=device)
    sources = torch.tensor(list(copies.values()), dtype=torch.int64, device=device)
    for frames in (*cache.keys, *cache.values):
        frames.index_copy_(0, targets, frames.index_select(0, sources))
