"""What of a model is in the memory of its device: weights and KV cache, or only the promise of the latter."""

from __future__ import annotations

from typing import TYPE_CHECKING

from allspark_workers.engine.errors import ModelMemoryError, UnsupportedModelError
from allspark_workers.engine.kv import KVLayout, allocate_kv
from allspark_workers.engine.memory import blocks_of, give_back
from allspark_workers.engine.promises import fulfil, promise, reserve, withdraw
from allspark_workers.engine.swap import Swapped, swap_out
from allspark_workers.models.decoder import KVCache
from allspark_workers.models.loader import Model

if TYPE_CHECKING:
    from allspark_workers.parallel.leader import Leader


class Residence:
    """The memory of one model; with `leader` of rank 0's part, and it is told to the other ranks.

    The KV cache stays promised while it is not allocated, so that no other model takes its place.
    """

    def __init__(self, model: Model, layout: KVLayout, leader: Leader | None) -> None:
        self._model = model
        self._layout = layout
        self._leader = leader
        self._kv_bytes = layout.num_spans * layout.bytes_per_span
        self._swapped: Swapped | None = None
        promise(self, model.device, self._kv_bytes)

    @property
    def is_unloaded(self) -> bool:
        """Whether weights are out of device memory."""
        return self._swapped is not None

    def allocate(self) -> KVCache:
        """The KV cache, on every rank. Raises ModelMemoryError if a device has no room for it."""
        cache = allocate_kv(self._model, self._layout)
        fulfil(self, blocks_of(cache))
        if self._leader is not None:
            self._leader.allocate(self._layout.num_spans)
        return cache

    def free(self) -> None:
        """The other ranks drop their KV cache; this one's is the caller's to drop."""
        promise(self, self._model.device, self._kv_bytes)
        if self._leader is not None:
            self._leader.free()

    def unload(self, threshold: int) -> None:
        """Move weight tensors of more than `threshold` bytes out; only while no KV cache is allocated.

        Raises EngineError, and then nothing has moved: UnsupportedModelError for a model of several ranks.
        """
        model = self._model
        self._swapped = swap_out(model.decoder, model.device, threshold)
        withdraw(self)
        give_back(model.device)

    def check_unloadable(self) -> None:
        """Raise UnsupportedModelError where `unload` would."""
        if self._leader is not None:
            raise UnsupportedModelError("the weights lie in several processes")

    def reload(self) -> None:
        """Move the weights back. Raises EngineError, and then they are still out."""
        swapped, device = self._swapped, self._model.device
        if swapped is None:
            raise RuntimeError("reload called on an engine that is not unloaded")
        if (free := reserve(self, device, swapped.nbytes)) < swapped.nbytes:
            raise ModelMemoryError(f"{swapped.nbytes} bytes of weights do not fit: {device} has {free} free")
        try:
            swapped.restore()
        except BaseException:
            withdraw(self)
            raise
        self._swapped = None
        promise(self, device, self._kv_bytes)

    def close(self) -> None:
        """Nothing is promised any more."""
        withdraw(self)
