"""Whether a request may join its model's queue: what would wait too long is denied early (R6, R12)."""

from allspark_bus.errors import Denied
from allspark_bus.ledger import now_ms
from allspark_proto import fleet_pb2 as fleet

from allspark_broker.forecast import Outlook
from allspark_broker.queue import RequestQueue
from allspark_broker.waits import Waits


class QueueFull(Denied):
    """`full_for_ms`: how long the queue is not expected to have a place; gateways deny by themselves then."""

    def __init__(self, reason: str, *, retry_after_ms: int, full_for_ms: int) -> None:
        super().__init__(reason, retry_after_ms=retry_after_ms)
        self.full_for_ms = full_for_ms


def check_place(envelope: fleet.Envelope, queue: RequestQueue, waits: Waits) -> None:
    """Raises Denied if the deadline has passed, and QueueFull. Cheap: for the time before other checks."""
    uuid = envelope.start_request.config.uuid
    if 0 < envelope.deadline_unix_ms <= now_ms():
        raise Denied(f"the deadline of request {uuid!r} has passed already")
    if not queue.has_room(envelope.tenant):
        raise QueueFull(
            f"{len(queue)} requests for model {envelope.start_request.model_name!r} are waiting already, and "
            f"tenant {envelope.tenant!r} has its share of the places",
            retry_after_ms=waits.hint_ms(len(queue)),
            full_for_ms=waits.full_for_ms(),
        )


def check_deadline(envelope: fleet.Envelope, outlook: Outlook, waits: Waits) -> None:
    """Raises Denied for a request that would most likely end after its deadline.

    While it is not known how fast the model is, only what begins at once is taken.
    """
    request, ahead = envelope.start_request, outlook.ahead
    before = f"{ahead} requests for model {request.model_name!r} and those on its workers are before it"
    if outlook.end_s is None:
        raise Denied(
            f"request {request.config.uuid!r} has a deadline, and it is not known yet how fast the model is: "
            f"{before}",
            retry_after_ms=waits.hint_of_s(0),
        )
    left_s = (envelope.deadline_unix_ms - now_ms()) / 1000
    if outlook.end_s and outlook.end_s > left_s:
        raise Denied(
            f"request {request.config.uuid!r} would end in about {outlook.end_s:.1f} s, "
            f"{outlook.end_s - left_s:.1f} s after its deadline: {before}",
            retry_after_ms=waits.hint_of_s(outlook.end_s - left_s),
        )
