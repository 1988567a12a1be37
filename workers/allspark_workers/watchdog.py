"""R13: work without progress means that this process is dead, whatever its heartbeat says."""

import time
from collections.abc import Callable, Iterable

from allspark_workers.hosted import HostedModel
from allspark_workers.publisher import Publication

LOOK_S = 1.0  # between two looks
LONGEST_S = 2 * LOOK_S  # more between two looks than this was spent without running at all


class Watchdog:
    """Looks at the engines and at the requests that wait for them; `verdict` is asked every `LOOK_S`.

    Two things are fatal when they last longer than `stall_s` seconds: a step that does not end, and an engine
    that says it has nothing to do while requests wait that nobody holds. Time in which this whole process was
    stopped, or starved, does not count: the engine could do nothing then.
    """

    def __init__(
        self,
        hosted: Callable[[], Iterable[HostedModel]],
        publications: Callable[[], Iterable[Publication]],
        stall_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._hosted = hosted
        self._publications = publications
        self._stall_s = stall_s
        self._clock = clock
        self._looked_s = clock()
        self._stalled: dict[str, float] = {}
        self._idle: dict[str, float] = {}

    def verdict(self) -> str:
        """Why this worker should exit; empty while all is well."""
        now = self._clock()
        passed_s, self._looked_s = min(now - self._looked_s, LONGEST_S), now
        waiting = [p for p in self._publications() if p.awaits_tokens]
        stalled, self._stalled = self._stalled, {}
        idle, self._idle = self._idle, {}
        for model in self._hosted():
            name = model.name
            stalled_s = min(model.seconds_since_step(), stalled.get(name, 0.0) + passed_s)
            self._stalled[name] = stalled_s
            if stalled_s > self._stall_s:
                return f"model {name!r}: no step for {stalled_s:.1f} s with requests running"
            stuck = [p.request_id for p in waiting if p.engine is model.engine]
            if not (stuck and model.is_idle):
                continue
            self._idle[name] = idle[name] + passed_s if name in idle else 0.0
            if self._idle[name] > self._stall_s:
                return (
                    f"model {name!r}: {len(stuck)} request(s) wait, {stuck[0]} among them, and the "
                    f"engine has begun none for {self._stall_s:g} s"
                )
        return ""
