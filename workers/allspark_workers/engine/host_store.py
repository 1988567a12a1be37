"""The host tier's memory: whole spans of the KV cache, copied out and back bit for bit."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from allspark_bus.prefix_keys import PrefixSalt

from allspark_workers.engine.device import use_device
from allspark_workers.engine.errors import ModelMemoryError
from allspark_workers.engine.pages import PageLedger
from allspark_workers.engine.prefix_cache import PrefixCache
from allspark_workers.engine.types import ModelConfig, ModelFacts
from allspark_workers.models.decoder import KVCache

logger = logging.getLogger(__name__)

# PyTorch rounds pinned memory up to a power of two: in one piece, the tier could take twice what was allowed.
_PIECE_BYTES = 1 << 28


class SpanStore:
    """`num_slots` slots, each for K and V of every layer of one span of `cache`.

    From and to a GPU the copies are queued on its stream, in order with the steps, and nobody waits for them:
    a slot's memory is read and written by that stream alone. Raises ModelMemoryError if the host has not
    enough memory that a GPU can read.
    """

    def __init__(self, cache: KVCache, num_slots: int) -> None:
        self.num_slots = num_slots
        self._device = cache.keys[0].device
        self._frames = [*cache.keys, *cache.values]  # each [num_spans, ...], all alike
        frame = self._frames[0][0]
        slot_bytes = len(self._frames) * frame.nbytes
        self._per_piece = max(1, _PIECE_BYTES // slot_bytes)
        counts = [min(self._per_piece, num_slots - first) for first in range(0, num_slots, self._per_piece)]
        is_pinned = self._device.type == "cuda"
        try:
            self._pieces = [
                torch.empty((n, len(self._frames), *frame.shape), dtype=frame.dtype, pin_memory=is_pinned)
                for n in counts
            ]
        except (torch.OutOfMemoryError, RuntimeError) as error:
            raise ModelMemoryError(
                f"cannot allocate {num_slots * slot_bytes} bytes of host memory for cached prefixes: "
                f"{error}; lower --prefix-host-memory"
            ) from error

    def save(self, span: int, slot: int) -> None:
        """Copy a span's content to a slot."""
        with torch.inference_mode(), use_device(self._device):
            for frame, host in zip(self._frames, self._slot(slot), strict=True):
                host.copy_(frame[span], non_blocking=True)

    def load(self, slot: int, span: int) -> None:
        """Copy a slot's content to a span."""
        with torch.inference_mode(), use_device(self._device):
            for frame, host in zip(self._frames, self._slot(slot), strict=True):
                frame[span].copy_(host, non_blocking=True)

    def _slot(self, slot: int) -> tuple[torch.Tensor, ...]:
        piece, index = divmod(slot, self._per_piece)
        return self._pieces[piece][index].unbind(0)


def make_prefix_cache(
    config: ModelConfig, facts: ModelFacts, ledger: PageLedger, cache: KVCache, clock: Callable[[], float]
) -> PrefixCache | None:
    """The prefix cache that a model was built with, None if it was built without.

    Raises ModelMemoryError if there is not enough memory for the host tier.
    """
    if not config.enable_prefix_cache:
        return None
    num_slots = config.prefix_host_bytes // (2 * facts.num_layers * facts.span_bytes)
    if config.prefix_host_bytes and not num_slots:
        logger.warning("--prefix-host-memory %d does not hold one span", config.prefix_host_bytes)
    # Without a time to live nothing outlives its last user, so nothing would ever be put there.
    host = SpanStore(cache, num_slots) if num_slots and config.prefix_cache_ttl_s > 0 else None
    salt = PrefixSalt(facts.digest, facts.span_size, cache_mode=facts.cache_mode)
    return PrefixCache(ledger, salt, config.prefix_cache_ttl_s, clock, host)
