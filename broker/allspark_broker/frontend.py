"""The door for clients: envelopes in, one answer for each along the route that it came by."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import zmq.asyncio
from allspark_bus import sockets, wire_shape
from allspark_bus.broker_client import LARGE_BYTES
from allspark_bus.errors import FleetError, MalformedMessage
from allspark_proto import fleet_pb2 as fleet
from google.protobuf.message import DecodeError

from allspark_broker.access import FRONTEND, Access, authorize
from allspark_broker.calls import denied_busy, failure
from allspark_broker.links import ClientLink

MAX_CALLS = 20_000  # envelopes in progress at once; one more is denied
MAX_LARGE_BYTES = 2 << 30  # of large envelopes in progress at once
PROGRESS_S = 0.4  # a call that takes longer tells its client so, this often

Execute = Callable[[fleet.Envelope], Awaitable[fleet.Reply]]


@dataclass(slots=True)
class _InProgress:
    """A call being worked on; `route` is where its client listens."""

    route: list[bytes]
    wants_progress: bool
    since_s: float


class Frontend:
    """`execute` answers an authorised envelope and raises nothing.

    `is_stuck`: nothing gets on here now, but perhaps elsewhere: clients hear nothing and ask another broker.
    """

    def __init__(
        self,
        socket: zmq.asyncio.Socket,
        access: Access,
        execute: Execute,
        is_stuck: Callable[[], bool] = lambda: False,
    ) -> None:
        self._is_stuck = is_stuck
        self._socket = socket
        self._access = access
        self._execute = execute
        self._clients = ClientLink(socket)
        self._in_progress: dict[tuple[bytes, str], _InProgress] = {}
        self._answers: set[asyncio.Task[None]] = set()
        self._large_bytes = 0  # of the large ones of them

    async def serve(self) -> None:
        """Takes envelopes for ever; each is worked on beside the others."""
        while True:
            frames, peer = await self._access.receive(self._socket, FRONTEND)
            route, body = sockets.split_route(frames)
            payload = b""
            try:
                payload = sockets.payload_of(body)
                envelope = _read(payload)
                authorize(envelope, peer)
            except FleetError as e:
                reply = failure(e)
                reply.correlation_id = wire_shape.correlation_id(payload)
                await self._clients.send(route, reply)
                continue
            await self._begin(route, envelope, len(payload))

    async def _begin(self, route: list[bytes], envelope: fleet.Envelope, size: int) -> None:
        key = (route[0], envelope.correlation_id)
        if key in self._in_progress:
            return  # sent again while the first is being worked on: one answer serves both
        if len(self._in_progress) >= MAX_CALLS:
            await self._clients.send(route, denied_busy(envelope.correlation_id, f"{MAX_CALLS} calls"))
            return
        large = size if size >= LARGE_BYTES else 0
        if large and self._large_bytes + large > MAX_LARGE_BYTES:
            what = f"large calls of {self._large_bytes} bytes"
            await self._clients.send(route, denied_busy(envelope.correlation_id, what))
            return
        self._large_bytes += large
        self._in_progress[key] = _InProgress(route, envelope.wants_progress, time.monotonic())
        task = asyncio.create_task(self._answer(route, key, envelope, large))
        self._answers.add(task)
        task.add_done_callback(self._answers.discard)

    async def _answer(
        self, route: list[bytes], key: tuple[bytes, str], envelope: fleet.Envelope, large: int
    ) -> None:
        try:
            await self._clients.send(route, await self._execute(envelope))
        finally:
            self._large_bytes -= large
            del self._in_progress[key]

    async def show_progress(self) -> None:
        """A duty every `PROGRESS_S`, so that a client can tell a long call from a dead broker."""
        if self._is_stuck():
            return
        limit = time.monotonic() - PROGRESS_S
        for (_, correlation_id), call in list(self._in_progress.items()):
            if call.wants_progress and call.since_s < limit:
                await self._clients.show_progress(call.route, correlation_id)

    async def finish(self, limit_s: float) -> None:
        """Waits until the calls in progress are answered, or the limit; what is left then is cancelled."""
        answers = set(self._answers)
        if answers:
            _, late = await asyncio.wait(answers, timeout=limit_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)


def _read(payload: bytes) -> fleet.Envelope:
    """Raises MalformedMessage, or LimitError for one with more parts than any legal one has."""
    wire_shape.check_envelope(payload)
    try:
        return fleet.Envelope.FromString(payload)
    except DecodeError as e:
        raise MalformedMessage(f"the payload is no Envelope: {e}") from e
