"""How fast the queue of one model moves, from what left it lately. Pure."""

import random
from collections.abc import Callable

#: Fewer observations are no ground to tell a rate.
MIN_SEEN = 8
#: An estimate is over about so many of the latest departures.
MEMORY = 64
FIRST_HINT_MS = 1000  # while nothing is known
MIN_HINT_MS, MAX_HINT_MS = 50, 30_000
#: Denied clients are sent back over this span around the estimate, so that they do not come back together.
JITTER = 0.5
#: Longest time that a gateway may deny by itself; see `Waits.full_for_ms`.
MAX_FULL_MS = 50


class Waits:
    """Observes the queue of one model; all times are seconds of the given monotonic clock.

    Only what leaves a queue that holds something counts: with an empty one the rate would be that of the
    arrivals and not what the workers can do.
    """

    def __init__(self, clock: Callable[[], float], draw: Callable[[], float] = random.random) -> None:
        """`draw` gives numbers in [0, 1)."""
        self._clock = clock
        self._draw = draw
        self._seen = 0
        self._departures = 0.0  # of late, the older the less they weigh
        self._span_s = 0.0  # in which they came
        self._since_s = 0.0  # the last departure, or when the queue began to fill

    def began(self) -> None:
        """A request joins an empty queue."""
        self._since_s = self._clock()

    def left(self) -> None:
        """A queued request went to a worker."""
        now_s, keep = self._clock(), 1 - 1 / MEMORY
        self._departures = self._departures * keep + 1
        self._span_s = self._span_s * keep + (now_s - self._since_s)
        self._since_s = now_s
        self._seen += 1

    def interval_s(self) -> float:
        """Mean time between departures, 0 if it is not known; it grows while nothing departs."""
        if self._seen < MIN_SEEN:
            return 0.0
        open_s = self._clock() - self._since_s
        mean_s = self._span_s / self._departures
        return max(mean_s, (self._span_s + open_s) / (self._departures + 1))

    def hint_ms(self, ahead: int) -> int:
        """When to try again: about when half of those that wait have left."""
        return self.hint_of_s(ahead * self.interval_s() / 2)

    def hint_of_s(self, seconds: float) -> int:
        """That time, spread and in the range of hints; 0 means that nothing is known."""
        around_ms = 1000 * seconds if seconds else FIRST_HINT_MS
        spread = 1 - JITTER / 2 + JITTER * self._draw()
        return int(min(MAX_HINT_MS, max(MIN_HINT_MS, around_ms)) * spread)

    def full_for_ms(self) -> int:
        """For how long a full queue is not expected to have a place; 0 if that is not known.

        Bounded, so that a place is not empty for longer should the estimate be wrong.
        """
        return round(min(MAX_FULL_MS, 1000 * self.interval_s()))
