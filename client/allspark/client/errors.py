"""What the client library raises."""

from allspark_proto import allspark_service_pb2 as pb


class AllSparkError(Exception):
    """Base of everything this library raises on purpose."""


class FleetUnavailable(AllSparkError):
    """No gateway answered within the retry time; the request, if it was accepted, lives on."""


class AccessDenied(AllSparkError):
    """The gateway knows no such token, or the token lacks the scope that the call needs."""


class StatusError(AllSparkError):
    """The fleet answered with an AS_STATUS other than success.

    ``status`` is the number on the wire, ``reason`` the cause in words, ``retry_after_ms`` a hint (0: none).
    """

    def __init__(self, call: str, status: int, reason: str = "", retry_after_ms: int = 0) -> None:
        super().__init__(f"{call}: {reason or 'no reason given'} ({status_name(status)})")
        self.call = call
        self.status = status
        self.reason = reason
        self.retry_after_ms = retry_after_ms


class RequestInterrupted(AllSparkError):
    """Generation ended without finishing; the tokens delivered before are good.

    ``finish_reason`` is the machine-readable reason (``cache_memory``, ``poison``, ``deadline``, ...).
    """

    def __init__(self, uuid: str, finish_reason: str, reason: str = "") -> None:
        detail = f": {reason}" if reason else ""
        super().__init__(f"request {uuid} was interrupted ({finish_reason or 'no reason given'}){detail}")
        self.uuid = uuid
        self.finish_reason = finish_reason
        self.reason = reason


def status_name(status: int) -> str:
    """The name of an AS_STATUS, or its number if this version does not know it."""
    if status in pb.AS_STATUS.values():
        return pb.AS_STATUS.Name(pb.AS_STATUS.ValueType(status))
    return f"AS_STATUS {status}"
