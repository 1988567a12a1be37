"""What processes hold: from /proc, from their own account of themselves, and from the store."""

import asyncio
import json
import signal
import time
from collections import defaultdict
from pathlib import Path

from allspark.launcher.process import ManagedProcess
from allspark_bus import vitals
from allspark_bus.store import Store

ANSWER_S = 60.0
Levels = dict[str, float]
RATE_S = 8.0  # about as long as results live, and a gateway stays subscribed to their streams


def of_process(pid: int) -> Levels:
    """Resident bytes, open descriptors and threads of a process."""
    root = Path(f"/proc/{pid}")
    status = dict(line.split(":", 1) for line in (root / "status").read_text().splitlines())
    return {
        "resident bytes": int(status["VmRSS"].split()[0]) * 1024,
        "descriptors": sum(1 for _ in (root / "fd").iterdir()),
        "system threads": int(status["Threads"]),
    }


async def of_store(store: Store, pid: int) -> Levels:
    """The same of the store, with its keys and the memory that it says it uses."""
    info = await store.command("INFO", "memory")
    text = info.decode() if isinstance(info, bytes) else str(info)
    used = next(line.split(":")[1] for line in text.splitlines() if line.startswith("used_memory:"))
    keys = len(await store.command("KEYS", "as:*"))
    return {**of_process(pid), "keys": keys, "used bytes": int(used)}


class Accounts:
    """Asks processes what they hold; `hear` gets every line that they write."""

    def __init__(self) -> None:
        self._answers: dict[str, asyncio.Queue[Levels]] = defaultdict(asyncio.Queue)
        self._loop: asyncio.AbstractEventLoop | None = None

    def hear(self, name: str, line: str) -> None:
        """Called by the threads that read what processes write."""
        _, mark, account = line.partition(vitals.MARK)
        if mark and self._loop is not None:
            levels = {key: float(size) for key, size in json.loads(account).items()}
            self._loop.call_soon_threadsafe(self._answers[name].put_nowait, levels)

    async def of(self, process: ManagedProcess) -> Levels:
        """All levels of a process; raises TimeoutError."""
        self._loop = asyncio.get_running_loop()
        if process.pid is None:
            raise TimeoutError(f"{process.name} does not run")
        answers = self._answers[process.name]
        while not answers.empty():
            answers.get_nowait()  # of a sample that was given up
        process.signal(signal.SIGUSR1)
        async with asyncio.timeout(ANSWER_S):
            account = await answers.get()
        return of_process(process.pid) | account


class Samples:
    """Levels of several processes over time: `series[process][quantity]` is a list of (seconds, value)."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._begun: list[tuple[float, int]] = []
        self.rates: list[tuple[float, float]] = []
        self.series: dict[str, dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))

    def add(self, levels: dict[str, Levels], num_begun: int) -> None:
        """A quantity that a process did not name is 0; one that it names for the first time was 0 before.

        `num_begun`: requests so far. `rates` has those begun in a second, over `RATE_S` before a sample.
        """
        now = time.monotonic() - self._began
        self._begun.append((now, num_begun))
        first = next(one for one in self._begun if one[0] >= now - RATE_S or one is self._begun[-1])
        before = self._begun[max(0, self._begun.index(first) - 1)]
        self.rates.append((now, (num_begun - before[1]) / max(now - before[0], 1e-9)))
        for process, found in levels.items():
            known = self.series[process]
            times = [at for at, _ in known["descriptors"]]
            for quantity in found.keys() - known.keys():
                known[quantity] = [(at, 0.0) for at in times]
            for quantity in known:
                known[quantity].append((now, found.get(quantity, 0.0)))
