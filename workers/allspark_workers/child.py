"""The other end of `children`: a process that works at its own risk.

Its arguments are CPU_S and BYTES: a piece of work that takes more seconds of CPU time, or more memory, kills
the process and nothing else. Standard input and output carry frames: four bytes of length, big endian, and
JSON.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

LENGTH_BYTES = 4

Handle = Callable[[dict[str, Any]], dict[str, Any]]


def main(handle: Handle, arguments: list[str]) -> None:
    """Serves standard input and output until the input ends."""
    cpu_s, room = float(arguments[0]), int(arguments[1])
    out = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what a library prints must not get between the frames
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # dying is its job
    _bound_memory(room)
    read = sys.stdin.buffer.read
    while len(head := read(LENGTH_BYTES)) == LENGTH_BYTES:
        work = json.loads(read(int.from_bytes(head, "big")))
        _allow(cpu_s)
        data = json.dumps(handle(work)).encode()
        frame = memoryview(len(data).to_bytes(LENGTH_BYTES, "big") + data)
        while frame:
            frame = frame[out.write(frame) :]


def _allow(cpu_s: float) -> None:
    """The kernel ends this process when the next `cpu_s` seconds of computing are used up."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(used.ru_utime + used.ru_stime + cpu_s) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))


def _bound_memory(extra_bytes: int) -> None:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + extra_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
