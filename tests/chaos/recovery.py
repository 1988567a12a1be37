"""How fast requests go on after their worker was killed.

A recovery belongs to a request that ran on the worker when it was killed, as the ledger says right after the
kill. It lasts from SIGKILL until the client has the first token that was not in the stream then, or the end.
It is *alone* if no other fault overlaps its first `LIMIT_S` (a late one does not excuse a slow recovery) and
its client had got something in the `STALLED_S` before: else it was waiting for another reason already. A
fault lasts until what was hit is ready again, and its `settle_s` longer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from allspark_bus import keys
from allspark_bus.store import Store

from tests.chaos.load import Story
from tests.chaos.schedule import Fault

STALLED_S = 1.0
LIMIT_S = 3.0  # for the 99th percentile of recoveries that are alone


@dataclass(frozen=True, slots=True)
class Period:
    """A fault, and from when to when it lasted."""

    fault: Fault
    began: float
    ended: float


@dataclass(frozen=True, slots=True)
class Sample:
    """A request that ran on a worker when that was killed; its stream held `num_tokens`."""

    killed_at: float
    story: Story
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Recovery:
    """`excess_s`: the part of it in which no overlapping fault was in progress."""

    story: Story
    seconds: float
    excess_s: float
    is_alone: bool


async def samples(store: Store, worker_id: str, killed_at: float, stories: Sequence[Story]) -> list[Sample]:
    """The requests among `stories` that a worker ran when it was killed."""
    open_ones = [s for s in stories if not s.is_over]
    rids = [keys.request_id("default", s.uuid) for s in open_ones]
    records = await store.batch([("HMGET", keys.request(r), "st", "wk", "n") for r in rids])
    return [
        Sample(killed_at, story, int(n))
        for story, (state, worker, n) in zip(open_ones, records, strict=True)
        if state == b"open" and worker == worker_id.encode()
    ]


def recoveries(found: Sequence[Sample], periods: Sequence[Period]) -> list[Recovery]:
    """Of samples whose client got something after the kill."""
    results = []
    for sample in found:
        back_at = _back_at(sample)
        if back_at is None:
            continue
        began = sample.killed_at
        others = [p for p in periods if p.began != began]
        until = min(back_at, began + LIMIT_S)
        is_alone = not any(p.began < until and p.ended + p.fault.settle_s > began for p in others)
        heard_at = max(at for at in sample.story.events if at <= began)
        is_alone &= began - heard_at <= STALLED_S
        seconds = back_at - began
        results.append(Recovery(sample.story, seconds, seconds - covered(others, began, back_at), is_alone))
    return results


def _back_at(sample: Sample) -> float | None:
    story = sample.story
    for at, length in zip(story.events, story.lengths, strict=True):
        if at > sample.killed_at and (length > sample.num_tokens or at == story.ended_at):
            return at
    return None


def covered(periods: Sequence[Period], began: float, ended: float) -> float:
    """How much of a time at least one of the faults was in progress."""
    total, reached = 0.0, began
    for period in sorted(periods, key=lambda p: p.began):
        first, last = max(period.began, reached), min(period.ended, ended)
        if last > first:
            total += last - first
            reached = last
    return total
