"""Subscriptions that wake every parked reader of a process: one connection to each server that publishes.

A channel has the name of the stream. Waking is a hint to look again, never the data, so a lost
notification (a reconnect) is repaired by waking everybody. What is published is the id of the entry that
was appended, `<tokens>-0` or `<tokens>-1` for the terminal one, or `released`.

A cluster hands messages on to all its nodes, but without any guarantee; so each channel is listened to at the
node that serves the stream and publishes, as with one server. (Sharded channels would spare each other node
about 1 us of CPU for a message, but direct readers could no longer subscribe in the same way everywhere.)
"""

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator, Callable

from allspark_bus import keys
from allspark_bus.node import Node
from allspark_bus.store import Store
from allspark_bus.subscription import Subscription

LINGER_S = 5.0  # a channel stays subscribed this long after its last reader left

#: Called with what was published, or with b"" when a subscription (again) began: anything may have happened.
Listener = Callable[[bytes], None]


class Wakeups:
    """Tells listeners that their request's stream grew or ended."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._listeners: dict[str, set[Listener]] = defaultdict(set)
        self._idle: dict[str, asyncio.TimerHandle] = {}
        self._subscriptions: dict[Node, Subscription] = {}
        self._places: dict[str, Subscription | None] = {}  # of each channel; None: its node is not known yet
        self._leavers: set[asyncio.Task[None]] = set()
        store.on_change(self._follow)

    def join(self, rid: str, listener: Listener) -> None:
        """Calls the listener whenever the stream may have changed, and first when listening began.

        That first call can come before this returns.
        """
        channel = keys.stream(rid)
        if timer := self._idle.pop(channel, None):
            timer.cancel()
        self._listeners[channel].add(listener)
        if channel not in self._places:
            self._place(channel)
        elif (place := self._places[channel]) is not None and channel in place.confirmed:
            listener(b"")

    def leave(self, rid: str, listener: Listener) -> None:
        """Ends what `join` began."""
        channel = keys.stream(rid)
        self._listeners[channel].discard(listener)
        if not self._listeners[channel]:
            loop = asyncio.get_running_loop()
            self._idle[channel] = loop.call_later(LINGER_S, self._drop, channel)

    @contextlib.asynccontextmanager
    async def watch(self, rid: str) -> AsyncIterator[asyncio.Event]:
        """Yields an event that is set whenever the stream may have changed, and first when watching began."""
        event = asyncio.Event()

        def listener(_: bytes) -> None:
            event.set()

        self.join(rid, listener)
        try:
            yield event
        finally:
            self.leave(rid, listener)

    def _drop(self, channel: str) -> None:
        self._idle.pop(channel, None)
        if not self._listeners.get(channel):
            self._listeners.pop(channel, None)
            if (place := self._places.pop(channel, None)) is not None:
                place.drop(channel)

    def _place(self, channel: str) -> None:
        """Listens to a channel where its stream is."""
        node, before = self._store.home(channel), self._places.get(channel)
        if before is not None and before.node is node:
            return
        if before is not None:
            before.drop(channel)
        place = None if node is None else self._subscription(node)
        if place is not None:
            place.add(channel)
        self._places[channel] = place

    def _subscription(self, node: Node) -> Subscription:
        if node not in self._subscriptions:
            self._subscriptions[node] = Subscription(node, self._tell, self._store.suspect)
        return self._subscriptions[node]

    def _follow(self) -> None:
        """Streams have moved to other nodes, or a node is another server now."""
        for channel in list(self._places):
            self._place(channel)
        for node, subscription in list(self._subscriptions.items()):
            if len(subscription):
                subscription.follow()
            else:
                del self._subscriptions[node]
                task = asyncio.get_running_loop().create_task(subscription.close())
                self._leavers.add(task)
                task.add_done_callback(self._leavers.discard)

    def _tell(self, channel: str, published: bytes) -> None:
        for listener in list(self._listeners.get(channel, ())):
            listener(published)

    async def close(self) -> None:
        """Ends the subscription connections."""
        for timer in self._idle.values():
            timer.cancel()
        self._places.clear()
        closing = [subscription.close() for subscription in self._subscriptions.values()]
        await asyncio.gather(*closing, *self._leavers)
