"""Measured time per operator, and its text layout for GetOpProfilingInfo (spec 2.6.4)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter

_TAGS = ("forward", "reshape", "alloc")
_COLUMNS = (
    ("rank", 10),
    ("opname", 20),
    ("count", 10),
    ("min_ms", 10),
    ("max_ms", 10),
    ("ave_ms", 10),
    ("total_ms", 15),
    ("percentage", 10),
)
_RULE = "-" * 95
_BANNER = "*" * 19


@dataclass(slots=True)
class _Timing:
    count: int = 0
    min_s: float = float("inf")
    max_s: float = 0.0
    total_s: float = 0.0


class Profiler:
    """Timings by (phase, tag, operator); phase "prefill": steps that compute prompts, else "decode"."""

    def __init__(self) -> None:
        self.phase = "decode"
        self._lock = threading.Lock()
        self._timings: dict[tuple[str, str, str], _Timing] = {}

    def add(self, tag: str, name: str, seconds: float) -> None:
        """Record one call of operator `name`; `tag` is forward, reshape or alloc."""
        key = (self.phase, tag, name)
        with self._lock:
            timing = self._timings.setdefault(key, _Timing())
            timing.count += 1
            timing.total_s += seconds
            timing.min_s = min(timing.min_s, seconds)
            timing.max_s = max(timing.max_s, seconds)

    @contextmanager
    def measure(self, tag: str, name: str, is_on: bool) -> Iterator[None]:
        """Record the time of the block, if `is_on`."""
        if not is_on:
            yield
            return
        start = perf_counter()
        yield
        self.add(tag, name, perf_counter() - start)

    def text(self, reset: bool = True) -> str:
        """All timings as text, one block per phase; empty if nothing was measured. Clears them if `reset`."""
        with self._lock:
            timings = dict(self._timings)
            if reset:
                self._timings = {}
        phases = [phase for phase in ("prefill", "decode") if any(key[0] == phase for key in timings)]
        return "".join(_block(phase, timings) for phase in phases)


def _block(phase: str, timings: dict[tuple[str, str, str], _Timing]) -> str:
    lines = [_BANNER, f"* {phase} worker", _BANNER, ""]
    for tag in _TAGS:
        rows = {key[2]: value for key, value in timings.items() if key[:2] == (phase, tag)}
        lines += [f"*** {tag} ***", _RULE, _line([name for name, _ in _COLUMNS]), _RULE]
        total_s = sum(timing.total_s for timing in rows.values()) or 1.0
        for name, timing in sorted(rows.items(), key=lambda item: -item[1].total_s):
            lines.append(_line(_cells(name, timing, total_s)))
        lines += [_RULE, ""]
    return "\n".join(lines) + "\n"


def _cells(name: str, timing: _Timing, total_s: float) -> list[str]:
    times = (timing.min_s, timing.max_s, timing.total_s / timing.count, timing.total_s)
    share = 100 * timing.total_s / total_s
    return ["0", name, str(timing.count), *(f"{seconds * 1e3:.2f}" for seconds in times), f"{share:.2f}"]


def _line(cells: list[str]) -> str:
    return "".join(cell.ljust(width) for cell, (_, width) in zip(cells, _COLUMNS, strict=True))
