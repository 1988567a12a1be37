"""The two sockets of a broker: messages in and out, and what happens when a peer is not there."""

import logging

import zmq
import zmq.asyncio
from allspark_bus import sockets
from allspark_proto import fleet_pb2 as fleet

log = logging.getLogger(__name__)

VERSION = 1
MAX_REASON = 4096  # characters; what a reason quotes may have come from outside


class WorkerLink:
    """Sends to workers by their identity."""

    def __init__(self, socket: zmq.asyncio.Socket, broker_id: str) -> None:
        self._socket = socket
        self._broker_id = broker_id

    async def send(self, worker_id: str, message: fleet.ToWorker) -> bool:
        """False if the worker is not connected or its queue is full: nothing was sent."""
        message.version = VERSION
        message.broker_id = self._broker_id
        frames = [worker_id.encode(), sockets.HEADER, message.SerializeToString()]
        try:
            await self._socket.send_multipart(frames, flags=zmq.NOBLOCK)
        except zmq.ZMQError as e:
            if e.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            return False
        return True


class ClientLink:
    """Answers clients along the route their envelope came by."""

    def __init__(self, socket: zmq.asyncio.Socket) -> None:
        self._socket = socket
        self.undelivered = 0

    async def send(self, route: list[bytes], reply: fleet.Reply) -> None:
        """A client that is gone loses its answer (it asks again): counted and logged, never raised."""
        if not await self._is_sent(route, reply):
            self.undelivered += 1
            log.warning("the client of call %s is gone; its answer was not delivered", reply.correlation_id)

    async def show_progress(self, route: list[bytes], correlation_id: str) -> None:
        """Tells a client, if it is still there, that its call is being worked on."""
        await self._is_sent(route, fleet.Reply(correlation_id=correlation_id, in_progress=True))

    async def _is_sent(self, route: list[bytes], reply: fleet.Reply) -> bool:
        reply.version = VERSION
        if len(reply.reason) > MAX_REASON:
            reply.reason = reply.reason[:MAX_REASON] + " ..."
        try:
            await self._socket.send_multipart(
                [*route, sockets.HEADER, reply.SerializeToString()], flags=zmq.NOBLOCK
            )
        except zmq.ZMQError as e:
            if e.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            return False
        return True
