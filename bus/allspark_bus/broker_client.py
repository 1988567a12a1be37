"""Calls a broker and waits for its reply: used by gateways, and by any program that skips gRPC.

A call is sent again until it is answered or its time is up, to the next broker of the list if one stays
silent: every call of the protocol is idempotent. A broker that works on a long call says so, and keeps it.
"""

import asyncio
import contextlib
import itertools
import logging
import uuid as uuid_lib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import zmq
import zmq.asyncio
from allspark_proto import fleet_pb2 as fleet
from google.protobuf.message import DecodeError

from allspark_bus import sockets
from allspark_bus.curve import ClientKeys
from allspark_bus.errors import (
    BrokerUnavailable,
    Denied,
    FleetError,
    MalformedMessage,
    StoreUnavailable,
)
from allspark_bus.ledger import now_ms

log = logging.getLogger(__name__)

PROTOCOL_VERSION = 1
RESEND_S = 1.0  # silence after which a call is sent again


@dataclass
class _Peer:
    endpoint: str
    socket: zmq.asyncio.Socket
    receiver: asyncio.Task[None] = field(init=False)


@dataclass
class _Call:
    """A call that waits: for its answer, and for signs that its broker is working on it."""

    answer: asyncio.Future[fleet.Reply]
    has_sign: bool = False


class BrokerClient:
    """One DEALER to each broker. `max_calls`: calls that may wait at once (one more raises Denied).

    `keys`: for brokers that ask for CURVE. `sent_ms`: when a call that is begun now was sent.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        max_calls: int = 20_000,
        keys: ClientKeys | None = None,
        sent_ms: Callable[[], int] = now_ms,
    ) -> None:
        if not endpoints:
            raise ValueError("a broker client needs at least one broker endpoint")
        self._context = zmq.asyncio.Context()
        self._peers = [_Peer(e, sockets.dealer(self._context, e, keys=keys)) for e in endpoints]
        for peer in self._peers:
            peer.receiver = asyncio.get_running_loop().create_task(self._receive(peer))
        self._calls: dict[str, _Call] = {}
        self._max_calls = max_calls
        self._sent_ms = sent_ms
        self._prefix = uuid_lib.uuid4().hex[:12]
        self._serial = itertools.count()
        self._preferred = 0

    async def call(self, envelope: fleet.Envelope, timeout_s: float) -> fleet.Reply:
        """Sends an envelope (correlation id and version are filled in) and returns its reply.

        Raises BrokerUnavailable when no broker answers in time, Denied at the bound of waiting calls.
        """
        if len(self._calls) >= self._max_calls:
            raise Denied(f"{self._max_calls} calls to the broker are waiting already", retry_after_ms=500)
        envelope.version = PROTOCOL_VERSION
        envelope.wants_progress = True
        envelope.sent_unix_ms = self._sent_ms()
        envelope.correlation_id = f"{self._prefix}-{next(self._serial)}"
        call = _Call(asyncio.get_running_loop().create_future())
        self._calls[envelope.correlation_id] = call
        try:
            return await asyncio.wait_for(self._ask(envelope.SerializeToString(), call), timeout_s)
        except TimeoutError:
            names = ", ".join(p.endpoint for p in self._peers)
            raise BrokerUnavailable(f"no answer from the broker within {timeout_s:g} s ({names})") from None
        finally:
            del self._calls[envelope.correlation_id]

    async def _ask(self, payload: bytes, call: _Call) -> fleet.Reply:
        first = self._preferred
        for attempt in itertools.count(first):
            peer = self._peers[attempt % len(self._peers)]
            if await _is_sent(peer.socket, payload) and await self._is_answered(call):
                self._preferred = attempt % len(self._peers)
                return call.answer.result()
        raise AssertionError("unreachable")

    async def _is_answered(self, call: _Call) -> bool:
        """False once nothing was heard for RESEND_S."""
        call.has_sign = True
        while call.has_sign:
            call.has_sign = False
            done, _ = await asyncio.wait([call.answer], timeout=RESEND_S)
            if done:
                return True
        return False

    async def _receive(self, peer: _Peer) -> None:
        while True:
            frames = await peer.socket.recv_multipart()
            try:
                reply = fleet.Reply.FromString(sockets.payload_of(frames))
            except (MalformedMessage, DecodeError) as e:
                log.warning("broker %s sent a malformed reply: %s", peer.endpoint, e)
                continue
            call = self._calls.get(reply.correlation_id)
            if call is None or call.answer.done():
                continue
            if reply.in_progress:
                call.has_sign = True
            else:
                call.answer.set_result(reply)

    async def close(self) -> None:
        """Ends the sockets; waiting calls are cancelled by their callers."""
        for peer in self._peers:
            peer.receiver.cancel()
        await asyncio.gather(*(p.receiver for p in self._peers), return_exceptions=True)
        self._context.destroy(linger=0)


async def _is_sent(socket: zmq.asyncio.Socket, payload: bytes) -> bool:
    """False if there is no connection within RESEND_S, or its queue stays full."""
    try:
        await socket.send_multipart([sockets.HEADER, payload], flags=zmq.NOBLOCK)
    except zmq.Again:
        # The stub of poll knows no flags.
        if not await socket.poll(int(RESEND_S * 1000), zmq.POLLOUT):  # type: ignore[call-arg]
            return False
        with contextlib.suppress(zmq.Again):
            await socket.send_multipart([sockets.HEADER, payload], flags=zmq.NOBLOCK)
    return True


def raise_for(reply: fleet.Reply) -> fleet.Reply:
    """The reply, or a FleetError with its status and reason; StoreUnavailable for an outage."""
    if reply.unavailable:
        raise StoreUnavailable(reply.reason, status=reply.as_status, retry_after_ms=reply.retry_after_ms)
    if reply.as_status:
        raise FleetError(reply.reason, status=reply.as_status, retry_after_ms=reply.retry_after_ms)
    return reply
