"""How long the engine's steps take, by what they compute: what deadlines are judged by. Pure.

A step's time counts from the end of the one before, so whatever the thread does between two steps is in it.
A step that only decodes takes a time that depends on its rows; what a step with prompt tokens takes beyond
that is the prompts'. Times grow with the rows, but by no more than in proportion (weights are read once for
all of them), so what a larger batch takes is at most the time of a smaller one times the ratio of the rows.
"""

from __future__ import annotations

GAIN = 1 / 16
"""Weight of the newest step in a mean: a second or less of steps decides it."""


class StepTimes:
    """Means of late; all times are seconds of one monotonic clock. Written by the engine thread."""

    def __init__(self) -> None:
        self._by_rows: dict[int, float] = {}
        self._prompt_s = 0.0
        self._prompt_tokens = 0.0
        self._since_s: float | None = None

    def begin(self, now_s: float) -> None:
        """A step begins; only the first after an idle time counts from here."""
        if self._since_s is None:
            self._since_s = now_s

    def idle(self) -> None:
        """There was nothing to compute."""
        self._since_s = None

    def step(self, rows: int, computed: int, passed: int, now_s: float) -> None:
        """A step is over that decoded `rows` rows and computed `computed` prompt tokens.

        `passed`: prompt tokens behind it now, those from a cache included, those computed again not.
        """
        since_s, self._since_s = self._since_s, now_s
        if since_s is None or not (rows or computed):
            return
        seconds = now_s - since_s
        if computed:
            self._prompt_s += GAIN * (max(0.0, seconds - self.step_s(rows)) - self._prompt_s)
            self._prompt_tokens += GAIN * (passed - self._prompt_tokens)
        else:
            before = self._by_rows.get(rows, seconds)
            self._by_rows[rows] = before + GAIN * (seconds - before)

    def step_s(self, rows: int) -> float:
        """Time of a step that decodes so many rows; 0: nothing is known. Never less than for fewer rows."""
        known = dict(self._by_rows)  # another thread may add a size meanwhile
        if rows <= 0 or not known:
            return 0.0
        fewer = [size for size in known if size <= rows]
        more = [size for size in known if size > rows]
        least_s = max((known[size] for size in fewer), default=0.0)
        if rows in known:
            return least_s
        bounds_s = [known[max(fewer)] * rows / max(fewer)] if fewer else []
        if more:
            bounds_s.append(known[min(more)])
        return max(least_s, min(bounds_s))

    def prompt_token_s(self) -> float:
        """Time that a prompt token costs; 0: not known."""
        return self._prompt_s / self._prompt_tokens if self._prompt_tokens else 0.0
