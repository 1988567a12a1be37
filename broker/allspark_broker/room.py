"""Whether a request may join its model's queue: what would wait too long is denied early (R6, R12)."""

from allspark_bus import tensors
from allspark_bus.errors import Denied
from allspark_bus.ledger import now_ms
from allspark_proto import allspark_service_pb2 as pb
from allspark_proto import fleet_pb2 as fleet

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


def check_deadline(
    envelope: fleet.Envelope, queue: RequestQueue, waits: Waits, limits: fleet.ModelFacts, *, may_run: bool
) -> None:
    """Raises Denied for a request that would have to queue and, by what others took, end after its deadline.

    One that need not queue (`may_run`: a worker has room) is taken in any case: how long it runs is its
    client's choice.
    """
    ahead = queue.ahead_of(envelope.tenant, envelope.priority)
    if not envelope.deadline_unix_ms or (may_run and not ahead):
        return
    left_s = (envelope.deadline_unix_ms - now_ms()) / 1000
    end_s = waits.end_s(ahead, token_limit(envelope.start_request, limits.max_length))
    if end_s > left_s:
        request = envelope.start_request
        raise Denied(
            f"request {request.config.uuid!r} would end in about {end_s:.1f} s, {end_s - left_s:.1f} s after "
            f"its deadline: {ahead} requests for model {request.model_name!r} are before it",
            retry_after_ms=waits.hint_of_s(end_s - left_s),
        )


def token_limit(request: pb.StartRequestRequest, max_length: int) -> int:
    """The most tokens that a checked request may generate."""
    return (request.config.max_length or max_length) - len(tensors.prompt_ids(request))
