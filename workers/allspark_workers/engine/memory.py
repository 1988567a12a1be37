"""Where a model's tensors lie, how much of that is resident, and giving memory back to the system."""

from __future__ import annotations

import bisect
import ctypes
import functools
import gc
import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from allspark_kernels import no_capture
from allspark_kernels.lora import LoraSite, LoraTable, LoraWeights

PAGE_BYTES = mmap.PAGESIZE
#: Kernels find these by addresses in a table on the device, so they never move.
_FIXED = (LoraSite, LoraTable, LoraWeights)
_PLAIN = (str, bytes, bytearray, int, float, complex, bool, type(None), torch.dtype, torch.device)


@dataclass(frozen=True, slots=True)
class Block:
    """`nbytes` bytes of this process's memory."""

    address: int
    nbytes: int

    def pages(self) -> Block:
        """The whole pages inside; possibly empty."""
        start = -(-self.address // PAGE_BYTES) * PAGE_BYTES
        end = (self.address + self.nbytes) // PAGE_BYTES * PAGE_BYTES
        return Block(start, max(0, end - start))

    def view(self) -> memoryview:
        """The bytes, writable."""
        return memoryview((ctypes.c_char * self.nbytes).from_address(self.address)).cast("B")


def tensors_of(root: object) -> list[torch.Tensor | Block]:
    """Every tensor that is reachable from `root`, each memory once; packed weights of C kernels as blocks."""
    found: dict[int, torch.Tensor | Block] = {}
    for part in _leaves(root, set()):
        address = part.address if isinstance(part, Block) else part.untyped_storage().data_ptr()
        if address:
            found.setdefault(address, part)
    return list(found.values())


def blocks_of(root: object) -> tuple[Block, ...]:
    """The memory of every tensor that is reachable from `root`; of CUDA tensors it is addresses only."""
    return tuple(map(block_of, tensors_of(root)))


def block_of(part: torch.Tensor | Block) -> Block:
    """The memory of a tensor's whole storage."""
    if isinstance(part, Block):
        return part
    storage = part.untyped_storage()
    return Block(storage.data_ptr(), storage.nbytes())


def _leaves(value: object, seen: set[int]) -> Iterator[torch.Tensor | Block]:
    if isinstance(value, (*_PLAIN, *_FIXED)) or id(value) in seen:
        return
    seen.add(id(value))  # of objects that `root` keeps alive, so that no id is used twice
    if isinstance(value, torch.Tensor):
        yield value
        return
    block = getattr(value, "block", None)  # a layout of the C kernels
    if isinstance(block, int):
        yield Block(block, value.nbytes)  # type: ignore[attr-defined]
    for part in _parts(value):
        yield from _leaves(part, seen)


def _parts(value: object) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, list | tuple | set | frozenset):
        return list(value)
    if isinstance(value, ModuleType | FunctionType | MethodType):
        return []
    return _attributes(value)


def _attributes(value: object) -> list[Any]:
    names = {n for cls in type(value).__mro__ for n in getattr(cls, "__slots__", ())}
    slots = [getattr(value, n) for n in names if n not in ("__weakref__", "__dict__") and hasattr(value, n)]
    return [*slots, *getattr(value, "__dict__", {}).values()]


def resident_bytes(block: Block) -> int:
    """How much of a block is in physical memory (mincore(2))."""
    pages = block.pages()
    if not pages.nbytes:
        return 0
    vector = (ctypes.c_ubyte * (pages.nbytes // PAGE_BYTES))()
    if _libc().mincore(ctypes.c_void_p(pages.address), ctypes.c_size_t(pages.nbytes), vector):
        return block.nbytes
    return PAGE_BYTES * sum(map((1).__and__, vector))


def forget(block: Block) -> None:
    """Give the whole pages of a block back (madvise(2)); what they held is lost."""
    pages = block.pages()
    if not pages.nbytes:
        return
    address, count = ctypes.c_void_p(pages.address), ctypes.c_size_t(pages.nbytes)
    if _libc().madvise(address, count, mmap.MADV_DONTNEED):
        raise OSError(ctypes.get_errno(), f"madvise of {pages.nbytes} bytes failed")


def split_own(blocks: list[Block]) -> tuple[list[Block], list[Block]]:
    """Blocks in writable memory of this process alone, and those in mapped files."""
    own: list[tuple[int, int]] = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, mode, _, _, inode, *_ = line.split()
        if inode == "0" and mode.startswith("rw") and mode.endswith("p"):
            start, end = (int(x, 16) for x in span.split("-"))
            own.append((start, end))
    starts = [start for start, _ in own]  # the kernel lists them in order

    def is_own(block: Block) -> bool:
        at = bisect.bisect_right(starts, block.address) - 1
        return at >= 0 and block.address < own[at][1]

    return [b for b in blocks if is_own(b)], [b for b in blocks if not is_own(b)]


def give_back(device: torch.device) -> None:
    """Return to the system what was freed: collect cycles, empty the caches of the allocators."""
    gc.collect()
    empty_device_cache(device)
    if hasattr(_libc(), "malloc_trim"):  # glibc
        _libc().malloc_trim(0)


def empty_device_cache(device: torch.device) -> None:
    """Let the system see as free what PyTorch keeps of a GPU's memory, and of pinned memory, for later."""
    if device.type == "cuda":
        with no_capture():
            torch.cuda.empty_cache()
            getattr(torch.accelerator, "empty_host_cache", lambda: None)()  # not in every version served


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
