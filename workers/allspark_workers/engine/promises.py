"""Memory that engines of this process have planned to use and do not occupy yet.

Several models may share one worker. A KV cache is planned when its model is built, allocated when it is
started, and on the CPU becomes resident only as tokens are written; so what the system calls free is partly
promised. Loading and planning look at what is really left, also when two models load at once.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch

from allspark_workers.engine.device import free_bytes
from allspark_workers.engine.memory import Block, resident_bytes


@dataclass(slots=True)
class Promise:
    """`nbytes` on a device; once allocated, `blocks` are where (on the CPU; on CUDA they count at once)."""

    device: torch.device
    nbytes: int
    blocks: tuple[Block, ...] = ()
    is_allocated: bool = False

    def outstanding(self) -> int:
        """Bytes that are still to be taken from what the system calls free."""
        if not self.is_allocated:
            return self.nbytes
        if self.device.type == "cuda":
            return 0
        return max(0, self.nbytes - sum(map(resident_bytes, self.blocks)))


_lock = threading.Lock()
_promises: weakref.WeakKeyDictionary[object, Promise] = weakref.WeakKeyDictionary()


def reserve(owner: object, device: torch.device, nbytes: int) -> int:
    """What is available on `device`; if that suffices, `owner` promises to allocate so much."""
    with _lock:
        available = _available(device)
        if nbytes <= available:
            _promises[owner] = Promise(device, nbytes)
        return available


def promise(owner: object, device: torch.device, nbytes: int) -> None:
    """`owner` will allocate so much later; replaces what it promised before."""
    with _lock:
        _promises[owner] = Promise(device, nbytes)


def fulfil(owner: object, blocks: tuple[Block, ...]) -> None:
    """`owner` has allocated what it promised; on the CPU `blocks` fill up as they are written to."""
    with _lock:
        _promises[owner].blocks, _promises[owner].is_allocated = blocks, True


def withdraw(owner: object) -> None:
    """`owner` will need nothing."""
    with _lock:
        _promises.pop(owner, None)


def available_bytes(device: torch.device) -> int:
    """What may still be allocated on `device` when every promise is kept."""
    with _lock:
        return _available(device)


class Loading:
    """Weights on their way to a device: what is promised for them shrinks as they come.

    `available` is what the device had when the block began; more than that is not promised. `progress` is
    what `report` passes its arguments on to.
    """

    def __init__(self, device: torch.device, nbytes: int, progress: Callable[[float, str], None]) -> None:
        self._device = device
        self._nbytes = nbytes
        self._progress = progress
        self.available = 0

    def __enter__(self) -> Self:
        self.available = reserve(self, self._device, self._nbytes)
        return self

    def __exit__(self, *_: object) -> None:
        withdraw(self)

    def report(self, fraction: float, text: str) -> None:
        """So much has come."""
        promise(self, self._device, int(self._nbytes * (1 - fraction)))
        self._progress(fraction, text)


def _available(device: torch.device) -> int:
    same = [p for p in _promises.values() if p.device == device]
    return max(0, free_bytes(device) - sum(p.outstanding() for p in same))
