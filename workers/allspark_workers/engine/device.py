"""The few things that differ between devices and are no kernels: memory, the current device, its health."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

_CGROUP = Path("/sys/fs/cgroup")


def use_device(device: torch.device) -> AbstractContextManager[object]:
    """Make `device` the current one of this thread inside the block, as launches of kernels expect."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def check_health(device: torch.device) -> None:
    """Raise torch.AcceleratorError if an earlier failure has made the device unusable for this process."""
    wait_for(device)


def wait_for(device: torch.device) -> None:
    """Block until `device` has done what this thread gave it.

    Only this thread's stream: waiting for a whole device breaks a graph that another thread captures on it.
    """
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def upload(values: object, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of `values` (an array or nested lists) on `device`, without waiting for what that computes.

    From pageable memory a copy would wait for everything that was queued before it. On the CPU the tensor
    may share the memory of an array.
    """
    if device.type != "cuda":
        return torch.as_tensor(values, dtype=dtype)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


class Staging:
    """An int64 tensor at a fixed address that the host fills anew for every step.

    `host` and `tensor` are the same memory on the CPU. On a GPU `host` is pinned, `upload` queues the copy,
    and `wait` has to come before the host writes again: the copy may still be reading.
    """

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._pinned = torch.zeros(shape, dtype=torch.int64, pin_memory=is_cuda)
        self.host: NDArray[np.int64] = self._pinned.numpy()
        self.tensor = self._pinned.to(device)
        self._copied = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Block until the last copy is over."""
        if self._copied is not None:
            self._copied.synchronize()

    def upload(self) -> None:
        """Queue the copy on the current stream."""
        if self._copied is not None:
            self.tensor.copy_(self._pinned, non_blocking=True)
            self._copied.record()


def free_bytes(device: torch.device) -> int:
    """Bytes that may still be allocated on `device`: for the CPU, what the system and the cgroup leave."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    system = _meminfo().get("MemAvailable", 0)
    cgroup = _cgroup_free()
    return system if cgroup is None else min(system, cgroup)


def _meminfo() -> dict[str, int]:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith("kB")}


def _cgroup_free() -> int | None:
    """What a cgroup v2 limit leaves, counting its inactive page cache as free; None without a limit."""
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
        stat = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    if limit == "max":
        return None
    return max(0, int(limit) - used + int(stat.get("inactive_file", 0)))
