"""The store as the processes see it; see `node` for the connection to a server.

Callers never hold a connection, so thousands of parked readers cost none. Everything sent here must be
idempotent, because a batch whose reply was lost is sent again after a reconnect.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from redis.asyncio.connection import AbstractConnection, ConnectionPool

from allspark_bus import redis_url
from allspark_bus.errors import Damaged
from allspark_bus.node import CONNECT_TIMEOUT_S, Arg, Command, Node
from allspark_bus.scripts import Script


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
        self._node = Node(self.new_connection, patience_s=patience_s, max_pending=max_pending)
        self._enqueue = self._node.enqueue

    @property
    def is_connected(self) -> bool:
        return self._node.is_connected

    def new_connection(self) -> AbstractConnection:
        """A connection of its own (for subscriptions); the caller connects and closes it."""
        connection: AbstractConnection = self._pool.make_connection()  # type: ignore[no-untyped-call]
        return connection

    async def command(self, *command: Arg) -> Any:
        """Runs one command.

        Raises Damaged for a record of the wrong kind, RedisError for any other error reply, StoreUnavailable
        when Redis is away.
        """
        return await self._enqueue(command)

    async def script(self, script: Script, keys: Sequence[str], args: Sequence[Arg]) -> Any:
        """Runs a server-side script."""
        return await self._enqueue(script.command(keys, args))

    async def batch(self, commands: Sequence[Command]) -> list[Any]:
        """Runs commands that need no order among them in one round trip. Raises the first error."""
        return list(await asyncio.gather(*[self._enqueue(c) for c in commands]))

    async def outcomes(self, commands: Sequence[Command]) -> list[Any]:
        """Like `batch`, but a damaged record spoils no other: its Damaged takes the place of its reply."""
        found = await asyncio.gather(*[self._enqueue(c) for c in commands], return_exceptions=True)
        for outcome in found:
            if isinstance(outcome, BaseException) and not isinstance(outcome, Damaged):
                raise outcome
        return list(found)

    async def in_order(self, *stages: Sequence[Command]) -> list[Any]:
        """Runs each stage after the one before, in one round trip where one server has all keys.

        Returns the replies of all. Raises the first error; later commands may have been run all the same.
        """
        return await self.batch([command for stage in stages for command in stage])

    async def scan(self, pattern: str) -> AsyncIterator[str]:
        """Names of keys; one may come twice."""
        cursor = b"0"
        while True:
            cursor, found = await self._node.enqueue(("SCAN", cursor, "MATCH", pattern, "COUNT", 1000))
            for key in found:
                yield key.decode("utf-8", "replace")
            if cursor == b"0":
                return

    async def ping(self) -> None:
        """Returns if a request could be written now; raises as `command`."""
        await self._enqueue(("PING",))

    async def close(self) -> None:
        """Ends the connection; calls still waiting raise StoreUnavailable."""
        await self._node.close()
