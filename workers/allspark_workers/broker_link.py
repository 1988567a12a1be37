"""The worker's side of the backend sockets: one DEALER to each broker, announcements and heartbeats."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import zmq
import zmq.asyncio
from allspark_bus import sockets
from allspark_bus.curve import ClientKeys
from allspark_bus.errors import MalformedMessage
from allspark_proto import fleet_pb2 as fleet
from google.protobuf.message import DecodeError

from allspark_workers.settings import WorkerSettings

log = logging.getLogger(__name__)

VERSION = 1
ANNOUNCE_S = 5.0  # announcements are repeated, so that a lost Accepted or Ended cannot leave a broker wrong

Handler = Callable[["Link", fleet.ToWorker], Awaitable[None]]


@dataclass(slots=True)
class Link:
    """A connection to one broker."""

    endpoint: str
    socket: zmq.asyncio.Socket
    announced_s: float = 0.0


class BrokerLinks:
    """`announce` and `heartbeat` make the messages; `handle` gets what brokers send.

    `doubted` is called when a broker may have taken this worker for dead.
    """

    def __init__(
        self,
        worker_id: str,
        settings: WorkerSettings,
        announce: Callable[[], fleet.Announce],
        heartbeat: Callable[[], fleet.WorkerHeartbeat],
        handle: Handler,
        doubted: Callable[[], None],
    ) -> None:
        self._worker_id = worker_id
        self._announce = announce
        self._heartbeat = heartbeat
        self._handle = handle
        self._doubted = doubted
        self._heartbeat_s = settings.heartbeat_s
        self._timeout_s = settings.broker_timeout_s
        self._keys = ClientKeys.read(settings.curve) if settings.curve else None
        self._context = zmq.asyncio.Context()
        self.links = [Link(e, self._connect(e)) for e in settings.broker]
        self._state_changed = asyncio.Event()

    def _connect(self, endpoint: str) -> zmq.asyncio.Socket:
        return sockets.dealer(self._context, endpoint, identity=self._worker_id.encode(), keys=self._keys)

    def state_changed(self) -> None:
        """Sends the next heartbeat at once."""
        self._state_changed.set()

    async def run(self) -> None:
        """Serves all links for ever."""
        await asyncio.gather(self._beat(), *[self._receive(link) for link in self.links])

    async def send(self, link: Link, **message: object) -> None:
        """Sends one message; a broker that is not connected learns it from the next announcement."""
        out = fleet.FromWorker(version=VERSION, worker_id=self._worker_id, **message)  # type: ignore[arg-type]
        with contextlib.suppress(zmq.Again):
            await link.socket.send_multipart([sockets.HEADER, out.SerializeToString()], flags=zmq.NOBLOCK)

    async def send_all(self, **message: object) -> None:
        """Sends to every broker."""
        for link in self.links:
            await self.send(link, **message)

    async def _beat(self) -> None:
        while True:
            self._state_changed.clear()
            for link in self.links:
                await self._beat_one(link)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._state_changed.wait(), self._heartbeat_s)

    async def _beat_one(self, link: Link) -> None:
        now = time.monotonic()
        if now - link.announced_s > ANNOUNCE_S:
            link.announced_s = now
            await self.send(link, announce=self._announce())
        else:
            await self.send(link, heartbeat=self._heartbeat())

    def _reconnect(self, link: Link) -> None:
        log.warning("broker %s has been silent for %.1f s; reconnecting", link.endpoint, self._timeout_s)
        link.socket.close(linger=0)
        link.socket = self._connect(link.endpoint)
        link.announced_s = 0.0
        self._doubted()

    async def _receive(self, link: Link) -> None:
        while True:
            if not await link.socket.poll(int(self._timeout_s * 1000)):
                self._reconnect(link)
                continue
            frames = await link.socket.recv_multipart()
            try:
                message = fleet.ToWorker.FromString(sockets.payload_of(frames))
            except (MalformedMessage, DecodeError) as e:
                log.warning("malformed message from broker %s: %s", link.endpoint, e)
                continue
            if message.WhichOneof("message") == "reannounce":
                link.announced_s = time.monotonic()
                await self.send(link, announce=self._announce())
                self._doubted()
            else:
                await self._handle(link, message)

    def close(self) -> None:
        """Sends what is queued, within the linger time, and ends."""
        self._context.destroy(linger=sockets.LINGER_MS)
