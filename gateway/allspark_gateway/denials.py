"""Denials that need no broker: for a moment after one has said that a model's queue is full for a tenant.

Under overload most requests are denied. Asking the broker for each would load what is the bottleneck already,
and let every answer wait behind all of them.
"""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from allspark_bus.errors import Denied
from allspark_proto import allspark_service_pb2 as pb
from allspark_proto import fleet_pb2 as fleet

MAX_FULL = 1024
#: Longest time that the word of a broker is taken, whatever it says.
MAX_HOLD_S = 0.1
JITTER = 0.5


@dataclass(frozen=True, slots=True)
class _Full:
    until_s: float
    priority: int
    reason: str
    retry_after_ms: int


class Denials:
    """What brokers said of full queues."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._clock = clock
        self._draw = draw
        self._full: dict[tuple[str, str], _Full] = {}  # by tenant and model
        self._untold = 0

    def __len__(self) -> int:
        return len(self._full)

    def note(self, envelope: fleet.Envelope, reply: fleet.Reply) -> None:
        """Takes in the answer to a StartRequest."""
        key = envelope.tenant, envelope.start_request.model_name
        if reply.as_status != pb.ALLSPARK_REQUEST_DENIED or not reply.full_for_ms:
            if not reply.as_status:
                self._full.pop(key, None)  # there was room
            return
        if len(self._full) >= MAX_FULL:
            self._full.clear()  # they are all over in a moment
        until_s = self._clock() + min(MAX_HOLD_S, reply.full_for_ms / 1000)
        self._full[key] = _Full(until_s, envelope.priority, reply.reason, reply.retry_after_ms)

    def made_room(self, tenant: str, model: str) -> None:
        """A request of the model was ended by its client: the next one asks again. Empty: of any model."""
        if model:
            self._full.pop((tenant, model), None)
        else:
            self._full.clear()

    def denial(self, tenant: str, model: str, priority: int) -> Denied | None:
        """The denial of a request, if it would only hear the same from the broker."""
        full = self._full.get((tenant, model))
        if full is None or priority > full.priority:
            return None
        if self._clock() >= full.until_s:
            del self._full[tenant, model]
            return None
        spread = 1 - JITTER / 2 + JITTER * self._draw()  # of one hint for many clients
        return Denied(full.reason, retry_after_ms=max(1, int(full.retry_after_ms * spread)))

    def count(self) -> None:
        """A request was denied here."""
        self._untold += 1

    def take_count(self) -> int:
        """How many were denied here since the last call, for the broker's books."""
        untold, self._untold = self._untold, 0
        return untold
