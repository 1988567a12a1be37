"""What counts as growth. Pure."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from tests.soak.samples import Levels

MIB = 1 << 20
#: How much the second half may add by the robust slope: so much, or this share of the median if it is more.
#: Resident memory creeps by what malloc cannot give back; the store also grows its tables by doubling.
BOUNDS = {
    "resident bytes": (4 * MIB, 0.04),
    "used bytes": (MIB, 0.1),
    "objects": (1000, 0.02),
    "descriptors": (4, 0.05),
    "keys": (50, 0.2),
}
OTHER_BOUND = (16, 0.1)
#: How much more than after the warm-up an idle process may hold of anything that is counted.
#: The publisher's loop holds what it published last until the next one comes: up to a whole answer.
IDLE_SLACK = {
    "descriptors": 4,
    "system threads": 4,
    "threads": 4,
    "allspark_workers.publisher.Publication.tokens": 1024,
}
OTHER_SLACK = 8
#: Caches with a bound of their own fill up and stay; they are held against it instead.
CACHES = {
    "allspark_broker.affinity.PrefixAffinity._holders": (1 << 16) * 9,
    "allspark_broker.worker_checks.WorkerChecks._good": 1 << 12,
    "allspark_broker.queue.RequestQueue._finish": 1 << 12,
}
_NOT_COUNTS = frozenset({"resident bytes", "used bytes", "objects"})


@dataclass(frozen=True, slots=True)
class Trend:
    """What one quantity of one process did in the second half of the run."""

    process: str
    quantity: str
    median: float
    growth: float
    bound: float

    @property
    def is_growth(self) -> bool:
        return self.growth > self.bound


def theil_sen(points: Sequence[tuple[float, float]]) -> float:
    """The median of the slopes of all pairs (Theil 1950, Sen 1968); up to 29 % outliers do not move it."""
    slopes = [
        (y - x[1]) / (at - x[0]) for i, x in enumerate(points) for at, y in points[i + 1 :] if at > x[0]
    ]
    return statistics.median(slopes) if slopes else 0.0


def at_one_rate(
    points: Sequence[tuple[float, float]], rates: Sequence[tuple[float, float]]
) -> list[tuple[float, float]]:
    """Levels as they would be with traffic of the median rate, if they depended on it alone."""
    median = statistics.median(rate for _, rate in rates)
    return [(at, value * median / rate) for (at, value), (_, rate) in zip(points, rates, strict=True) if rate]


def trend(
    process: str,
    quantity: str,
    points: Sequence[tuple[float, float]],
    rates: Sequence[tuple[float, float]] = (),
) -> Trend:
    """The growth over the second half of the points.

    With `rates` of the traffic at those times it is the lesser one of the levels and of `at_one_rate`: on a
    busy machine traffic speeds up and slows down, and what lives for some seconds with it.
    """
    half = points[len(points) // 2 :]
    median = statistics.median(value for _, value in half) if half else 0.0
    growth = theil_sen(half) * (half[-1][0] - half[0][0]) if half else 0.0
    if rates and growth > 0:
        level = at_one_rate(half, rates[len(points) // 2 :])
        growth = min(growth, theil_sen(level) * (half[-1][0] - half[0][0]))
    if quantity in CACHES:
        return Trend(process, quantity, median, max(0.0, half[-1][1] - CACHES[quantity]), 0.0)
    least, share = BOUNDS.get(quantity, OTHER_BOUND)
    return Trend(process, quantity, median, growth, max(least, share * median))


def held_longer(process: str, before: Levels, after: Levels) -> list[str]:
    """What an idle process holds more than when it was idle after the warm-up."""
    return [
        f"{process}, idle again: {quantity} is {level:g}, it was {before.get(quantity, 0):g}"
        for quantity, level in sorted(after.items())
        if quantity not in _NOT_COUNTS
        and quantity not in CACHES
        and level > before.get(quantity, 0) + IDLE_SLACK.get(quantity, OTHER_SLACK)
    ]
