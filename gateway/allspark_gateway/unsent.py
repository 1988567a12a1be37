"""Bytes of answers that their clients have not taken yet: a gateway reads no more of them than it can hold.

gRPC has an answer until the client's flow control lets it go, and a client may ask for thousands of answers
and take none. So while more than a bound is unsent, a connection gets a further answer only when its earlier
ones are gone: one that reads goes on, a little slower, and one that does not waits for itself. How large an
answer is shows when it was read; therefore few reads of one request go on at once.
"""

import asyncio
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

T = TypeVar("T")
Waiters = dict[str, "deque[asyncio.Future[None]]"]

MAX_UNSENT_BYTES = 256 << 20
READS_AT_ONCE = 4  # of one request
NEXT_S = 0.005


class NoRoom(Exception):
    """Others were faster: wait for room again, holding nothing."""


class Unsent:
    """`num_bytes` of answers are on their way; `bound` as above."""

    def __init__(self, bound: int = MAX_UNSENT_BYTES) -> None:
        self.num_bytes = 0
        self._bound = bound
        self._of: defaultdict[str, int] = defaultdict(int)  # bytes by connection, where there are some
        self._waiting: Waiters = {}  # by connection
        self._reading: dict[str, int] = {}  # looks in progress, by request
        self._queued: Waiters = {}  # for them

    async def look(self, peer: str, rid: str, look: Callable[[], Awaitable[T]]) -> T:
        """Looks at a request for an answer to `peer`; raises NoRoom if it may not have one now."""
        while self._reading.get(rid, 0) >= READS_AT_ONCE:
            await self._wait(self._queued, rid, self._next_read)
        if not self._has_room(peer):
            self._next_read(rid)
            raise NoRoom
        self._reading[rid] = self._reading.get(rid, 0) + 1
        try:
            return await look()
        finally:
            self._reading[rid] -= 1
            if not self._reading[rid]:
                del self._reading[rid]
            if self._queued or self._waiting:
                # Once the answer counts, if there is one: then there is room for the next, or not.
                asyncio.get_running_loop().call_soon(self._looked, peer, rid)

    def _looked(self, peer: str, rid: str) -> None:
        self._next_read(rid)
        self._wake(peer)

    def _next_read(self, rid: str) -> None:
        _release_one(self._queued, rid)

    def count(self, peer: str, num_bytes: int) -> Callable[[], None]:
        """An answer of that size is on its way to `peer`; what is returned must be called when it is not."""
        num_bytes = max(1, num_bytes)
        self.num_bytes += num_bytes
        self._of[peer] += num_bytes
        return partial(self._gone, peer, num_bytes)

    def _gone(self, peer: str, num_bytes: int) -> None:
        self.num_bytes -= num_bytes
        self._of[peer] -= num_bytes
        if not self._of[peer]:
            del self._of[peer]
        for waiting in list(self._waiting) if self.num_bytes < self._bound else [peer]:
            self._wake(waiting)

    def _has_room(self, peer: str) -> bool:
        return self.num_bytes < self._bound or peer not in self._of

    async def room(self, peer: str) -> None:
        """Waits until `peer` may have a further answer."""
        if not self._has_room(peer):
            await self._wait(self._waiting, peer, self._wake)
            # What it looks at may have nothing for it: the next one does not wait for an answer to go out.
            asyncio.get_running_loop().call_later(NEXT_S, self._wake, peer)

    def _wake(self, peer: str) -> None:
        """Lets the next one of a connection look; it wakes the one after it."""
        if self._has_room(peer):
            _release_one(self._waiting, peer)

    async def _wait(self, waiters: Waiters, key: str, pass_on: Callable[[str], None]) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiters.setdefault(key, deque()).append(future)
        try:
            await future
        except asyncio.CancelledError:
            if not future.cancelled():
                pass_on(key)  # it was this one's turn
            elif future in (waiting := waiters.get(key, deque())):
                waiting.remove(future)
                if not waiting:
                    del waiters[key]
            raise


def _release_one(waiters: Waiters, key: str) -> None:
    waiting = waiters.get(key, deque())
    while waiting:
        future = waiting.popleft()
        if not waiting:
            del waiters[key]
        if not future.done():  # else its call was cancelled in this very moment
            future.set_result(None)
            return
