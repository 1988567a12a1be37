"""What gRPC's own log may say: callers cause its lines, and one of them holds what they sent."""

import logging

from allspark_bus.sparse_log import SparseLog
from google.protobuf.message import DecodeError

log = logging.getLogger(__name__)

_LIBRARY = "grpc._cython.cygrpc"
_METADATA = "Invalid encoding"


class CallerErrors(logging.Filter):
    """Lines about what callers sent: the fact only (metadata may be a token), and at a bounded rate."""

    def __init__(self) -> None:
        super().__init__()
        self._errors = SparseLog(log)

    def filter(self, record: logging.LogRecord) -> bool:
        """False for what is told in other words, or not at all."""
        if str(record.msg).startswith(_METADATA):
            self._errors.warning("a caller sent metadata that is no UTF-8; it is passed over")
            return False
        if record.exc_info and isinstance(record.exc_info[1], DecodeError):
            self._errors.warning("a caller sent bytes that are no message of the health service")
            return False
        return True


def watch() -> None:
    """From now on, for all servers of this process."""
    logger = logging.getLogger(_LIBRARY)
    if not any(isinstance(present, CallerErrors) for present in logger.filters):
        logger.addFilter(CallerErrors())
