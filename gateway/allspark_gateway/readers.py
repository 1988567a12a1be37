"""What this gateway knows of the streams its clients read, so that a parked Get costs one future.

A `Reader` stands for one request. It hears of changes through the shared subscription and remembers up to
where the stream is known, so a Get that follows on the last one parks without asking Redis first.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from allspark_bus.errors import FleetError
from allspark_bus.streams import Batch
from allspark_bus.wakeups import Wakeups

from allspark_gateway.pace import Pace

LINGER_S = 5.0  # a reader stays this long after its last call
BUSY_FIRST_S, BUSY_MAX_S = 0.002, 0.05

Waiters = set["asyncio.Future[None]"]


class Reader:
    """One request as the readers in this gateway see it."""

    __slots__ = (
        "_ends",
        "_is_joined",
        "_known_at",
        "_known_length",
        "_parked",
        "_wakeups",
        "changes",
        "cursor",
        "delivered",
        "endings",
        "idle_since_s",
        "last_answer_s",
        "last_call_s",
        "rid",
        "seen_endings",
        "turn",
        "users",
    )

    def __init__(self, rid: str, wakeups: Wakeups) -> None:
        self.rid = rid
        self.users = 0
        self.idle_since_s = 0.0
        self.turn = asyncio.Lock()  # Gets that move the server-side cursor go one after another
        self.cursor = 0  # server-side cursor as the last take left it; 0 when that is not sure
        self.delivered = ""  # call whose answer arrived, which Redis has not been told yet
        self.changes = 0  # hints so far that the stream may have changed
        self.endings = 0  # those of them that may mean its end
        self.seen_endings = 0  # `endings` at the last look
        self.last_call_s = self.last_answer_s = float("-inf")
        self._wakeups = wakeups
        self._is_joined = False
        self._known_at = -1  # `changes` when the stream was open and had `_known_length` tokens
        self._known_length = 0
        self._parked: Waiters = set()  # woken by every change
        self._ends: Waiters = set()  # woken by a possible end only

    def join(self) -> None:
        """Begins to hear of changes; the first hint comes when hearing is sure."""
        if not self._is_joined:
            self._is_joined = True
            self._wakeups.join(self.rid, self._hear)

    def leave(self) -> None:
        """Stops hearing of changes."""
        if self._is_joined:
            self._is_joined = False
            self._wakeups.leave(self.rid, self._hear)

    def _hear(self, published: bytes) -> None:
        self.changes += 1
        if not published.endswith(b"-0"):
            self.endings += 1
            _release(self._ends)
        _release(self._parked)

    def found(self, changes: int, length: int) -> None:
        """A look that began at `changes` saw an open stream of `length` tokens."""
        self._known_at, self._known_length = changes, length

    def is_quiet(self, position: int) -> bool:
        """Whether a look could find nothing after `position`."""
        return self._is_joined and self._known_at == self.changes and position >= self._known_length

    def stir(self) -> None:
        """The server-side cursor went back: whoever is parked must look again."""
        self.cursor = 0
        self._known_at = -1
        self.changes += 1
        _release(self._parked)

    def nudge(self) -> None:
        """Another call's answer arrived: whoever waits for its reservation may try again."""
        _release(self._parked)

    def interrupt(self, error: Exception) -> None:
        """Fails every waiting call."""
        for future in [*self._parked, *self._ends]:
            if not future.done():
                future.set_exception(error)

    async def changed_since(self, changes: int) -> None:
        """Waits until the stream may have changed."""
        while self.changes == changes:
            await _wait(self._parked)

    async def ended_since(self, endings: int) -> None:
        """Waits until the request may have ended."""
        while self.endings == endings:
            await _wait(self._ends)

    async def pause(self, seconds: float) -> None:
        """Waits for any change, a nudge, or the time."""
        await _wait(self._parked, seconds)

    async def pause_unless_ending(self, seconds: float) -> None:
        """Waits the time, or less if the request may have ended since the last look."""
        if self._is_joined and self.endings == self.seen_endings:
            await _wait(self._ends, seconds)


def _release(waiters: Waiters) -> None:
    for future in waiters:
        if not future.done():
            future.set_result(None)


async def _wait(waiters: Waiters, seconds: float | None = None) -> None:
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()
    waiters.add(future)
    timer = None if seconds is None else loop.call_later(seconds, _release, {future})
    try:
        await future
    finally:
        waiters.discard(future)
        if timer is not None:
            timer.cancel()


class Readers:
    """The readers of this gateway. `gather_s` bounds how long tokens are gathered for one answer."""

    def __init__(self, wakeups: Wakeups, gather_s: float) -> None:
        self._wakeups = wakeups
        self._pace = Pace(gather_s)
        self._readers: dict[str, Reader] = {}
        self._closing: FleetError | None = None
        self._sweeper: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._readers)

    def enter(self, rid: str) -> Reader:
        """The reader of a request, for the time until `exit`."""
        reader = self._readers.get(rid)
        if reader is None:
            reader = self._readers[rid] = Reader(rid, self._wakeups)
            if self._sweeper is None:
                self._sweeper = asyncio.get_running_loop().create_task(self._sweep())
        reader.users += 1
        return reader

    def exit(self, reader: Reader, *, is_over: bool) -> None:
        """Ends a use; `is_over` says that there is nothing left to read, ever."""
        reader.users -= 1
        if reader.users == 0:
            reader.idle_since_s = asyncio.get_running_loop().time()
            if is_over:
                self._drop(reader)

    def delivered_call(self, rid: str) -> str:
        """The call whose answer is known to have arrived though Redis has not been told, or ""."""
        reader = self._readers.get(rid)
        return reader.delivered if reader is not None else ""

    async def next_batch(
        self, reader: Reader, look: Callable[[], Awaitable[Batch]], position: int | None
    ) -> Batch:
        """Looks until there are tokens, an end, or nothing to wait for.

        `position` is what the caller has, None for the server-side cursor. With many waiting calls each
        stream is answered less often with more tokens, but its first token and its end at once.
        """
        loop = asyncio.get_running_loop()
        busy_s = BUSY_FIRST_S
        self._pace.enter(reader.last_call_s, loop.time())
        reader.last_call_s = loop.time()
        while True:
            self.check_open()
            if (pause_s := self._pace.pause_s(reader.last_answer_s, loop.time())) > 0:
                await reader.pause_unless_ending(pause_s)
            changes, reader.seen_endings = reader.changes, reader.endings
            if not reader.is_quiet(reader.cursor if position is None else position):
                batch = await look()
                if batch.outcome == "busy":
                    await reader.pause(min(busy_s, max(batch.wait_ms, 1) / 1000))
                    busy_s = min(2 * busy_s, BUSY_MAX_S)
                    continue
                if batch.outcome != "ok" or batch.status:
                    return batch
                if not batch.is_cut_off:
                    reader.found(changes, batch.end)
                if batch.end > batch.start:
                    reader.last_answer_s = loop.time()
                    return batch
            reader.join()
            await reader.changed_since(changes)

    def check_open(self) -> None:
        """Raises what ended the waiting of calls, if anything did."""
        if self._closing is not None:
            raise self._closing

    def interrupt(self, error: FleetError, *, for_good: bool = False) -> None:
        """Fails every waiting call, and every later one too if `for_good`."""
        if for_good:
            self._closing = error
        for reader in list(self._readers.values()):
            reader.interrupt(error)

    def _drop(self, reader: Reader) -> None:
        if self._readers.get(reader.rid) is reader:
            del self._readers[reader.rid]
        reader.leave()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(LINGER_S)
            limit = asyncio.get_running_loop().time() - LINGER_S
            for reader in list(self._readers.values()):
                if reader.users == 0 and reader.idle_since_s <= limit:
                    self._drop(reader)

    async def close(self) -> None:
        """Forgets every reader."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._sweeper
        for reader in list(self._readers.values()):
            self._drop(reader)
