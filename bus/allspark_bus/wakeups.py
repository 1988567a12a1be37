"""One subscription connection that wakes every parked reader of a process.

A channel has the name of the stream. Waking is a hint to look again, never the data, so a lost
notification (a reconnect) is repaired by waking everybody. What is published is the id of the entry that
was appended, `<tokens>-0` or `<tokens>-1` for the terminal one, or `released`.
"""

import asyncio
import builtins
import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable

from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ConnectionError, RedisError

from allspark_bus import keys
from allspark_bus.node import RETRY_FIRST_S, RETRY_MAX_S, pack
from allspark_bus.store import Store

log = logging.getLogger(__name__)

LINGER_S = 5.0  # a channel stays subscribed this long after its last reader left
PING_S = 5.0  # a silent connection is probed this often and given up after three times as long
CONNECT_TIMEOUT_S = 10.0

#: Called with what was published, or with b"" when a subscription (again) began: anything may have happened.
Listener = Callable[[bytes], None]


class Wakeups:
    """Tells listeners that their request's stream grew or ended."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._listeners: dict[str, set[Listener]] = defaultdict(set)
        self._idle: dict[str, asyncio.TimerHandle] = {}
        self._confirmed: set[str] = set()
        self._outbox: asyncio.Queue[tuple[str, ...]] = asyncio.Queue()
        self._heard_s = 0.0
        self._task: asyncio.Task[None] | None = None
        self._connected = False

    def join(self, rid: str, listener: Listener) -> None:
        """Calls the listener whenever the stream may have changed, and first when listening began.

        That first call can come before this returns.
        """
        channel = keys.stream(rid)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())
        if timer := self._idle.pop(channel, None):
            timer.cancel()
        if not self._listeners[channel] and channel not in self._confirmed:
            self._outbox.put_nowait(("SUBSCRIBE", channel))
        self._listeners[channel].add(listener)
        if channel in self._confirmed:
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
            self._confirmed.discard(channel)
            self._outbox.put_nowait(("UNSUBSCRIBE", channel))

    async def _run(self) -> None:
        delay = RETRY_FIRST_S
        while True:
            connection = self._store.new_connection()
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    await connection.connect()  # type: ignore[no-untyped-call]
                delay = RETRY_FIRST_S
                await self._serve(connection)
            except (RedisError, OSError) as e:
                log.warning("subscription connection lost (%s); reconnecting", e)
            finally:
                self._confirmed.clear()
                with contextlib.suppress(RedisError, OSError):
                    await connection.disconnect(nowait=True)
            await asyncio.sleep(delay)  # back-off between attempts to reconnect
            delay = min(delay * 2, RETRY_MAX_S)

    async def _serve(self, connection: AbstractConnection) -> None:
        while not self._outbox.empty():
            self._outbox.get_nowait()
        for channel in list(self._listeners):
            self._outbox.put_nowait(("SUBSCRIBE", channel))
        duties = [asyncio.create_task(self._send(connection)), asyncio.create_task(self._receive(connection))]
        try:
            done, _ = await asyncio.wait(duties, return_when=asyncio.FIRST_COMPLETED)
            done.pop().result()
        finally:
            for duty in duties:
                duty.cancel()
            await asyncio.gather(*duties, return_exceptions=True)

    async def _send(self, connection: AbstractConnection) -> None:
        self._heard_s = time.monotonic()
        commands: list[tuple[str, ...]]
        while True:
            try:
                commands = [await asyncio.wait_for(self._outbox.get(), PING_S)]
            except builtins.TimeoutError:
                commands = [("PING",)]
            # Watched here and not by a time-out of each read, which would cost more than the message.
            if time.monotonic() - self._heard_s > 3 * PING_S:
                raise ConnectionError(f"no answer to PING within {3 * PING_S:g} s")
            while not self._outbox.empty():
                commands.append(self._outbox.get_nowait())
            await connection.send_packed_command(pack(commands), check_health=False)

    async def _receive(self, connection: AbstractConnection) -> None:
        while True:
            message = await connection.read_response(disable_decoding=True)
            self._heard_s = time.monotonic()
            if not isinstance(message, list):
                continue  # PONG; while nothing is subscribed it is a plain string, not a message
            kind, channel = message[0], message[1].decode()
            if kind == b"message":
                self._tell(channel, message[2])
            elif kind == b"subscribe" and channel in self._listeners:
                self._confirmed.add(channel)
                self._tell(channel, b"")

    def _tell(self, channel: str, published: bytes) -> None:
        for listener in list(self._listeners.get(channel, ())):
            listener(published)

    async def close(self) -> None:
        """Ends the subscription connection."""
        for timer in self._idle.values():
            timer.cancel()
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
