"""The host tier keeps every bit of a span, takes no more memory than it may, and says so if there is none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from allspark_workers.engine import host_store
from allspark_workers.engine.host_store import SpanStore
from allspark_workers.models.decoder import KVCache

SPAN = 16


@pytest.mark.parametrize("slots_per_piece", [1, 2, 100])
@pytest.mark.parametrize("mode", [0, 1])
def test_the_host_store_keeps_every_bit(
    mode: int, slots_per_piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype = torch.float32 if mode == 0 else torch.uint8
    raw = torch.randint(0, 256, (2, 5, 2, SPAN, 32), dtype=torch.uint8)  # as floats also NaN and denormals
    frames = tuple((raw + i).view(dtype) for i in range(4))
    cache = KVCache(frames[:2], frames[2:]) if mode == 0 else KVCache(frames[:1], frames[1:2])
    tensors = [*cache.keys, *cache.values]
    before = [tensor.clone().view(torch.uint8) for tensor in tensors]
    slot_bytes = sum(tensor[0].nbytes for tensor in tensors)
    monkeypatch.setattr(host_store, "_PIECE_BYTES", slots_per_piece * slot_bytes + 5)
    store = SpanStore(cache, 3)
    assert sum(piece.nbytes for piece in store._pieces) == 3 * slot_bytes
    store.save(1, 2)
    store.save(0, 0)
    for tensor in tensors:
        tensor.zero_()
    store.load(2, 0)
    store.load(0, 1)
    for tensor, old in zip(tensors, before, strict=True):
        now = tensor.view(torch.uint8)
        assert torch.equal(now[0], old[1]) and torch.equal(now[1], old[0])


def test_no_memory_for_the_host_tier_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> torch.Tensor:
        raise RuntimeError("no memory")

    cache = KVCache((torch.zeros(2, 1),), (torch.zeros(2, 1),))
    monkeypatch.setattr(host_store.torch, "empty", refuse)
    with pytest.raises(host_store.ModelMemoryError, match="--prefix-host-memory"):
        SpanStore(cache, 1000)
