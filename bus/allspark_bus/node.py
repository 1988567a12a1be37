"""One multiplexed connection to one Redis server: concurrent calls of a process share pipelined round trips.

Everything sent here must be idempotent, because a batch whose reply was lost is sent again after a reconnect.
"""

import asyncio
import builtins
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from redis.asyncio.connection import AbstractConnection
from redis.exceptions import (
    AskError,
    AuthenticationError,
    BusyLoadingError,
    ClusterDownError,
    ConnectionError,
    MasterDownError,
    NoScriptError,
    ReadOnlyError,
    RedisError,
    TimeoutError,
    TryAgainError,
)

from allspark_bus import damage, probe
from allspark_bus.connections import CONNECT_TIMEOUT_S, NewConnection
from allspark_bus.errors import StoreUnavailable
from allspark_bus.round_trip import REPLY_TIMEOUT_S, Command, address_of, end, exchange, until_replicated
from allspark_bus.scripts import Script

log = logging.getLogger(__name__)

Call = tuple[Command, asyncio.Future[Any], float]  # the last is when it was made, of the monotonic clock

MAX_BATCH = 512
REPORT_S = 10.0  # a refused login is logged this often
RETRY_FIRST_S, RETRY_MAX_S = 0.02, 1.0
PARKED_MAX_S = 0.25
WATCH_S = 1.0
#: Replicas confirm a write at once when they are asked (WAIT), and once a second otherwise (ROLE).
WAIT_MS, ROLE_PATIENCE_S = 1000, 3.0
#: The server is away, or is not (or no longer) the one to write to: connecting again may find another.
LOST = (ConnectionError, TimeoutError, BusyLoadingError, ReadOnlyError, OSError)
#: Errors that pass by themselves; they concern one call, not the connection.
_PASSING = (TryAgainError, ClusterDownError, MasterDownError)


class Routing(Protocol):
    """What stands above the nodes of a cluster."""

    def route(self, call: Call) -> None:
        """Sends a call to the node that serves its key."""

    def redirect(self, call: Call, error: AskError) -> None:
        """Sends a call on that a node refused because another serves its key (MOVED, ASK)."""

    def suspect(self) -> None:
        """Something is wrong with the map of the cluster."""

    async def settle(self) -> None:
        """Returns after the map was read again, or after a bounded wait."""

    def is_served_by(self, call: Call, node: "Node") -> bool:
        """Whether, as far as the map tells, the node serves the call's key."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What a Store promises to its callers, for each of its nodes.

    `patience_s`: how long a call outlives an unreachable server before it raises StoreUnavailable (None: for
    ever). `max_pending`: calls that may wait at once; one more raises StoreUnavailable. `min_replicas`: an
    answer is given when so many replicas have everything that was written before it.
    """

    patience_s: float | None
    max_pending: int
    min_replicas: int = 0


class Node:
    """A pipelining client of one server, or of the one that is the master.

    `master` tells which one that is, as HOST:PORT: a master that was replaced while it is cut off, or just
    goes on, takes writes that will be thrown away, so it is left as soon as its successor is known.
    `moved` is called when another server than before was connected to.
    """

    def __init__(
        self,
        new_connection: NewConnection,
        terms: Terms,
        *,
        routing: Routing | None = None,
        master: Callable[[], Awaitable[str]] | None = None,
        moved: Callable[[], None] = lambda: None,
    ) -> None:
        self.new_connection = new_connection
        self._terms = terms
        self._routing = routing
        self._master = master
        self._moved = moved
        self._pending: list[Call] = []
        self._sent: list[Call] = []
        self._parked: list[Call] = []
        self._room = terms.max_pending  # less what is parked
        self._timer: asyncio.TimerHandle | None = None
        self._expiry: asyncio.TimerHandle | None = None
        self._problem: BaseException | None = None  # why calls wait
        self._wake = asyncio.Event()
        self._connection: AbstractConnection | None = None
        self._is_doubted = False  # another server may be the master by now
        self._loaded: set[str] = set()
        self._task: asyncio.Task[None] | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._closed = False
        self._reported_s = float("-inf")
        self._heard_s = float("-inf")  # when the last answers came
        self.address: str | None = None  # of the server that was connected to last

    @property
    def is_connected(self) -> bool:
        return self._connection is not None

    def enqueue(self, command: Command) -> asyncio.Future[Any]:
        """The reply to come. Raises StoreUnavailable if this is closed or too many calls wait."""
        if self._closed:
            raise StoreUnavailable("the Redis client of this process is closed")
        if len(self._pending) >= self._room:
            raise StoreUnavailable(f"{self._terms.max_pending} Redis calls wait already: Redis is too slow")
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._pending.append((command, future, time.monotonic()))
        self._wake.set()
        if self._expiry is None and self._terms.patience_s is not None:
            self._expire_in(self._terms.patience_s)
        return future

    def _expire_in(self, seconds: float) -> None:
        self._expiry = asyncio.get_running_loop().call_later(seconds, self._expire)

    def _expire(self) -> None:
        """Ends calls that have waited too long, though a server that is slow may still be at work on them."""
        self._expiry = None
        error = self._problem or TimeoutError("no answer")
        waiting = [c for c in (*self._sent, *self._pending, *self._parked) if not c[1].done()]
        waiting = [c for c in waiting if not self._gave_up(c, error)]
        self._pending = [c for c in self._pending if not c[1].done()]
        if waiting and self._terms.patience_s is not None:
            oldest_s = min(c[2] for c in waiting)
            self._expire_in(max(RETRY_FIRST_S, oldest_s + self._terms.patience_s - time.monotonic()))

    def silent_s(self) -> float:
        """Seconds for which the server has owed an answer without giving any; 0 when nothing is asked."""
        asked = [calls[0][2] for calls in (self._sent, self._pending, self._parked) if calls]
        return time.monotonic() - max(min(asked), self._heard_s) if asked else 0.0

    def put(self, *calls: Call) -> None:
        """Takes calls that were admitted before; they follow each other on the connection."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())
        self._pending += calls
        self._wake.set()

    async def _run(self) -> None:
        if self._master is not None:
            self._watcher = asyncio.create_task(self._watch(self._master))
        while not self._closed:
            await self._wake.wait()
            self._wake.clear()
            while self._pending:
                self._sent, self._pending = self._pending[:MAX_BATCH], self._pending[MAX_BATCH:]
                await self._send_until_answered()

    async def _send_until_answered(self) -> None:
        delay, doubt_s = RETRY_FIRST_S, probe.FIRST_S
        while self._sent:
            try:
                async with asyncio.timeout(None) as limit:
                    with probe.Probe(self.new_connection, limit, doubt_s):
                        await self._round_trip(self._sent)
                self._sent = []
                self._heard_s = time.monotonic()
                if not self._parked:
                    self._problem = None
                return
            except LOST as e:
                self._problem = e
                if isinstance(e, builtins.TimeoutError):
                    doubt_s *= 2
                self._report_refusal(e)
                await self._disconnect()
                self._give_up_on_old(e)
                await self._hand_over()
            except Exception as e:
                await self._disconnect()
                log.exception("unexpected failure of a Redis round trip")
                for call in self._sent:
                    fail(call, StoreUnavailable(f"Redis round trip failed: {e!r}"))
                self._sent = []
                return
            await asyncio.sleep(delay)  # back-off between attempts to reconnect
            delay = min(delay * 2, RETRY_MAX_S)

    def _report_refusal(self, error: BaseException) -> None:
        """Told, and tried again: a changed password may be on its way."""
        now_s = time.monotonic()
        if isinstance(error, AuthenticationError) and now_s - self._reported_s >= REPORT_S:
            self._reported_s = now_s
            log.error("Redis refuses the login: %s", error)

    def _give_up_on_old(self, error: BaseException) -> None:
        self._sent = [call for call in self._sent if not call[1].done() and not self._gave_up(call, error)]

    def _gave_up(self, call: Call, error: BaseException) -> bool:
        patience_s = self._terms.patience_s
        if patience_s is None or time.monotonic() - call[2] <= patience_s:
            return False
        fail(call, StoreUnavailable(f"Redis is unreachable ({error}); nothing was lost, try again"))
        return True

    async def _hand_over(self) -> None:
        """Gives calls to the nodes that serve them by now."""
        if self._routing is None:
            return
        await self._routing.settle()
        waiting, self._sent, self._pending = [*self._sent, *self._pending], [], []
        for call in waiting:
            if self._routing.is_served_by(call, self):
                self._pending.append(call)
            else:
                self._routing.route(call)
        self._sent, self._pending = self._pending[:MAX_BATCH], self._pending[MAX_BATCH:]

    async def _round_trip(self, batch: list[Call]) -> None:
        connection = await self._connect()
        await self._load_scripts(connection, [c for c, _, _ in batch])
        replies = await self._replicated(connection, [c for c, _, _ in batch])
        if missing := [i for i, r in enumerate(replies) if isinstance(r, NoScriptError)]:
            self._loaded.clear()
            retry = [batch[i] for i in missing]
            await self._load_scripts(connection, [c for c, _, _ in retry])
            again = await self._replicated(connection, [c for c, _, _ in retry])
            for i, reply in zip(missing, again, strict=True):
                replies[i] = reply
        if elsewhere := next((r for r in replies if isinstance(r, BusyLoadingError | ReadOnlyError)), None):
            raise elsewhere
        for call, reply in zip(batch, replies, strict=True):
            if isinstance(reply, Exception):
                self._refused(call, reply)
            elif not call[1].done():
                call[1].set_result(reply)

    async def _replicated(self, connection: AbstractConnection, commands: Sequence[Command]) -> list[Any]:
        """One round trip, which ends when enough replicas have what was written."""
        wanted = self._terms.min_replicas
        if not wanted:
            return await exchange(connection, commands)
        *replies, confirmed = await exchange(connection, [*commands, ("WAIT", wanted, WAIT_MS)])
        if not isinstance(confirmed, int) or confirmed < wanted:
            raise ConnectionError(f"{wanted} replica(s) must have a write, but: {confirmed}")
        return replies

    def _refused(self, call: Call, error: Exception) -> None:
        if self._routing is not None and isinstance(error, AskError):  # MovedError is one
            self._routing.redirect(call, error)
        elif isinstance(error, _PASSING):
            self.park(call, error)
        elif str(error).startswith("NOREPLICAS "):  # cut off, perhaps, while its successor has them
            self._is_doubted = self._master is not None
            self.park(call, error)
        else:
            fail(call, damage.of_reply(error) or error)

    def park(self, call: Call, error: Exception) -> None:
        """Sends a call again a little later."""
        if call[1].done() or self._gave_up(call, error):
            return
        self._parked.append(call)
        self._room -= 1
        self._problem = error
        if self._routing is not None:
            self._routing.suspect()
        if self._timer is None:
            age_s = time.monotonic() - call[2]
            delay_s = min(max(age_s, RETRY_FIRST_S), PARKED_MAX_S)  # doubles with every attempt
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._unpark)

    def _unpark(self) -> None:
        self._timer = None
        calls, self._parked = self._parked, []
        self._room = self._terms.max_pending
        for call in calls:
            (self._routing.route if self._routing is not None else self.put)(call)

    async def _watch(self, master: Callable[[], Awaitable[str]]) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            with contextlib.suppress(RedisError, OSError, StoreUnavailable):
                if self._connection is not None and await master() != self.address:
                    self._is_doubted = True
                    await self.enqueue(
                        ("PING",)
                    )  # connects to the other one, even if nothing else is to be sent

    async def _connect(self) -> AbstractConnection:
        if self._is_doubted:
            await self._disconnect()
        if self._connection is None:
            connection = self.new_connection()
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT_S + REPLY_TIMEOUT_S):
                    await connection.connect()  # type: ignore[no-untyped-call]
                    if self._master is not None or self._terms.min_replicas:
                        await self._check_role(connection)
            except BaseException:
                await end(connection)
                raise
            self._connection, self._is_doubted = connection, False
            self._loaded.clear()
            self._note(address_of(connection))
        return self._connection

    async def _check_role(self, connection: AbstractConnection) -> None:
        """Raises ConnectionError unless it leads to a master whose replicas have all that is in it.

        The latter because WAIT looks at the writes of its own connection only: those of the one before, sent
        again, may change nothing and would be acknowledged though no replica has them.
        """

        async def ask() -> Any:
            [reply] = await exchange(connection, [("ROLE",)])
            return reply

        await until_replicated(ask, self._terms.min_replicas, ROLE_PATIENCE_S)

    async def replicated(self) -> None:
        """Returns when enough replicas have all that is in the server now, whoever wrote it."""
        if self._terms.min_replicas:
            patience_s = self._terms.patience_s or ROLE_PATIENCE_S

            async def ask() -> Any:
                return await self.enqueue(("ROLE",))

            try:
                await until_replicated(ask, self._terms.min_replicas, patience_s)
            except ConnectionError as e:
                raise StoreUnavailable(f"{e}; nothing was lost, try again") from e

    def _note(self, address: str) -> None:
        before, self.address = self.address, address
        if before not in (None, address):
            log.warning("the store is at %s now, and was at %s", address, before)
            self._moved()

    async def _load_scripts(self, connection: AbstractConnection, commands: Sequence[Command]) -> None:
        wanted = {c[1] for c in commands if c[0] == "EVALSHA"} - self._loaded
        if wanted:
            await exchange(connection, [("SCRIPT", "LOAD", Script.source(str(sha))) for sha in wanted])
            self._loaded |= {str(sha) for sha in wanted}

    async def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await end(connection)

    async def leave(self) -> list[Call]:
        """Ends the connection; returns the calls that nobody answered."""
        self._closed = True
        for timer in (self._timer, self._expiry):
            if timer is not None:
                timer.cancel()
        for task in (self._watcher, self._task):
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        calls = [*self._sent, *self._pending, *self._parked]
        self._sent, self._pending, self._parked = [], [], []
        await self._disconnect()
        return calls

    async def close(self) -> None:
        """Ends the connection; calls still waiting raise StoreUnavailable."""
        for call in await self.leave():
            fail(call, StoreUnavailable("the Redis client of this process is closed"))


def fail(call: Call, error: BaseException) -> None:
    """Ends a call that nobody gave up on yet."""
    if not call[1].done():
        call[1].set_exception(error)
