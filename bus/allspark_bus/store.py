"""The store as the processes see it: one server, the master of some Sentinels, or a cluster.

Callers never hold a connection, so thousands of parked readers cost none. Everything sent here must be
idempotent, because a batch whose reply was lost is sent again after a reconnect.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from allspark_bus import keys, redis_url
from allspark_bus.cluster import Cluster
from allspark_bus.connections import MasterOf, single
from allspark_bus.errors import Damaged
from allspark_bus.node import Node, Terms
from allspark_bus.round_trip import Arg, Command
from allspark_bus.scripts import Script


class Store:
    """A pipelining Redis client.

    `patience_s`: how long a call outlives an unreachable Redis before it raises StoreUnavailable
    (None: for ever). `max_pending`: calls that may wait at once (for each node of a cluster); one more raises
    StoreUnavailable. `url`: see `redis_url`.
    """

    def __init__(self, url: str, *, patience_s: float | None = 10.0, max_pending: int = 100_000) -> None:
        target = redis_url.parse(url)
        terms = Terms(patience_s, max_pending, target.min_replicas)
        self._listeners: list[Callable[[], None]] = []
        self._cluster: Cluster | None = None
        self._sentinels: MasterOf | None = None
        self._node: Node | None = None
        if target.kind == redis_url.CLUSTER:
            self._cluster = Cluster(target, terms, self._changed)
            self._enqueue = self._cluster.enqueue
            return
        if target.kind == redis_url.SENTINEL:
            self._sentinels = MasterOf(target)
        connect = self._sentinels.new_connection if self._sentinels else single(target)
        master = self._sentinels.address if self._sentinels else None
        self._node = Node(connect, terms, master=master, moved=self._changed)
        self._enqueue = self._node.enqueue

    @property
    def is_connected(self) -> bool:
        reached = self._node or self._cluster
        return reached is not None and reached.is_connected

    def home(self, key: str) -> Node | None:
        """The node that serves a key (and a channel of that name); None while that is not known yet."""
        return self._cluster.home(key) if self._cluster is not None else self._node

    def on_change(self, listener: Callable[[], None]) -> None:
        """Calls the listener when keys may have another home, or a node is another server, than before."""
        self._listeners.append(listener)

    def suspect(self) -> None:
        """A connection was lost that the nodes know nothing of: the map of a cluster may have changed."""
        if self._cluster is not None:
            self._cluster.suspect()

    def _changed(self) -> None:
        for listener in self._listeners:
            listener()

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

    async def outcomes(
        self, commands: Sequence[Command], kept: tuple[type[Exception], ...] = (Damaged,)
    ) -> list[Any]:
        """Like `batch`, but a damaged record spoils no other: its Damaged takes the place of its reply.

        `kept`: which errors do so.
        """
        found = await asyncio.gather(*[self._enqueue(c) for c in commands], return_exceptions=True)
        for outcome in found:
            if isinstance(outcome, BaseException) and not isinstance(outcome, kept):
                raise outcome
        return list(found)

    async def in_order(self, *stages: Sequence[Command], kept: tuple[type[Exception], ...] = ()) -> list[Any]:
        """Runs each stage after the one before, in one round trip where one server has all keys.

        Returns the replies of all, `kept` errors among them. Raises the first other error; later commands may
        have been run all the same.
        """
        if self._cluster is None:
            return await self.outcomes([command for stage in stages for command in stage], kept)
        replies: list[Any] = []
        for stage in stages:
            replies += await self.outcomes(stage, kept)
        return replies

    async def replicated(self, key: str) -> None:
        """Returns when the replicas that must have a write have what is under the key, whoever wrote it."""
        if (node := self.home(key)) is not None:
            await node.replicated()

    async def scan(self, pattern: str) -> AsyncIterator[str]:
        """Names of keys; one may come twice."""
        for node in await self._masters():
            cursor = b"0"
            while True:
                cursor, found = await node.enqueue(("SCAN", cursor, "MATCH", pattern, "COUNT", 1000))
                for key in found:
                    yield key.decode("utf-8", "replace")
                if cursor == b"0":
                    break

    async def ping(self) -> None:
        """Returns if every master answers and a cluster serves all keys; raises as `command`."""
        await asyncio.gather(*[node.enqueue(("PING",)) for node in await self._masters()])
        if self._cluster is not None:
            await self._enqueue(("EXISTS", keys.MODELS))  # CLUSTERDOWN is told for keys alone

    def silent_s(self) -> float:
        """Seconds for which a server has owed an answer without giving any; 0 while all is well."""
        reached = self._node or self._cluster
        return reached.silent_s() if reached is not None else 0.0

    async def _masters(self) -> list[Node]:
        if self._cluster is not None:
            return await self._cluster.masters()
        return [self._node] if self._node is not None else []

    async def close(self) -> None:
        """Ends the connections; calls still waiting raise StoreUnavailable."""
        for part in (self._node, self._cluster, self._sentinels):
            if part is not None:
                await part.close()
