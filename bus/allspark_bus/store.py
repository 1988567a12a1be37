"""One multiplexed Redis connection: concurrent calls of a process share pipelined round trips.

Callers never hold a connection, so thousands of parked readers cost none. Everything sent here must be
idempotent, because a batch whose reply was lost is sent again after a reconnect.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from typing import Any

import hiredis
from redis.asyncio.connection import AbstractConnection, ConnectionPool
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    ConnectionError,
    NoScriptError,
    RedisError,
    TimeoutError,
)

from allspark_bus import redis_url
from allspark_bus.errors import StoreUnavailable
from allspark_bus.scripts import Script

log = logging.getLogger(__name__)

Arg = str | bytes | int | float
Command = tuple[Arg, ...]

MAX_BATCH = 512
CONNECT_TIMEOUT_S = 5.0
REPLY_TIMEOUT_S = 10.0
REPORT_S = 10.0  # a refused login is logged this often
RETRY_FIRST_S, RETRY_MAX_S = 0.02, 1.0
_LOST = (ConnectionError, TimeoutError, BusyLoadingError, OSError)


class Store:
    """A pipelining Redis client.

    `patience_s`: how long a call outlives an unreachable Redis before it raises StoreUnavailable
    (None: for ever). `max_pending`: calls that may wait at once; one more raises StoreUnavailable.
    `url`: see `redis_url`.
    """

    def __init__(self, url: str, *, patience_s: float | None = 10.0, max_pending: int = 100_000) -> None:
        address, login = redis_url.split(url)
        self._pool = ConnectionPool.from_url(
            address, socket_connect_timeout=CONNECT_TIMEOUT_S, socket_timeout=None, protocol=2, **login
        )
        self._patience_s = patience_s
        self._max_pending = max_pending
        self._pending: list[tuple[Command, asyncio.Future[Any], float]] = []
        self._wake = asyncio.Event()
        self._connection: AbstractConnection | None = None
        self._loaded: set[str] = set()
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        self._reported_s = float("-inf")

    @property
    def is_connected(self) -> bool:
        return self._connection is not None

    def new_connection(self) -> AbstractConnection:
        """A connection of its own (for subscriptions); the caller connects and closes it."""
        connection: AbstractConnection = self._pool.make_connection()  # type: ignore[no-untyped-call]
        return connection

    async def command(self, *command: Arg) -> Any:
        """Runs one command. Raises RedisError for an error reply, StoreUnavailable when Redis is away."""
        return await self._enqueue(command)

    async def script(self, script: Script, keys: Sequence[str], args: Sequence[Arg]) -> Any:
        """Runs a server-side script."""
        return await self._enqueue(script.command(keys, args))

    async def batch(self, commands: Sequence[Command]) -> list[Any]:
        """Runs commands in one round trip, in order. Raises the first error."""
        return list(await asyncio.gather(*[self._enqueue(c) for c in commands]))

    def _enqueue(self, command: Command) -> asyncio.Future[Any]:
        if self._closed:
            raise StoreUnavailable("the Redis client of this process is closed")
        if len(self._pending) >= self._max_pending:
            raise StoreUnavailable(f"{self._max_pending} Redis calls are waiting already: Redis is too slow")
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._pending.append((command, future, time.monotonic()))
        self._wake.set()
        return future

    async def _run(self) -> None:
        while not self._closed:
            await self._wake.wait()
            self._wake.clear()
            while self._pending:
                batch, self._pending = self._pending[:MAX_BATCH], self._pending[MAX_BATCH:]
                await self._send_until_answered(batch)

    async def _send_until_answered(self, batch: list[tuple[Command, asyncio.Future[Any], float]]) -> None:
        delay = RETRY_FIRST_S
        while batch:
            try:
                await self._round_trip(batch)
                return
            except _LOST as e:
                self._report_refusal(e)
                await self._disconnect()
                batch = self._give_up_on_old(batch, e)
            except Exception as e:
                await self._disconnect()
                log.exception("unexpected failure of a Redis round trip")
                for _, future, _ in batch:
                    _fail(future, StoreUnavailable(f"Redis round trip failed: {e!r}"))
                return
            await asyncio.sleep(delay)  # back-off between attempts to reconnect
            delay = min(delay * 2, RETRY_MAX_S)

    def _report_refusal(self, error: BaseException) -> None:
        """Told, and tried again: a changed password may be on its way."""
        now_s = time.monotonic()
        if isinstance(error, AuthenticationError) and now_s - self._reported_s >= REPORT_S:
            self._reported_s = now_s
            log.error("Redis refuses the login: %s", error)

    def _give_up_on_old(
        self, batch: list[tuple[Command, asyncio.Future[Any], float]], error: BaseException
    ) -> list[tuple[Command, asyncio.Future[Any], float]]:
        alive = [(c, f, t) for c, f, t in batch if not f.done()]
        if self._patience_s is None:
            return alive
        limit = time.monotonic() - self._patience_s
        for _, future, since in alive:
            if since < limit:
                _fail(
                    future, StoreUnavailable(f"Redis is unreachable ({error}); nothing was lost, try again")
                )
        return [(c, f, t) for c, f, t in alive if t >= limit]

    async def _round_trip(self, batch: list[tuple[Command, asyncio.Future[Any], float]]) -> None:
        connection = await self._connect()
        await self._load_scripts(connection, [c for c, _, _ in batch])
        replies = await _exchange(connection, [c for c, _, _ in batch])
        if missing := [i for i, r in enumerate(replies) if isinstance(r, NoScriptError)]:
            self._loaded.clear()
            retry = [batch[i] for i in missing]
            await self._load_scripts(connection, [c for c, _, _ in retry])
            for i, reply in zip(missing, await _exchange(connection, [c for c, _, _ in retry]), strict=True):
                replies[i] = reply
        if loading := next((r for r in replies if isinstance(r, BusyLoadingError)), None):
            raise loading
        for (_, future, _), reply in zip(batch, replies, strict=True):
            if isinstance(reply, Exception):
                _fail(future, reply)
            elif not future.done():
                future.set_result(reply)

    async def _connect(self) -> AbstractConnection:
        if self._connection is None:
            connection = self.new_connection()
            async with asyncio.timeout(CONNECT_TIMEOUT_S + REPLY_TIMEOUT_S):
                await connection.connect()  # type: ignore[no-untyped-call]
            self._connection = connection
            self._loaded.clear()
        return self._connection

    async def _load_scripts(self, connection: AbstractConnection, commands: Sequence[Command]) -> None:
        wanted = {c[1] for c in commands if c[0] == "EVALSHA"} - self._loaded
        if wanted:
            await _exchange(connection, [("SCRIPT", "LOAD", Script.source(str(sha))) for sha in wanted])
            self._loaded |= {str(sha) for sha in wanted}

    async def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(RedisError, OSError):
                await connection.disconnect(nowait=True)

    async def close(self) -> None:
        """Ends the connection; calls still waiting raise StoreUnavailable."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        for _, future, _ in self._pending:
            _fail(future, StoreUnavailable("the Redis client of this process is closed"))
        await self._disconnect()


def pack(commands: Sequence[Command]) -> bytes:
    """Commands as Redis reads them."""
    # The stub of hiredis takes a tuple of exactly one argument.
    return b"".join([hiredis.pack_command(c) for c in commands])  # type: ignore[arg-type]


async def _exchange(connection: AbstractConnection, commands: Sequence[Command]) -> list[Any]:
    """One round trip. One time-out for all of it: one for each reply costs more than the reply."""
    replies: list[Any] = []
    async with asyncio.timeout(REPLY_TIMEOUT_S):
        await connection.send_packed_command(pack(commands), check_health=False)
        for _ in commands:
            try:
                replies.append(await connection.read_response(disable_decoding=True))
            except (ConnectionError, TimeoutError):
                raise
            except RedisError as e:
                replies.append(e)
    return replies


def _fail(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
