"""gRPC metadata of calls and answers (allspark_proto.metadata), and what an answer says when it fails."""

import re

import grpc.aio
from allspark_bus.errors import FleetError, ParamError, UnknownRequest
from allspark_proto import allspark_service_pb2 as pb
from allspark_proto import metadata
from google.protobuf.message import Message

Pairs = tuple[tuple[str, str], ...]
Context = grpc.aio.ServicerContext[Message, Message]

MAX_REASON_BYTES = 2048  # of the 8 KiB that clients accept as metadata
_CUT_ESCAPE = re.compile(r"%[0-9A-F]?$")


class Gone(UnknownRequest):
    """There is nothing to read under this uuid; `outcome` is "unknown", "released" or "expired"."""

    def __init__(self, uuid: str, outcome: str) -> None:
        super().__init__(_GONE[outcome].format(uuid))
        self.outcome = outcome


_GONE = {
    "unknown": "request {!r} is unknown: it was never accepted, or it was forgotten long ago",
    "released": "request {!r} was released",
    "expired": "request {!r} ended, and its result is no longer kept: read and release results in time",
}


def of_request(context: Context, key: str) -> str | None:
    """The value of a key of the request metadata."""
    for name, value in context.invocation_metadata() or ():
        if name == key:
            return value if isinstance(value, str) else value.decode("utf-8", "replace")
    return None


def number_of(context: Context, key: str, low: int, high: int) -> int | None:
    """An integer of the request metadata; raises ParamError for text that is none, or outside the range."""
    text = of_request(context, key)
    if text is None:
        return None
    if len(text) > 20 or not re.fullmatch(r"-?[0-9]+", text) or not low <= int(text) <= high:
        raise ParamError(f"metadata {key}: {text[:40]!r} is not an integer from {low} to {high}")
    return int(text)


def reason_text(reason: str) -> str:
    """A reason as a metadata value, cut to its bound."""
    return _CUT_ESCAPE.sub("", metadata.encode_text(reason[:MAX_REASON_BYTES])[:MAX_REASON_BYTES])


def of_error(error: FleetError) -> Pairs:
    """Trailing metadata of a failed call."""
    pairs = [(metadata.STATUS, str(int(error.status)))]
    if error.reason:
        pairs.append((metadata.REASON, reason_text(error.reason)))
    if error.retry_after_ms:
        pairs.append((metadata.RETRY_AFTER_MS, str(error.retry_after_ms)))
    if isinstance(error, Gone):
        pairs.append((metadata.GONE, error.outcome))
    return tuple(pairs)


def of_end(status: int, finish_reason: str, message: str) -> Pairs:
    """Trailing metadata of an answer after which there is nothing more."""
    pairs = [
        (metadata.FINISH_REASON, reason_text(finish_reason)),
        (metadata.REQUEST_STATUS, str(status)),
    ]
    if message:
        pairs.append((metadata.REASON, reason_text(message)))
    return tuple(pairs)


def fill_status(response: Message, request: Message, error: FleetError) -> bool:
    """Puts status and uuid of a failure where the response has fields for them: whether it has a status."""
    if isinstance(response, pb.StartRequestResponse):
        response.as_status, response.uuid = error.status, uuid_of(request)
        return True
    if isinstance(response, pb.AsStatus):
        response.as_status = error.status
        return True
    return False


def uuid_of(request: Message) -> str:
    """The uuid that a request names, or ""."""
    if isinstance(request, pb.StartRequestRequest):
        return request.config.uuid
    if isinstance(request, pb.StopRequestRequest | pb.UUID):
        return request.uuid
    return ""
