"""TCP proxies that stand for the network between two processes, with faults that tests turn on and off.

A real cut delivers nothing, not even the end of a connection, and a router that lost its state never delivers
anything of an old connection again. So a connection that was open during a cut (or was opened then) stays
silent afterwards: its ends have to notice by themselves, and only new connections get through.
"""

import asyncio
import contextlib
import socket
import struct
import threading
from dataclasses import dataclass
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

CHUNK = 1 << 16
MAX_CHUNKS = 64  # read ahead of what the delay or rate lets through: a slow link pushes back
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close sends RST


@dataclass(frozen=True, slots=True)
class Link:
    """How a proxy treats what it forwards. `up` is from the client to the server.

    `up_cut`, `down_cut`: bytes are accepted and never delivered. `delay_s`: added to each direction.
    `bytes_per_s`: the rate of each direction (0: any). `is_refusing`: every connection is reset.
    """

    up_cut: bool = False
    down_cut: bool = False
    delay_s: float = 0.0
    bytes_per_s: int = 0
    is_refusing: bool = False


CLEAR = Link()
#: Faults by name; what "slow" adds to each direction.
FAULTS = {
    "cut": Link(up_cut=True, down_cut=True),
    "cut-up": Link(up_cut=True),
    "cut-down": Link(down_cut=True),
    "reset": Link(is_refusing=True),
    "slow": Link(delay_s=0.2),
}


class _Connection:
    def __init__(self, client: socket.socket) -> None:
        self.client = client
        self.server: socket.socket | None = None
        self.up_is_lost = self.down_is_lost = False
        self.is_reset = False

    def lose(self, link: Link) -> None:
        """What a cut took from this connection does not come back."""
        self.up_is_lost |= link.up_cut
        self.down_is_lost |= link.down_cut

    def is_lost(self, source: socket.socket) -> bool:
        """Whether nothing of what `source` says arrives."""
        return self.up_is_lost if source is self.client else self.down_is_lost

    def close(self) -> None:
        for end in (self.client, self.server):
            if end is not None:
                if self.is_reset:
                    with contextlib.suppress(OSError):
                        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                end.close()


class Proxy:
    """Forwards connections to one server; made by `Network.proxy`. Methods are for any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, host: str, port: int) -> None:
        self._loop = loop
        self._target = host, port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._link = CLEAR
        self._connections: dict[_Connection, asyncio.Task[None]] = {}
        self._accepting: asyncio.Task[None] | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def set(self, link: Link) -> None:
        """Begins a fault; returns when it holds."""
        asyncio.run_coroutine_threadsafe(self._set(link), self._loop).result()

    def heal(self) -> None:
        """New connections get through again; see the module about those that are open."""
        self.set(CLEAR)

    async def _set(self, link: Link) -> None:
        self._link = link
        for connection, task in list(self._connections.items()):
            connection.lose(link)
            if link.is_refusing:
                connection.is_reset = True
                task.cancel()

    async def open(self) -> None:
        self._accepting = asyncio.create_task(self._accept())

    async def _accept(self) -> None:
        while True:
            client, _ = await self._loop.sock_accept(self._listener)
            client.setblocking(False)
            connection = _Connection(client)
            if self._link.is_refusing:
                connection.is_reset = True
                connection.close()
            else:
                self._connections[connection] = asyncio.create_task(self._serve(connection))

    async def _serve(self, connection: _Connection) -> None:
        try:
            if self._link.up_cut or self._link.down_cut:
                # No handshake of TCP survives a cut, whichever way: the server never hears of this one.
                connection.up_is_lost = connection.down_is_lost = True
                await self._pump(connection, connection.client, connection.client)
                return
            connection.server = socket.socket()
            connection.server.setblocking(False)
            await self._loop.sock_connect(connection.server, self._target)
            for end in (connection.client, connection.server):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            async with asyncio.TaskGroup() as both:
                both.create_task(self._pump(connection, connection.client, connection.server))
                both.create_task(self._pump(connection, connection.server, connection.client))
        except* OSError:
            connection.is_reset = True
        finally:
            connection.close()
            self._connections.pop(connection, None)

    async def _pump(self, connection: _Connection, source: socket.socket, sink: socket.socket) -> None:
        """Moves one direction until its end."""
        chunks: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(MAX_CHUNKS)
        async with asyncio.TaskGroup() as both:
            both.create_task(self._send(connection, chunks, source, sink))
            data = b"."
            while data:
                try:
                    data = await self._loop.sock_recv(source, CHUNK)
                except OSError:
                    if not connection.is_lost(source):
                        raise
                    data = b""  # the end of one that the other never hears of
                if not data or not connection.is_lost(source):
                    await chunks.put((self._loop.time(), data))

    async def _send(
        self,
        connection: _Connection,
        chunks: asyncio.Queue[tuple[float, bytes]],
        source: socket.socket,
        sink: socket.socket,
    ) -> None:
        data = b"."
        while data:
            read_s, data = await chunks.get()
            wait_s = read_s + self._link.delay_s - self._loop.time()
            if self._link.bytes_per_s:
                wait_s = max(wait_s, 0.0) + len(data) / self._link.bytes_per_s
            if wait_s > 0:
                await asyncio.sleep(wait_s)  # what the link takes
            if connection.is_lost(source):
                continue
            try:
                if data:
                    await self._loop.sock_sendall(sink, data)
                else:
                    sink.shutdown(socket.SHUT_WR)
            except OSError:
                if not connection.is_lost(sink):
                    raise
                connection.up_is_lost = connection.down_is_lost = True  # nor is its refusal heard of

    async def close(self) -> None:
        tasks = [*self._connections.values(), *filter(None, [self._accepting])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._listener.close()


class Network:
    """All proxies of a test, served by a thread of their own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="network", daemon=True)
        self._proxies: dict[tuple[str, str, int], Proxy] = {}

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends every connection. Safe to call twice."""
        if self._loop.is_closed() or not self._thread.is_alive():
            return
        for proxy in self._proxies.values():
            asyncio.run_coroutine_threadsafe(proxy.close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def proxy(self, name: str, address: str) -> Proxy:
        """The proxy called `name` in front of HOST:PORT; the same for the same arguments."""
        host, _, port = address.rpartition(":")
        key = name, host, int(port)
        if key not in self._proxies:
            made = Proxy(self._loop, host, int(port))
            asyncio.run_coroutine_threadsafe(made.open(), self._loop).result()
            self._proxies[key] = made
        return self._proxies[key]

    def through(self, name: str, url: str) -> str:
        """The URL (`tcp://…`, `redis://…`) with the proxy's address in it."""
        parts = urlsplit(url)
        return parts._replace(netloc=self.proxy(name, parts.netloc).address).geturl()

    def of(self, name: str) -> list[Proxy]:
        """Every proxy of that name."""
        return [proxy for (called, _, _), proxy in self._proxies.items() if called == name]

    def set(self, name: str, link: Link) -> None:
        """Begins a fault in every proxy of that name."""
        for proxy in self.of(name):
            proxy.set(link)
