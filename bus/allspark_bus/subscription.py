"""One subscription connection to one server; after a reconnect it subscribes to everything again."""

import asyncio
import builtins
import contextlib
import logging
import time
from collections.abc import Callable

from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ConnectionError, RedisError

from allspark_bus.node import RETRY_FIRST_S, RETRY_MAX_S, Node
from allspark_bus.round_trip import address_of, end, send

log = logging.getLogger(__name__)

PING_S, SILENCE_S = 1.0, 4.0  # a silent connection is probed so often, and given up after so long
CONNECT_TIMEOUT_S = 5.0


class Subscription:
    """`tell(channel, published)` is called for what was published, and with b"" when a subscription (again)
    began: anything may have happened before. `lost` is called when the connection is.
    """

    def __init__(self, node: Node, tell: Callable[[str, bytes], None], lost: Callable[[], None]) -> None:
        self.node = node
        self.confirmed: set[str] = set()
        self._tell = tell
        self._lost = lost
        self._wanted: set[str] = set()
        self._outbox: asyncio.Queue[tuple[str, ...]] = asyncio.Queue()
        self._serving: AbstractConnection | None = None
        self._heard_s = 0.0
        self._address: str | None = None
        self._task = asyncio.get_running_loop().create_task(self._run())

    def __len__(self) -> int:
        """Channels."""
        return len(self._wanted)

    def add(self, channel: str) -> None:
        """Begins to listen."""
        self._wanted.add(channel)
        self._put("SUBSCRIBE", channel)

    def drop(self, channel: str) -> None:
        """Ends what `add` began."""
        self._wanted.discard(channel)
        self.confirmed.discard(channel)
        self._put("UNSUBSCRIBE", channel)

    def _put(self, *command: str) -> None:
        """Without a connection nothing is kept: a new one subscribes to all that is wanted then."""
        if self._serving is not None:
            self._outbox.put_nowait(command)

    def follow(self) -> None:
        """Connects again if the node is another server by now: the old one may be cut off, but not closed."""
        if self._address is not None and self.node.address not in (None, self._address):
            self._task.cancel()
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        delay = RETRY_FIRST_S
        while True:
            connection = self.node.new_connection()
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    await connection.connect()  # type: ignore[no-untyped-call]
                delay = RETRY_FIRST_S
                self._address = address_of(connection)
                await self._serve(connection)
            except (RedisError, OSError) as e:
                log.warning("subscription connection lost (%s); reconnecting", e)
                self._lost()
            finally:
                if self._serving is connection:  # not of a successor, see `follow`
                    self._serving = None
                self.confirmed.clear()
                await end(connection)
            await asyncio.sleep(delay)  # back-off between attempts to reconnect
            delay = min(delay * 2, RETRY_MAX_S)

    async def _serve(self, connection: AbstractConnection) -> None:
        while not self._outbox.empty():
            self._outbox.get_nowait()
        self._serving = connection
        for channel in self._wanted:
            self._put("SUBSCRIBE", channel)
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
            if time.monotonic() - self._heard_s > SILENCE_S:
                raise ConnectionError(f"no answer to PING within {SILENCE_S:g} s")
            while not self._outbox.empty():
                commands.append(self._outbox.get_nowait())
            await send(connection, commands)

    async def _receive(self, connection: AbstractConnection) -> None:
        while True:
            message = await connection.read_response(disable_decoding=True)
            self._heard_s = time.monotonic()
            if not isinstance(message, list):
                continue  # PONG; while nothing is subscribed it is a plain string, not a message
            kind, channel = message[0], message[1].decode()
            if kind == b"message":
                self._tell(channel, message[2])
            elif kind == b"subscribe" and channel in self._wanted:
                self.confirmed.add(channel)
                self._tell(channel, b"")

    async def close(self) -> None:
        """Ends the connection."""
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
