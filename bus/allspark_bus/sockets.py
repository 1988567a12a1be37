"""ZeroMQ on purpose: high-water marks, mandatory routing, linger and framing in one place.

Frames (docs/wire-protocol.md): a message is `b"ALSP" version` and one protobuf payload. A ROUTER sees the
peer's identity first, and an empty delimiter after it when the peer is a REQ socket.
"""

import zmq
import zmq.asyncio

from allspark_bus.curve import ClientKeys, ServerKeys
from allspark_bus.errors import MalformedMessage

HEADER = b"ALSP\x01"
MAGIC = b"ALSP"
HIGH_WATER_MARK = 10_000
LINGER_MS = 500
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
#: Beside what a client may send: the other fields of an envelope, and the ids of two million tokens of text.
#: ZeroMQ ends the connection of a peer that sends more, and with it all calls of that peer.
OVERHEAD_BYTES = 16 * 1024 * 1024
#: From a broker, which has bounded what it passes on.
MAX_BROKER_BYTES = 1 << 30
# Keep-alive below the application's heartbeats: a peer whose host vanished is disconnected by ZeroMQ itself.
ZMTP_HEARTBEAT_MS, ZMTP_TIMEOUT_MS = 1000, 5000
RECONNECT_MS, RECONNECT_MAX_MS = 50, 1000
# A connection that began while the network was cut may stay silent for ever: the next one may get through.
HANDSHAKE_MS = CONNECT_MS = 5000


def _configure(socket: zmq.asyncio.Socket, max_frame_bytes: int) -> None:
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.MAXMSGSIZE, max_frame_bytes)
    socket.setsockopt(zmq.HEARTBEAT_IVL, ZMTP_HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, ZMTP_TIMEOUT_MS)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)


def router(
    context: zmq.asyncio.Context,
    endpoint: str,
    *,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    keys: ServerKeys | None = None,
    door: str = "",
    is_handed_over: bool = True,
) -> tuple[zmq.asyncio.Socket, str]:
    """A bound ROUTER and the endpoint it really has (port 0 takes a free one).

    Sending to a peer that is not connected raises EHOSTUNREACH, and to one whose queue is full EAGAIN,
    instead of dropping the message. A peer that reconnects under its identity replaces its old connection.
    `is_handed_over` False: the old connection keeps the identity until it ends: nobody can take it away.
    A peer that sends `OVERHEAD_BYTES` more than `max_message_bytes` is disconnected; less than that is for
    the caller to refuse.
    With `keys` only peers that the context's `curve.Doorkeeper` admits at this `door` can connect.
    """
    socket = context.socket(zmq.ROUTER)
    _configure(socket, max_message_bytes + OVERHEAD_BYTES)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.ROUTER_HANDOVER, int(is_handed_over))
    if keys is not None:
        keys.apply(socket, door)
    socket.bind(endpoint)
    return socket, str(socket.getsockopt_string(zmq.LAST_ENDPOINT)).rstrip("\0")


def dealer(
    context: zmq.asyncio.Context,
    endpoint: str,
    *,
    identity: bytes = b"",
    keys: ClientKeys | None = None,
) -> zmq.asyncio.Socket:
    """A DEALER connected to `endpoint`. It queues only for an established connection (IMMEDIATE).

    With `keys` only a broker that has the secret of their server key is connected to.
    """
    socket = context.socket(zmq.DEALER)
    _configure(socket, MAX_BROKER_BYTES)
    if keys is not None:
        keys.apply(socket)
    if identity:
        socket.setsockopt(zmq.IDENTITY, identity)
    socket.setsockopt(zmq.IMMEDIATE, 1)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
    socket.connect(endpoint)
    return socket


def payload_of(frames: list[bytes]) -> bytes:
    """The payload of [header, payload].

    Raises MalformedMessage for anything else, naming the version if only that is wrong.
    """
    if len(frames) != 2 or not frames[0].startswith(MAGIC):
        raise MalformedMessage(f"expected the two frames ALSP<version>, payload; got {len(frames)} frame(s)")
    if frames[0] != HEADER:
        raise MalformedMessage(
            f"protocol version {frames[0][4:12].hex()} is not known; this broker speaks 01"
        )
    return frames[1]


def split_route(frames: list[bytes]) -> tuple[list[bytes], list[bytes]]:
    """(route, body): the identity, plus the empty delimiter of a REQ peer, and the rest."""
    cut = 2 if len(frames) > 1 and frames[1] == b"" else 1
    return frames[:cut], frames[cut:]
