"""How much memory a device has left."""

from __future__ import annotations

from pathlib import Path

import torch

_CGROUP = Path("/sys/fs/cgroup")


def free_bytes(device: torch.device) -> int:
    """Bytes that may still be allocated on `device`: for the CPU, what the system and the cgroup leave."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    system = _meminfo().get("MemAvailable", 0)
    cgroup = _cgroup_free()
    return system if cgroup is None else min(system, cgroup)


def total_bytes(device: torch.device) -> int:
    """Bytes of memory `device` has in all."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return _meminfo().get("MemTotal", 0)


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
