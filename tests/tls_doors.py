"""TLS in front of real Valkey servers, whose build here has none.

The servers listen at 127.0.0.1, their doors at 127.0.0.2 with the same ports. What a server says of where the
others are is changed to where their doors are, as a server with TLS would say.
"""

import asyncio
import ssl
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Self

SERVER, DOOR = "127.0.0.1", "127.0.0.2"


class TlsDoors:
    """Doors to the servers at these ports, with the certificate of a set; a thread of its own serves them."""

    def __init__(self, made: Path, ports: Iterable[int]) -> None:
        self._context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._context.load_cert_chain(made / "store.pem", made / "store.key")
        self._ports = list(ports)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tls-doors", daemon=True)
        self._relays: set[asyncio.Task[None]] = set()
        #: Local ports of the connections that came through a door, as the servers see them.
        self.inside: set[int] = set()

    def __enter__(self) -> Self:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._open(), self._loop).result(20)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(20)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(20)
        self._loop.close()

    async def _open(self) -> None:
        self._servers = [
            await asyncio.start_server(
                lambda r, w, port=port: self._enter(port, r, w), DOOR, port, ssl=self._context
            )
            for port in self._ports
        ]

    async def _close(self) -> None:
        for server in self._servers:
            server.close()
        for task in self._relays:
            task.cancel()
        await asyncio.gather(*self._relays, return_exceptions=True)

    def _enter(self, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = self._loop.create_task(self._relay(port, reader, writer))
        self._relays.add(task)
        task.add_done_callback(self._relays.discard)

    async def _relay(self, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there_reader, there_writer = await asyncio.open_connection(SERVER, port)
        except OSError:  # the server was killed
            writer.close()
            return
        self.inside.add(there_writer.get_extra_info("sockname")[1])
        both = (_copy(reader, there_writer, b"", b""), _copy(there_reader, writer, *_ADDRESSES))
        await asyncio.gather(*both, return_exceptions=True)


_ADDRESSES = (SERVER.encode(), DOOR.encode())  # of the same length, so that no frame changes


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, old: bytes, new: bytes) -> None:
    try:
        while data := await reader.read(1 << 20):
            writer.write(data.replace(old, new) if old else data)
            await writer.drain()
    finally:
        writer.close()
