"""How many threads compute, and how they wait. Call `set_environment` before anything imports torch.

OpenMP reads its environment once, when its library is loaded (with torch): idle workers then spin for up to
200 ms by default and take the cores away from the broker, gateway and Valkey on the same machine. Passive
waiting gives them back at once. Measured on two busy cores, a matrix product of 16 rows followed by some
Python, again and again: half the CPU time (3.3 instead of 6.7 ms), and 6 to 15 instead of 14 to 21 ms.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

# The engine thread holds the GIL only between kernels; a publisher that waits for it should get it soon.
SWITCH_INTERVAL_S = 0.0005

_M_ARENA_MAX = -8  # of malloc.h

_PASSIVE = {
    "OMP_WAIT_POLICY": "PASSIVE",  # any OpenMP
    "GOMP_SPINCOUNT": "0",  # GNU, with the PyPI builds of torch
    "KMP_BLOCKTIME": "0",  # Intel and LLVM
}


def usable_cores() -> int:
    """Cores this process may use: its affinity mask, cut by a cgroup v2 CPU quota."""
    cores = len(os.sched_getaffinity(0))
    quota = Path("/sys/fs/cgroup/cpu.max")
    try:
        limit, period = quota.read_text().split()
    except (OSError, ValueError):
        return cores
    if limit == "max":
        return cores
    return max(1, min(cores, round(int(limit) / int(period))))


def set_environment(num_threads: int = 0) -> int:
    """Set the OpenMP variables that the user has not set; 0 threads: all usable cores. Returns the number.

    Raises RuntimeError if torch is imported already: the variables would have no effect.
    """
    if "torch" in sys.modules:
        raise RuntimeError("thread settings must be applied before torch is imported")
    count = num_threads or usable_cores()
    for name, value in _PASSIVE.items():
        os.environ.setdefault(name, value)
    os.environ["OMP_NUM_THREADS"] = str(count)
    _use_one_heap()
    return count


def _use_one_heap() -> None:
    """Have all threads allocate from glibc's main heap, unless the user has set MALLOC_ARENA_MAX.

    malloc_trim(3) returns only the main heap's top to the system. The heaps of other threads keep up to
    64 MiB each there, which is what a model that was loaded by a thread would leave behind.
    """
    libc = ctypes.CDLL(None)
    if "MALLOC_ARENA_MAX" not in os.environ and hasattr(libc, "mallopt"):
        libc.mallopt(_M_ARENA_MAX, 1)


def apply_threads(num_threads: int) -> int:
    """Set the thread count of torch and of the native kernels at run time; 0: all usable cores.

    Returns the number. Process-wide: the last model that is loaded decides.
    """
    import torch
    from allspark_kernels import native

    count = num_threads or usable_cores()
    if native.available():
        native.set_num_threads(count)
    if torch.get_num_threads() != count:
        torch.set_num_threads(count)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    return count
