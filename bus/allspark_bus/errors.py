"""One error tree. Each error carries the AS_STATUS that a client sees and a reason it can act on."""

from allspark_proto import allspark_service_pb2 as pb


class FleetError(Exception):
    """Base: `status` for the wire, `reason` for people, `retry_after_ms` as a hint (0: none)."""

    status: "pb.AS_STATUS.ValueType" = pb.ALLSPARK_UNKNOWN_ERROR

    def __init__(
        self, reason: str, *, status: "pb.AS_STATUS.ValueType | None" = None, retry_after_ms: int = 0
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.retry_after_ms = retry_after_ms
        if status is not None:
            self.status = status


class ParamError(FleetError):
    """The caller sent a value that can never work."""

    status = pb.ALLSPARK_PARAM_ERROR


class LimitError(FleetError):
    """A prompt or length over a limit."""

    status = pb.ALLSPARK_EXCEED_LIMIT_ERROR


class InvalidCall(FleetError):
    """A call in the wrong state of a model's life cycle."""

    status = pb.ALLSPARK_INVALID_CALL_ERROR


class UnknownRequest(FleetError):
    """A uuid that was never accepted (or whose tombstone is gone)."""

    status = pb.ALLSPARK_ILLEGAL_REQUEST_ID


class Denied(FleetError):
    """The fleet will not take this now; trying later can work."""

    status = pb.ALLSPARK_REQUEST_DENIED


class CacheMemoryOut(FleetError):
    """The request can never fit an empty KV pool."""

    status = pb.ALLSPARK_CACHE_MEMORY_OUT


class FileError(FleetError):
    """A model or weight file that is missing, unreadable or outside the model root."""

    status = pb.ALLSPARK_IO_ERROR


class StoreUnavailable(FleetError):
    """Redis could not be reached within the bounded wait."""


class BrokerUnavailable(FleetError):
    """No broker answered within the bounded wait."""


class Damaged(FleetError):
    """A record in Redis that no process of this version wrote: whose record it is fails, nobody else."""

    status = pb.ALLSPARK_RUNTIME_ERROR


class MalformedMessage(ParamError):
    """Bytes that are not a message of this protocol."""
