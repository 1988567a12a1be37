"""Requests that seem to have killed two workers: held until that is certain, then ended (R11).

They run nowhere meanwhile. A worker that was only cut off or stopped takes its death back in the ledger
(`allspark_bus.losses`), and the request goes on. Where it cannot, because it never got the request, it is
enough that this broker hears it. Nothing here must survive this broker: whoever takes the request over finds
the deaths in the ledger and holds it as well.
"""

import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from allspark_bus.errors import Damaged
from allspark_bus.ledger import Advance, Ending, Ledger, now_ms
from allspark_bus.losses import Suspect
from allspark_proto import allspark_service_pb2 as pb

log = logging.getLogger(__name__)

MAX_DEATHS = 2  # a request whose worker died this often while it ran is quarantined
#: A worker whose connection is gone, and that lives, finds out with its next append.
CLOSED_S = 2.0
#: What is heard of a worker so much later was not on its way when it died.
HEARD_S = 1.0
#: One that was silent may be stopped, or cut off from Redis too; in multiples of the time-out that it broke.
SILENT_TIMEOUTS = 1.5


@dataclass(slots=True)
class _Held:
    claim: Advance
    was_served: bool
    since_s: float
    until_s: float


class Quarantine:
    """`requeue(rid, claim, was_served)` is called for those that are cleared. `heard_s(worker)`: when the
    worker of this id was heard last, None if this broker does not know it.
    """

    def __init__(
        self,
        ledger: Ledger,
        requeue: Callable[[str, Advance, bool], Awaitable[None]],
        heard_s: Callable[[str], float | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ledger = ledger
        self._requeue = requeue
        self._heard_s = heard_s
        self._clock = clock
        self._held: dict[str, _Held] = {}

    def __contains__(self, rid: str) -> bool:
        return rid in self._held

    def hold(self, rid: str, claim: Advance, was_served: bool, seconds: float) -> None:
        """Takes a claimed request for so long."""
        log.warning(
            "request %s has lost %d workers; it waits %.1f s for one of them", rid, claim.deaths, seconds
        )
        now_s = self._clock()
        self._held[rid] = _Held(claim, was_served, now_s, now_s + seconds)

    async def look(self) -> None:
        """A duty: decides what can be decided."""
        held = list(self._held.items())
        if not held:
            return
        rids = [rid for rid, _ in held]
        suspects = await self._ledger.losses.suspects(rids)
        if alive := [call for found in zip(held, suspects, strict=True) for call in self._alive(*found)]:
            await self._ledger.losses.survived(alive)
            suspects = await self._ledger.losses.suspects(rids)
        for (rid, one), suspect in zip(held, suspects, strict=True):
            if self._held.get(rid) is one:
                await self._decide(rid, one, suspect)

    def _alive(self, held: tuple[str, _Held], suspect: Suspect | Damaged | None) -> list[tuple[str, int]]:
        """(request id, epoch) of each death whose worker this broker hears."""
        rid, one = held
        lost = suspect.lost if isinstance(suspect, Suspect) and suspect.epoch == one.claim.epoch else ()
        heard = [(epoch, self._heard_s(worker)) for epoch, worker in lost]
        return [(rid, epoch) for epoch, at in heard if at is not None and at > one.since_s + HEARD_S]

    async def _decide(self, rid: str, one: _Held, suspect: Suspect | Damaged | None) -> None:
        if isinstance(suspect, Damaged):
            await self._ledger.condemn(rid, suspect.reason)
        elif suspect is None or suspect.epoch != one.claim.epoch:
            pass  # it was ended, or somebody else has it
        elif suspect.deaths < MAX_DEATHS:
            log.info("request %s: a worker that it seemed to have killed is back", rid)
            del self._held[rid]  # before it is dispatched: it may come back here
            await self._requeue(rid, one.claim, one.was_served)
            return
        elif 0 < suspect.deadline_ms <= now_ms():
            message = "its deadline passed while its workers were looked for"
            await self._ledger.finish(rid, Ending(pb.GenerateInterrupted, "deadline", message))
        elif self._clock() >= one.until_s:
            workers = ", ".join(worker for _, worker in suspect.lost) or "unknown"
            message = (
                f"{suspect.deaths} workers died while running it ({workers}); it will not be tried again"
            )
            log.error("request %s is quarantined: %s", rid, message)
            await self._ledger.finish(rid, Ending(pb.GenerateInterrupted, "poison", message))
        else:
            return
        del self._held[rid]
