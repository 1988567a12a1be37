"""A broker that reaches no worker, while another broker lives, steps aside: the other may reach them.

It says goodbye in Redis, so the others take over what it answers for (`orphans`), and answers every call that
it is unavailable, so gateways go on to the next broker. It comes back when it reaches a worker or is the only
broker. Where nobody reaches a worker one stays, and requests wait there: who steps aside first is left to
chance, and two that did at once come back.
"""

import logging
import random
import time
from collections.abc import Callable

from allspark_bus.errors import BrokerUnavailable
from allspark_bus.presence import Presence

from allspark_broker.workers import WorkerTable

log = logging.getLogger(__name__)

START_S = 5.0  # workers need so long at most to find a new broker
PATIENCE_S = 0.5, 1.5  # between these, at random
REASON = "this broker reaches no worker, and another broker may: ask that"


class Aside:
    """`holds` is asked by a duty, and makes the changes; `check` refuses calls meanwhile."""

    def __init__(
        self, table: WorkerTable, presence: Presence, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._table = table
        self._presence = presence
        self._clock = clock
        self._is_aside = False
        self._not_before_s: float | None = clock() + START_S

    def check(self) -> None:
        """Raises BrokerUnavailable while it holds."""
        if self._is_aside:
            raise BrokerUnavailable(REASON)

    async def holds(self) -> bool:
        """Whether this broker is to keep out of everything, as of now."""
        if any(not worker.is_mute for worker in self._table):
            self._come_back("it reaches a worker")
            self._not_before_s = None
        elif self._is_aside:
            if not await self._presence.others():
                self._come_back("there is no other broker")
                self._wait()
        elif self._not_before_s is None:
            self._wait()
        elif self._clock() >= self._not_before_s and await self._presence.others():
            log.warning("this broker reaches no worker: it steps aside for another one")
            self._is_aside = True
            await self._presence.leave()
        return self._is_aside

    def _wait(self) -> None:
        self._not_before_s = self._clock() + random.uniform(*PATIENCE_S)

    def _come_back(self, why: str) -> None:
        if self._is_aside:
            log.info("%s: this broker is back", why)
        self._is_aside = False
