"""What both clients share and what does no I/O: which address next, and what an answer means."""

import struct
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import grpc
from allspark_proto import allspark_service_pb2 as pb
from allspark_proto import metadata

from allspark.client.errors import (
    AccessDenied,
    AllSparkError,
    FleetUnavailable,
    RequestInterrupted,
    StatusError,
)

MAX_MESSAGE_BYTES = 64 << 20
#: A connection on which nothing arrives for `SILENT_S` while a call waits is asked for a sign of life, and is
#: left after another `ANSWER_S` without one: a network that was cut says nothing. By default gRPC waits a
#: minute for it, whatever keepalive_timeout_ms is (1.85), and asks no more than twice while nothing is sent.
SILENT_S, ANSWER_S = 2.0, 3.0
CONNECT_S = 1.0  # how long a gateway that says nothing may take until the connection is there
SILENCE_S = 0.9 * CONNECT_S  # a try that failed sooner had an answer: a refusal
MAX_PATIENCE = 4
_WINDOW_BYTES = 4 << 20


def channel_options(patience: int = 0) -> list[tuple[str, int]]:
    """Options of a channel whose limits are those above times 2 to the power of `patience`.

    On a slow link the sign of life waits behind what is on its way already.
    """
    factor = 2**patience
    return [
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.keepalive_time_ms", int(1000 * SILENT_S * factor)),
        ("grpc.keepalive_timeout_ms", int(1000 * ANSWER_S * factor)),
        ("grpc.http2.ping_timeout_ms", int(1000 * ANSWER_S * factor)),
        ("grpc.http2.max_pings_without_data", 0),  # any number
        # The pings that measure the bandwidth have the same limit, and come while much arrives: a fixed
        # window instead.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", _WINDOW_BYTES),
        # A gateway that comes back must be found at once, not after a default back-off of up to two minutes.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        ("grpc.min_reconnect_backoff_ms", int(1000 * CONNECT_S * factor)),  # the limit of one attempt
    ]


#: Address and patience of a channel.
Place = tuple[str, int]
#: One Get waits at most this long; then the next address is asked, so that a frozen gateway is left behind.
GET_WAIT_S = 20.0
#: Request metadata of a Build whose model is to be the operator's.
OPERATOR = ((metadata.OWNER, metadata.OPERATOR),)

_FIRST_DELAY_S = 0.05
_MAX_DELAY_S = 1.0
_RETRYABLE = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.CANCELLED,  # a gateway that shuts down cancels the calls it still has
    }
)
_DENIED = frozenset({grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED})


class Route:
    """The addresses of a fleet and which of them is in use. Every call is safe to repeat on another one."""

    def __init__(self, addresses: str | Sequence[str], retry_s: float) -> None:
        self.addresses = (addresses,) if isinstance(addresses, str) else tuple(addresses)
        if not self.addresses:
            raise ValueError("at least one gRPC address is needed")
        self.retry_s = retry_s
        self._index = 0

    @property
    def current(self) -> str:
        """The address that the next call goes to."""
        return self.addresses[self._index]

    def leave(self, address: str) -> None:
        """Go on to the next address, unless another caller left this one already."""
        if self.current == address:
            self._index = (self._index + 1) % len(self.addresses)


@dataclass
class Attempts:
    """The tries of one call: how long to wait before the next, and when to give up."""

    call: str
    route: Route
    clock: Callable[[], float] = time.monotonic
    _since: float | None = None
    _tried_at: float | None = None
    _failures: int = 0
    _silences: int = 0

    def place(self) -> Place:
        """The address for a try that begins now, and the `patience` of its channel.

        After each round over all addresses in which nothing was heard it is one more.
        """
        self._tried_at = self.clock()
        return self.route.current, min(MAX_PATIENCE, self._silences // len(self.route.addresses))

    def failed(self, address: str, code: grpc.StatusCode, details: str) -> float:
        """Seconds to wait before the next try; raises when there should be none."""
        if code in _DENIED:
            raise AccessDenied(f"{self.call} at {address}: {details} ({code.name})")
        if code not in _RETRYABLE:
            raise AllSparkError(f"{self.call} at {address}: {details} ({code.name})")
        now = self.clock()
        self._since = now if self._since is None else self._since
        if self._tried_at is not None and now - self._tried_at >= SILENCE_S:
            self._silences += 1
        if now - self._since >= self.route.retry_s:
            tried = ", ".join(self.route.addresses)
            raise FleetUnavailable(
                f"{self.call}: no answer from {tried} for {self.route.retry_s:g} s: {details}"
            )
        self.route.leave(address)
        self._failures += 1
        # The first round over all addresses is immediate, later rounds slow down.
        rounds = self._failures // len(self.route.addresses)
        return 0.0 if rounds == 0 else min(_MAX_DELAY_S, _FIRST_DELAY_S * 2 ** (rounds - 1))


def trailing_texts(pairs: Iterable[tuple[str, str | bytes]] | None) -> dict[str, str]:
    """Trailing metadata as text."""
    return {key: value.decode() if isinstance(value, bytes) else value for key, value in pairs or ()}


def check_status(call: str, status: int, trailing: Mapping[str, str]) -> None:
    """Raise ``StatusError`` unless an answer's AS_STATUS is success."""
    if status != pb.ALLSPARK_SUCCESS:
        retry_after = trailing.get(metadata.RETRY_AFTER_MS, "")
        reason = metadata.decode_text(trailing.get(metadata.REASON, ""))
        raise StatusError(call, status, reason, int(retry_after) if retry_after.isdigit() else 0)


@dataclass
class Progress:
    """What the reader of one request has received so far; its count is the cursor sent with every Get."""

    uuid: str
    received: int = 0
    is_ended: bool = False
    finish_reason: str = ""
    reason: str = ""
    tensors: dict[str, pb.Tensor] = field(default_factory=dict)
    _text: list[str] = field(default_factory=list)

    def take_text(self) -> str:
        """What has come of the text since the last call; only requests with a text prompt have any."""
        text, self._text = "".join(self._text), []
        return text

    def other_sequences(self) -> list[list[int]]:
        """Token ids of the sequences after the first; complete once the request has ended."""
        found: list[list[int]] = []
        while (tensor := self.tensors.get(f"sequence_{len(found) + 1}")) is not None:
            found.append([*struct.unpack(f"<{len(tensor.data) // 8}q", tensor.data)])
        return found

    def sequence_scores(self) -> list[float]:
        """Scores of a beam search's hypotheses, best first; empty for other requests and before the end."""
        tensor = self.tensors.get("sequence_scores")
        return [] if tensor is None else [*struct.unpack(f"<{len(tensor.data) // 4}f", tensor.data)]

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Request metadata of the next Get."""
        return ((metadata.CURSOR, str(self.received)),)

    def accept(self, reply: pb.GeneratedElements, trailing: Mapping[str, str]) -> list[int]:
        """The new tokens of an answer; raises ``StatusError`` for a uuid the fleet does not know."""
        if reply.empty:
            reason = metadata.decode_text(trailing.get(metadata.REASON, "")) or (
                f"request {self.uuid} is unknown, released or expired"
            )
            raise StatusError("Get", pb.ALLSPARK_ILLEGAL_REQUEST_ID, reason)
        ids = list(reply.ids_from_generate)
        self.received += len(ids)
        tensors = reply.tensors_from_model_inference.tensor_map
        self.tensors.update(tensors)
        if "text" in tensors and tensors["text"].data_type == pb.STRING:
            self._text.append(tensors["text"].data.decode())
        if metadata.FINISH_REASON in trailing:
            self._end(trailing[metadata.FINISH_REASON], trailing)
        return ids

    def accept_status(self, status: int, trailing: Mapping[str, str]) -> None:
        """What GenerateStatus said after an empty Get: the answer of servers that send no finish reason."""
        if status in (pb.GenerateFinished, pb.GenerateInterrupted):
            default = "stopped" if status == pb.GenerateFinished else "interrupted"
            self._end(trailing.get(metadata.FINISH_REASON, default), trailing)

    def _end(self, finish_reason: str, trailing: Mapping[str, str]) -> None:
        self.is_ended = True
        self.finish_reason = finish_reason
        self.reason = metadata.decode_text(trailing.get(metadata.REASON, ""))

    def raise_if_interrupted(self) -> None:
        """Raise ``RequestInterrupted`` if the request ended without finishing."""
        if self.is_ended and self.finish_reason not in metadata.FINISHED_REASONS:
            raise RequestInterrupted(self.uuid, self.finish_reason, self.reason)
