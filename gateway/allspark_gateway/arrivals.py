"""When a call was sent, as far as a process can tell that may have been stopped in between."""

import asyncio
import time
from collections.abc import Callable

from allspark_bus.ledger import now_ms

TICK_S = 0.5
STALL_S = 1.0  # two ticks in a row that lie further apart: this process was stopped, or starved
GRACE_S = 30.0  # afterwards, for what lay in its sockets meanwhile


class Arrivals:
    """Stamps calls. After a stall nobody can tell what arrived before it, so all counts as sent before it.

    A copy of a StartRequest that a stopped gateway finds when it goes on is thus no newer than the release
    that followed the client's repetition elsewhere, and is not run again.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, wall_ms: Callable[[], int] = now_ms
    ) -> None:
        self._clock = clock
        self._wall_ms = wall_ms
        self._seen_s, self._seen_ms = clock(), wall_ms()
        self._before_ms = 0
        self._doubtful_until_s = float("-inf")
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Looks at the clock regularly, until `stop`."""
        self.tick()
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self.start)

    def stop(self) -> None:
        """Ends what `start` began."""
        if self._timer is not None:
            self._timer.cancel()

    def tick(self) -> None:
        """Notices a stall."""
        now_s = self._clock()
        if now_s - self._seen_s > STALL_S:
            if now_s >= self._doubtful_until_s:
                self._before_ms = self._seen_ms
            self._doubtful_until_s = now_s + GRACE_S
        self._seen_s, self._seen_ms = now_s, self._wall_ms()

    def sent_ms(self) -> int:
        """The wall clock in ms, for a call whose work begins now: not later than it was sent."""
        self.tick()
        return self._before_ms if self._seen_s < self._doubtful_until_s else self._seen_ms
