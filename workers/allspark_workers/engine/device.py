"""The few things that differ between devices and are no kernels: memory, the current device, its health."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

_CGROUP = Path("/sys/fs/cgroup")


def use_device(device: torch.device) -> AbstractContextManager[object]:
    """Make `device` the current one of this thread inside the block, as launches of kernels expect."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def check_health(device: torch.device) -> None:
    """Raise torch.AcceleratorError if an earlier failure has made the device unusable for this process."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


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
