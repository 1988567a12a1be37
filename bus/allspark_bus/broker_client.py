"""Calls a broker and waits for its reply: used by gateways, and by any program that skips gRPC.

A call is sent again until it is answered or its time is up, to the next broker of the list if one stays
silent, is not connected, or cannot reach Redis: every call of the protocol is idempotent. A broker that works
on a long call says so, and keeps it. Each client begins with any of the brokers, so that many share the work,
and stays with one while it answers.
"""

import asyncio
import contextlib
import itertools
import logging
import random
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
    LimitError,
    MalformedMessage,
    StoreUnavailable,
)
from allspark_bus.ledger import now_ms

log = logging.getLogger(__name__)

PROTOCOL_VERSION = 1
ENVELOPE_BYTES = 4096  # of its fields beside the call
LARGE_BYTES = 256 << 10  # calls of this size and more are bounded by their sum as well as by their number
MAX_LARGE_BYTES = 1 << 30
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
    asked: int = -1  # numbers of brokers: the last that it was sent to, and the one that answered
    answered_by: int = -1
    outage: fleet.Reply | None = None  # what a broker said that could not decide


class BrokerClient:
    """One DEALER to each broker. `max_calls`: calls that may wait at once (one more raises Denied).

    `max_message_bytes`: of a call, not more than the brokers' limit. `keys`: for brokers that ask for CURVE.
    `sent_ms`: when a call that is begun now was sent.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        max_calls: int = 20_000,
        max_message_bytes: int = sockets.MAX_MESSAGE_BYTES,
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
        self._large_bytes = 0  # of the large calls that wait
        self._max_bytes = max_message_bytes + ENVELOPE_BYTES
        self._sent_ms = sent_ms
        self._prefix = uuid_lib.uuid4().hex[:12]
        self._serial = itertools.count()
        self._preferred = random.randrange(len(self._peers))

    async def call(self, envelope: fleet.Envelope, timeout_s: float) -> fleet.Reply:
        """Sends an envelope (correlation id and version are filled in) and returns its reply.

        Raises BrokerUnavailable when no broker answers in time, Denied at a bound of waiting calls (their
        number, and the bytes of large ones), LimitError for a call that brokers would not even read.
        """
        if len(self._calls) >= self._max_calls:
            raise Denied(f"{self._max_calls} calls to the broker are waiting already", retry_after_ms=500)
        envelope.version = PROTOCOL_VERSION
        envelope.wants_progress = True
        envelope.sent_unix_ms = self._sent_ms()
        envelope.correlation_id = f"{self._prefix}-{next(self._serial)}"
        payload = envelope.SerializeToString()
        if len(payload) > self._max_bytes:
            raise LimitError(f"the call has {len(payload)} bytes, the limit is {self._max_bytes}")
        large = len(payload) if len(payload) >= LARGE_BYTES else 0
        if large and self._large_bytes + large > MAX_LARGE_BYTES:
            raise Denied(f"large calls of {self._large_bytes} bytes are waiting already", retry_after_ms=500)
        self._large_bytes += large
        call = _Call(asyncio.get_running_loop().create_future())
        self._calls[envelope.correlation_id] = call
        try:
            return await asyncio.wait_for(self._ask(payload, call), timeout_s)
        except TimeoutError:
            if call.asked == self._preferred:  # it may be busy with a call that it cannot finish
                self._preferred = (self._preferred + 1) % len(self._peers)
            if call.outage is not None:
                return call.outage
            names = ", ".join(p.endpoint for p in self._peers)
            raise BrokerUnavailable(f"no answer from the broker within {timeout_s:g} s ({names})") from None
        finally:
            self._large_bytes -= large
            del self._calls[envelope.correlation_id]

    async def _ask(self, payload: bytes, call: _Call) -> fleet.Reply:
        unheard = set(range(len(self._peers)))
        first = self._preferred
        while True:
            index = await self._send(payload, first)
            call.asked = first if index is None else index
            if index is not None and await self._is_answered(call):
                reply = call.answer.result()
                unheard.discard(call.answered_by)
                if not (reply.unavailable and unheard):
                    self._preferred = call.answered_by
                    return reply
                # It is alive and says why it cannot serve; another one may.
                call.outage, call.answer = reply, asyncio.get_running_loop().create_future()
            first = (call.asked + 1) % len(self._peers)

    async def _send(self, payload: bytes, first: int) -> int | None:
        """Sends to the first broker from there on that takes it now; None if none does within RESEND_S."""
        order: list[int] = [*range(first, len(self._peers)), *range(first)]
        for index in order:
            with contextlib.suppress(zmq.Again):
                await self._peers[index].socket.send_multipart([sockets.HEADER, payload], flags=zmq.NOBLOCK)
                return index
        poller = zmq.asyncio.Poller()
        for peer in self._peers:
            poller.register(peer.socket, zmq.POLLOUT)
        await poller.poll(int(RESEND_S * 1000))
        return None

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
                call.answered_by = self._peers.index(peer)
                call.answer.set_result(reply)

    async def close(self) -> None:
        """Ends the sockets; waiting calls are cancelled by their callers."""
        for peer in self._peers:
            peer.receiver.cancel()
        await asyncio.gather(*(p.receiver for p in self._peers), return_exceptions=True)
        self._context.destroy(linger=0)


def raise_for(reply: fleet.Reply) -> fleet.Reply:
    """The reply, or a FleetError with its status and reason; StoreUnavailable for an outage."""
    if reply.unavailable:
        raise StoreUnavailable(reply.reason, status=reply.as_status, retry_after_ms=reply.retry_after_ms)
    if reply.as_status:
        raise FleetError(reply.reason, status=reply.as_status, retry_after_ms=reply.retry_after_ms)
    return reply
