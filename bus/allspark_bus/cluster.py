"""Redis Cluster: which node serves a key, and what to do when the map changes.

Each node has one multiplexed connection (`node`). The map (CLUSTER SLOTS) is read at the beginning, and again
when a node redirects (MOVED), is lost or says that the cluster is down.
See https://valkey.io/topics/cluster-spec for redirections.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot
from redis.exceptions import AskError, ConnectionError, MovedError, RedisError

from allspark_bus import connections
from allspark_bus.errors import StoreUnavailable
from allspark_bus.node import (
    LOST,
    RETRY_FIRST_S,
    RETRY_MAX_S,
    Call,
    Node,
    Terms,
    fail,
)
from allspark_bus.redis_url import Address, Target
from allspark_bus.round_trip import Command, end, exchange

log = logging.getLogger(__name__)

NUM_SLOTS = REDIS_CLUSTER_HASH_SLOTS
REFRESH_S = 0.05  # the map is not read more often
SETTLE_S = 2.0
#: Nodes that disagree send a call in circles; after this long it is not sent on at once any more.
CIRCLING_S = 0.2
UNKNOWN_HOSTS = (None, b"", "", b"?", "?")

#: Commands that are sent to a certain node, whatever it serves.
OF_A_NODE = frozenset({"ASKING", "PING", "ROLE", "SCAN"})

#: (first slot, last slot, address of the master)
Range = tuple[int, int, Address]


class Cluster:
    """Routes calls to the masters. `changed` is called when slots have another master than before."""

    def __init__(self, target: Target, terms: Terms, changed: Callable[[], None]) -> None:
        self._target = target
        self._terms = terms
        self._changed = changed
        self._slots: list[Node | None] = [None] * NUM_SLOTS
        self._nodes: dict[Address, Node] = {}
        self._known: list[Address] = list(target.addresses)  # whom to ask for the map
        self._turn = 0
        self._homeless: list[Call] = []  # no node is known for their slot
        self._reader: asyncio.Task[None] | None = None
        self._read_s = float("-inf")
        self._leavers: set[asyncio.Task[None]] = set()
        self._closed = False

    # ---- what a store needs -----------------------------------------------------------------------

    def enqueue(self, command: Command) -> asyncio.Future[Any]:
        """The reply to come. Raises StoreUnavailable if this is closed or too many calls wait."""
        node = self._slots[slot_of(command)]
        if node is not None:
            return node.enqueue(command)
        if self._closed:
            raise StoreUnavailable("the Redis client of this process is closed")
        if len(self._homeless) >= self._terms.max_pending:
            raise StoreUnavailable(f"{self._terms.max_pending} Redis calls wait for a map of the cluster")
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.route((command, future, time.monotonic()))
        return future

    def home(self, key: str) -> Node | None:
        """The node that serves a key, if it is known by now."""
        node = self._slots[key_slot(key.encode())]
        if node is None:
            self.suspect()
        return node

    async def masters(self) -> list[Node]:
        """Every master; waits until they are known. Raises StoreUnavailable."""
        limit_s = time.monotonic() + (self._terms.patience_s or SETTLE_S)
        while None in self._slots:
            if (left_s := limit_s - time.monotonic()) <= 0:
                raise StoreUnavailable("the Redis Cluster has slots that no node serves; try again")
            await self.settle(left_s)
        return list({id(node): node for node in self._slots if node is not None}.values())

    @property
    def is_connected(self) -> bool:
        """Whether every known master is."""
        nodes = set(self._slots)
        return None not in nodes and all(node is not None and node.is_connected for node in nodes)

    def silent_s(self) -> float:
        """The longest that any node, or the map, has owed an answer."""
        map_s = time.monotonic() - self._homeless[0][2] if self._homeless else 0.0
        return max([map_s, *(node.silent_s() for node in self._nodes.values())])

    async def close(self) -> None:
        """Ends all connections; calls still waiting raise StoreUnavailable."""
        self._closed = True
        tasks = [*self._leavers, *([self._reader] if self._reader else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for call in self._homeless:
            fail(call, StoreUnavailable("the Redis client of this process is closed"))
        await asyncio.gather(*[node.close() for node in self._nodes.values()])

    # ---- what its nodes need ----------------------------------------------------------------------

    def route(self, call: Call) -> None:
        """Sends a call to the node that serves its key."""
        if call[0][0] in OF_A_NODE:
            fail(call, StoreUnavailable("a node left the Redis Cluster; try again"))
            return
        node = self._slots[slot_of(call[0])]
        if self._closed:
            fail(call, StoreUnavailable("the Redis client of this process is closed"))
        elif node is not None:
            node.put(call)
        else:
            self._homeless.append(call)
            self.suspect()

    def redirect(self, call: Call, error: AskError) -> None:
        """Follows MOVED and ASK."""
        if call[1].done():
            return
        source = self._slots[slot_of(call[0])]
        if source is not None and (not error.host or time.monotonic() - call[2] > CIRCLING_S):
            source.park(call, error)
        elif not error.host:
            self.route(call)
        elif isinstance(error, MovedError):
            self._slots[error.slot_id] = node = self._node((error.host, error.port))
            node.put(call)
            self.suspect()
        else:
            asking: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            asking.add_done_callback(lambda f: f.cancelled() or f.exception())
            self._node((error.host, error.port)).put((("ASKING",), asking, call[2]), call)

    def is_served_by(self, call: Call, node: Node) -> bool:
        """Whether, as far as the map tells, the node serves the call's key."""
        if call[0][0] in OF_A_NODE:
            return call[0][0] != "ASKING" and node in self._nodes.values()
        return self._slots[slot_of(call[0])] is node

    def suspect(self) -> None:
        """Reads the map again soon."""
        if not self._closed and (self._reader is None or self._reader.done()):
            self._reader = asyncio.get_running_loop().create_task(self._read())

    async def settle(self, limit_s: float = SETTLE_S) -> None:
        """Returns after the map was read again, or after a bounded wait."""
        self.suspect()
        if self._reader is not None:
            await asyncio.wait([self._reader], timeout=limit_s)

    # ---- the map ----------------------------------------------------------------------------------

    async def _read(self) -> None:
        """Until a node has answered, and every call has a node."""
        delay = RETRY_FIRST_S
        await asyncio.sleep(self._read_s + REFRESH_S - time.monotonic())
        while True:
            error: Exception = ConnectionError("slots of the cluster are served by no node")
            try:
                self._adopt(await self._ask())
            except (*LOST, RedisError) as e:
                error = e
            self._read_s = time.monotonic()
            self._route_homeless(error)
            if not self._homeless and not self._is_unknown:
                return
            await asyncio.sleep(delay)  # back-off between attempts
            delay = min(delay * 2, RETRY_MAX_S)

    @property
    def _is_unknown(self) -> bool:
        return not any(self._slots)

    async def _ask(self) -> list[Range]:
        """Asks one node after the other, beginning with another one each time: some may be cut off."""
        error: BaseException = ConnectionError("no node of the cluster is known")
        self._turn += 1
        start = self._turn % len(self._known)
        for address in self._known[start:] + self._known[:start]:
            connection = connections.to(self._target, address, timeout_s=connections.ASK_TIMEOUT_S)()
            try:
                async with asyncio.timeout(2 * connections.ASK_TIMEOUT_S):
                    await connection.connect()  # type: ignore[no-untyped-call]
                    [reply] = await exchange(connection, [("CLUSTER", "SLOTS")])
                if isinstance(reply, Exception):
                    raise reply
                if reply:
                    self._known = [*dict.fromkeys([*_addresses(reply, address), *self._target.addresses])]
                    return list(_ranges(reply, address))
                error = ConnectionError("a node of the cluster knows no other")
            except (*LOST, RedisError) as e:
                error = e
            finally:
                await end(connection)
        raise error

    def _adopt(self, ranges: Sequence[Range]) -> None:
        slots: list[Node | None] = [None] * NUM_SLOTS
        for first, last, address in ranges:
            slots[first : last + 1] = [self._node(address)] * (last + 1 - first)
        before, self._slots = self._slots, slots
        serving = set(slots)
        for address, node in list(self._nodes.items()):
            if node not in serving:
                del self._nodes[address]
                self._retire(node)
        if before != slots:
            log.info("the cluster has %d masters", len(serving - {None}))
            self._changed()

    def _node(self, address: Address) -> Node:
        if address not in self._nodes:
            new_connection = connections.to(self._target, address)
            self._nodes[address] = Node(new_connection, self._terms, routing=self)
        return self._nodes[address]

    def _retire(self, node: Node) -> None:
        task = asyncio.get_running_loop().create_task(self._leave(node))
        self._leavers.add(task)
        task.add_done_callback(self._leavers.discard)

    async def _leave(self, node: Node) -> None:
        for call in await node.leave():
            self.route(call)

    def _route_homeless(self, error: Exception) -> None:
        waiting, self._homeless = self._homeless, []
        limit_s = time.monotonic() - (self._terms.patience_s or float("inf"))
        for call in waiting:
            node = self._slots[slot_of(call[0])]
            if node is not None:
                node.put(call)
            elif call[2] < limit_s:
                fail(call, StoreUnavailable(f"Redis is unreachable ({error}); nothing was lost, try again"))
            elif not call[1].done():
                self._homeless.append(call)


def slot_of(command: Command) -> int:
    """The slot of a command's first key; ours have keys of one slot only. Raises ValueError: it has none."""
    try:
        key = command[3 if command[0] == "EVALSHA" else 1]
    except IndexError:
        raise ValueError(f"{command[0]!r} has no key, so no node of a cluster is meant") from None
    return key_slot(key if isinstance(key, bytes) else str(key).encode())


def _ranges(reply: Sequence[Any], asked: Address) -> Iterator[Range]:
    """The answer of CLUSTER SLOTS: first, last, [host, port, ...] of the master, of its replicas."""
    for first, last, master, *_ in reply:
        yield first, last, _address(master, asked)


def _addresses(reply: Sequence[Any], asked: Address) -> Iterator[Address]:
    for _, _, *nodes in reply:
        for node in nodes:
            yield _address(node, asked)


def _address(node: Sequence[Any], asked: Address) -> Address:
    """A node that does not know its host is where it was asked."""
    host = asked[0] if node[0] in UNKNOWN_HOSTS else node[0].decode()
    return host, int(node[1])
