"""Weights out of device memory and back (spec 1.4.5, 2.4.7).

On CUDA a tensor's bytes go to pinned host memory. On the CPU device memory *is* host memory, so they go to a
file that has no name, and the pages that held them go back to the system. Either way every tensor stays the
object that it is, and comes back bit for bit.
"""

from __future__ import annotations

import os
import tempfile
from typing import IO, Protocol

import torch

from allspark_workers.engine.errors import ModelIOError, ModelMemoryError
from allspark_workers.engine.memory import Block, blocks_of, forget, give_back, split_own, tensors_of


class Swapped(Protocol):
    """Weights that are out of device memory; `nbytes` of them."""

    nbytes: int

    def restore(self) -> None:
        """Brings them back. Raises EngineError, and then they are still out."""


def swap_out(root: object, device: torch.device, threshold: int) -> Swapped:
    """Move every tensor under `root` with more than `threshold` bytes out of the memory of `device`.

    Nothing may compute with them meanwhile. The weights of a CPU go to the system's temporary directory.
    Raises ModelIOError or ModelMemoryError, and then nothing has moved.
    """
    if device.type == "cuda":
        tensors = [t for t in tensors_of(root) if isinstance(t, torch.Tensor) and t.device.type == "cuda"]
        storages = [t.untyped_storage() for t in tensors]
        return HostCopy([s for s in storages if s.nbytes() > threshold], device)
    return SwapFile([b for b in blocks_of(root) if b.nbytes > threshold])


class HostCopy:
    """Storages of a device, copied to host memory (pinned where there is CUDA) and emptied."""

    def __init__(self, storages: list[torch.UntypedStorage], device: torch.device) -> None:
        self._device = device
        self._storages = storages
        self.nbytes = sum(s.nbytes() for s in storages)
        try:
            self._copies = [self._copy(s) for s in storages]
        except (RuntimeError, MemoryError) as error:
            raise ModelMemoryError(
                f"the host has no memory for {self.nbytes} bytes of weights: {error}"
            ) from error
        for storage in storages:
            storage.resize_(0)
        give_back(device)

    def _copy(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        is_pinned = self._device.type == "cuda"
        copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=is_pinned).untyped_storage()
        return copy.copy_(storage)

    def restore(self) -> None:
        """Raises ModelMemoryError if the device has no room for them now."""
        try:
            for storage, copy in zip(self._storages, self._copies, strict=True):
                storage.resize_(copy.nbytes())
        except (torch.OutOfMemoryError, RuntimeError) as error:
            for storage in self._storages:
                storage.resize_(0)
            give_back(self._device)
            raise ModelMemoryError(
                f"{self._device} has no room for {self.nbytes} bytes of weights: {error}"
            ) from error
        for storage, copy in zip(self._storages, self._copies, strict=True):
            storage.copy_(copy)
        self._copies = []


class SwapFile:
    """Blocks of this process's memory, written to a nameless file and given back to the system.

    Their addresses stay reserved, so whatever points there is right again once they are back.
    """

    def __init__(self, blocks: list[Block]) -> None:
        # What is a mapped file already needs no copy: its pages come back from there by themselves.
        self._blocks, mapped = split_own(blocks)
        self.nbytes = sum(b.nbytes for b in blocks)
        where = tempfile.gettempdir()
        try:
            self._file = self._write(where)
        except OSError as error:
            raise ModelIOError(
                f"cannot write {self.nbytes} bytes of weights to {where}: {error.strerror}; "
                "name a directory with room in the environment variable TMPDIR"
            ) from error
        for block in [*self._blocks, *mapped]:
            forget(block)

    def _write(self, directory: str) -> IO[bytes]:
        file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115 - open until restored
        try:
            for block in self._blocks:
                data = block.view()
                while data:
                    data = data[file.write(data) :]
            os.fdatasync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # not into the page cache instead
        except BaseException:
            file.close()
            raise
        return file

    def restore(self) -> None:
        """Raises ModelIOError if the file cannot be read."""
        try:
            self._file.seek(0)
            for block in self._blocks:
                data = block.view()
                while data:
                    count = self._file.readinto(data)  # type: ignore[attr-defined]
                    if not count:
                        raise OSError(0, "the file has become shorter")
                    data = data[count:]
        except OSError as error:
            raise ModelIOError(f"cannot read swapped weights back: {error.strerror}") from error
        self._file.close()
