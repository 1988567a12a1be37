"""Open requests that nobody attends to: whose broker is gone, or that were lost on the way (R2, R10).

Every open request has one broker that answers for it: the last one that admitted, dispatched or claimed it,
as the ledger says. While that broker lives (`allspark_bus.presence`), others leave the request alone. When it
is gone, every other broker asks its workers what they hold, and claims what is left by compare-and-set: at
once what waited for a worker or was on one that is gone too, and a moment later what a live worker does not
list, because its dispatch may just be arriving.
"""

import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from allspark_bus.errors import Damaged
from allspark_bus.ledger import Holder, Ledger
from allspark_bus.presence import Presence

from allspark_broker.dispatcher import Dispatcher
from allspark_broker.workers import WorkerTable

log = logging.getLogger(__name__)

K = TypeVar("K")

ATTEND_S = 0.5
TTL_S = 2.0  # silence in Redis after which a broker is gone
CONFIRM_S = 0.4  # what seems lost must stay so for this long; messages take milliseconds
STALE_S = 10.0  # an index entry without its request is removed after this: an admission may be in progress


@dataclass(slots=True)
class Tally:
    """What looks have found so far, and since when: by request and epoch, by index entry."""

    suspects: dict[tuple[str, int], float] = field(default_factory=dict)
    stale: dict[tuple[str, str], float] = field(default_factory=dict)


class Orphans:
    """`me` is this broker; `ask` makes its workers announce themselves again."""

    def __init__(
        self,
        me: str,
        ledger: Ledger,
        dispatcher: Dispatcher,
        table: WorkerTable,
        presence: Presence,
        ask: Callable[[], Awaitable[None]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._me = me
        self._ledger = ledger
        self._dispatcher = dispatcher
        self._table = table
        self._presence = presence
        self._ask = ask
        self._clock = clock
        self._brokers: frozenset[str] = frozenset()
        self._judges_from_s = float("inf")  # until then a silent broker may just not have been able to speak
        self._next_look_s = float("-inf")
        self._tally = Tally()

    @property
    def others(self) -> frozenset[str]:
        """The other brokers that live, as far as that is known."""
        return self._brokers - {self._me}

    def hurry(self) -> None:
        """Looks at the next occasion: something went wrong."""
        self._next_look_s = float("-inf")

    async def attend(self, models: Iterable[str], interval_s: float) -> None:
        """A duty every `ATTEND_S`; looks when there is cause to, and every `interval_s`."""
        present = await self._presence.renew()
        now = self._clock()
        if not present.was_known:
            # New, or cut off for a while. Meanwhile workers find their way here, and the others speak again.
            self._judges_from_s = now + TTL_S
            self._brokers = frozenset()
            self._tally = Tally()
        if now < self._judges_from_s:
            return
        gone, self._brokers = self._brokers - present.brokers, present.brokers
        if gone:
            log.info("broker %s is gone; looking for what it answered for", ", ".join(sorted(gone)))
            await self._ask()
        if gone or self._tally.suspects or now >= self._next_look_s:
            # What workers answer to the question is seen by the look after this one.
            self._next_look_s = now + (CONFIRM_S if gone else interval_s)
            await self.look(models)

    async def look(self, models: Iterable[str]) -> None:
        """Claims the orphans among the open requests of these models."""
        tally = Tally()
        for model in models:
            entries = [
                (rid, tag)
                for rid, tag in await self._ledger.open_entries(model)
                if rid not in self._dispatcher.queues[model]
                and rid not in self._dispatcher.quarantine
                and self._table.holding(rid) is None
            ]
            ended = []
            for entry, holder in zip(entries, await self._ledger.holders(entries), strict=True):
                if isinstance(holder, Damaged):
                    await self._ledger.condemn(entry[0], holder.reason)
                elif holder is not None:
                    await self._judge(entry[0], holder, tally)
                elif self._has_lasted(self._tally.stale, tally.stale, entry, STALE_S):
                    ended.append(entry)
            await self._ledger.drop_from_index(model, ended)
        self._tally = tally

    async def _judge(self, rid: str, holder: Holder, tally: Tally) -> None:
        what = verdict(holder, self._me, self._brokers, self._table)
        if what == "ours":
            key = rid, holder.epoch
            if not self._has_lasted(self._tally.suspects, tally.suspects, key, CONFIRM_S):
                return
        if what != "theirs":
            log.info("request %s has no owner; taking it over", rid)
            await self._dispatcher.claim(rid, holder.epoch)

    def _has_lasted(self, before: dict[K, float], after: dict[K, float], key: K, seconds: float) -> bool:
        now = self._clock()
        since = after[key] = before.get(key, now)
        return now - since >= seconds

    async def leave(self) -> None:
        """This broker ends: the others take over at once."""
        await self._presence.leave()


def verdict(holder: Holder, me: str, brokers: Collection[str], table: WorkerTable) -> str:
    """About a request that is neither queued here nor held by a worker known here.

    "theirs": another broker answers for it. "orphan": nobody does. "ours": somebody here may, for it may be
    on its way between queue and worker.
    """
    if holder.broker != me and holder.broker in brokers:
        return "theirs"
    if holder.broker == me or (holder.worker and table.get(holder.worker) is not None):
        return "ours"
    return "orphan"
