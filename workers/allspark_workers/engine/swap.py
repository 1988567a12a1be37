"""Weights out of device memory and back (spec 1.4.5, 2.4.7).

On CUDA a tensor's bytes go to pinned host memory. On the CPU device memory *is* host memory, so they go to a
file that has no name, and the pages that held them go back to the system. Either way every tensor stays the
object that it is, and comes back bit for bit.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from typing import IO, Protocol

import torch

from allspark_workers.engine.errors import ModelIOError, ModelMemoryError
from allspark_workers.engine.memory import Block, blocks_of, forget, give_back, split_own, tensors_of

_PIECE_BYTES = 1 << 28


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
    """Storages of a device, copied to host memory (pinned where there is CUDA) and emptied.

    Their bytes lie behind each other in pieces of one size, since PyTorch rounds pinned memory up to a power
    of two.
    """

    def __init__(self, storages: list[torch.UntypedStorage], device: torch.device) -> None:
        self._device = device
        self._storages = storages
        self._sizes = [s.nbytes() for s in storages]
        self.nbytes = sum(self._sizes)
        self._pieces: list[torch.Tensor] = []
        try:
            for start in range(0, self.nbytes, _PIECE_BYTES):
                size = min(_PIECE_BYTES, self.nbytes - start)
                piece = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
                self._pieces.append(piece)
        except (RuntimeError, MemoryError) as error:
            self._pieces = []
            give_back(device)
            raise ModelMemoryError(
                f"the host has no memory for {self.nbytes} bytes of weights: {error}"
            ) from error
        for stored, copy in self._parts():
            copy.copy_(stored)
        for storage in storages:
            storage.resize_(0)
        give_back(device)

    def _parts(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Bytes of the storages, and where they are in the pieces."""
        offset = 0
        for storage in self._storages:
            stored = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            start = 0
            while start < len(stored):
                piece, at = divmod(offset, _PIECE_BYTES)
                copy = self._pieces[piece][at : at + len(stored) - start]
                yield stored[start : start + len(copy)], copy
                start, offset = start + len(copy), offset + len(copy)

    def restore(self) -> None:
        """Raises ModelMemoryError if the device has no room for them now."""
        try:
            for storage, size in zip(self._storages, self._sizes, strict=True):
                storage.resize_(size)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            for storage in self._storages:
                storage.resize_(0)
            give_back(self._device)
            raise ModelMemoryError(
                f"{self._device} has no room for {self.nbytes} bytes of weights: {error}"
            ) from error
        for stored, copy in self._parts():
            stored.copy_(copy)
        self._pieces = []
        give_back(self._device)


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
