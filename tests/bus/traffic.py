"""Requests that are written and read at the same time, as a worker and a client do it."""

import asyncio
import zlib
from collections.abc import Callable

from allspark_bus.ledger import APPENDED, GAP, Append, Ending, Entry, Ledger, now_ms
from allspark_bus.streams import Streams
from allspark_bus.wakeups import Wakeups

from tests.topologies import LIMIT_S


def tokens_of(rid: str, count: int) -> list[int]:
    """What the request generates."""
    return [1 + zlib.crc32(f"{rid}:{i}".encode()) % 1000 for i in range(count)]


def entry(rid: str) -> Entry:
    return Entry(rid, "m", 1, "w", b"body", now_ms(), 0, 0, 0, 0)


class Writer:
    """Appends a request's tokens one by one until it is told to end."""

    def __init__(self, ledger: Ledger, rid: str) -> None:
        self._ledger = ledger
        self.rid = rid
        self.num_written = 0
        self.rewinds = 0
        self._grew = asyncio.Condition()
        self._must_end = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        outcome = (await self._ledger.admit(entry(self.rid), b"d")).outcome
        assert outcome in ("new", "same"), "the same if the answer was lost and it was sent again"
        self._task = asyncio.create_task(self._run())

    async def grown(self, by: int = 2) -> None:
        """Waits until so many more tokens than now are acknowledged."""
        assert self._task is not None
        wanted = self.num_written + by
        growing = asyncio.create_task(self._until(lambda: self.num_written >= wanted))
        await asyncio.wait([growing, self._task], timeout=LIMIT_S, return_when=asyncio.FIRST_COMPLETED)
        assert growing.done(), f"{self.rid} stays at {self.num_written} tokens"

    async def _until(self, holds: Callable[[], bool]) -> None:
        async with self._grew:
            await self._grew.wait_for(holds)

    async def end(self) -> list[int]:
        """Appends the end; returns what was generated."""
        assert self._task is not None
        self._must_end.set()
        await asyncio.wait_for(self._task, LIMIT_S)
        return tokens_of(self.rid, self.num_written)

    async def _run(self) -> None:
        n, longest = 0, 0
        while True:
            longest = max(longest, n)  # somebody may have read so much of what is lost
            ending = Ending(3, "eos") if self._must_end.is_set() and n == longest else None
            append = Append(self.rid, "m", 1, n, tokens_of(self.rid, n + 1)[n:], ending)
            [(code, position)] = await self._ledger.append([append])
            if code == GAP:
                assert position < n
                n, self.rewinds = position, self.rewinds + 1
                continue
            assert code == APPENDED, f"{self.rid}: code {code} at {n}"
            n += 1
            async with self._grew:
                self.num_written = n
                self._grew.notify_all()
            if ending is not None:
                return
            await asyncio.sleep(0.002)  # a step of the engine


async def follow(streams: Streams, wakeups: Wakeups, rid: str) -> list[int]:
    """Everything up to the end, for a reader that keeps its own position and sleeps until it is woken."""
    seen: list[int] = []
    async with wakeups.watch(rid) as event:
        while True:
            event.clear()
            batch = await streams.read(rid, len(seen))
            seen += batch.tokens
            if batch.status:
                return seen
            await asyncio.wait_for(event.wait(), LIMIT_S)
