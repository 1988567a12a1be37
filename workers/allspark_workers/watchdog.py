"""R13: work without progress means that this process is dead, whatever its heartbeat says."""

import time
from collections.abc import Callable, Iterable

from allspark_workers.hosted import HostedModel
from allspark_workers.publisher import Publication


class Watchdog:
    """Looks at the engines and at the requests that wait for them; `verdict` is asked now and then.

    Two things are fatal when they last longer than `stall_s` seconds: a step that does not end, and an engine
    that says it has nothing to do while requests wait that nobody holds.
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
        self._idle_since: dict[str, float] = {}

    def verdict(self) -> str:
        """Why this worker should exit; empty while all is well."""
        waiting = [p for p in self._publications() if p.awaits_tokens]
        for model in self._hosted():
            stalled_s = model.seconds_since_step()
            if stalled_s > self._stall_s:
                return f"model {model.name!r}: no step for {stalled_s:.1f} s with requests running"
            stuck = [p.request_id for p in waiting if p.engine is model.engine]
            if not (stuck and model.is_idle):
                self._idle_since.pop(model.name, None)
            elif self._clock() - self._idle_since.setdefault(model.name, self._clock()) > self._stall_s:
                return (
                    f"model {model.name!r}: {len(stuck)} request(s) wait, {stuck[0]} among them, and the "
                    f"engine has begun none for {self._stall_s:g} s"
                )
        return ""
