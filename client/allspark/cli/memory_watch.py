"""Memory of the processes of a fleet while something happens."""

import threading
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from allspark.launcher import Fleet

INTERVAL_S = 0.1


class Memory(NamedTuple):
    """MiB of memory of one process, see `resident_mib`."""

    start: float
    peak: float
    end: float


def resident_mib(pid: int) -> float:
    """Anonymous resident memory of a process (``RssAnon`` of proc(5)) in MiB; 0 if it is gone.

    What is mapped from files comes and goes as the kernel likes, and would hide what a process keeps.
    """
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon:")), 0.0)


class MemoryWatch:
    """As a context: samples every process of the fleet until the end; then `memory` is complete."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory-watch", daemon=True)
        self.memory: dict[str, Memory] = {}

    def _run(self) -> None:
        while not self._is_over.wait(INTERVAL_S):
            self._sample()

    def _sample(self) -> None:
        for name, process in self._fleet.processes.items():
            now = resident_mib(process.pid) if process.pid else 0.0
            before = self.memory.get(name, Memory(now, now, now))
            self.memory[name] = Memory(before.start, max(before.peak, now), now)

    def __enter__(self) -> Self:
        self._sample()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._thread.join()
        self._sample()
