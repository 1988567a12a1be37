"""Tokens per second over a sliding window, in constant memory."""

from __future__ import annotations

from collections import deque

WINDOW_S = 10.0
BUCKET_S = 0.25


class RateWindow:
    """Counts that arrived in the last `WINDOW_S` seconds, kept in buckets of `BUCKET_S`."""

    def __init__(self) -> None:
        self._buckets: deque[tuple[int, int]] = deque(maxlen=int(WINDOW_S / BUCKET_S) + 1)
        self._began_s: float | None = None

    def add(self, count: int, now_s: float) -> None:
        """Record `count` events at `now_s` (monotonic)."""
        if self._began_s is None:
            self._began_s = now_s
        bucket = int(now_s / BUCKET_S)
        if self._buckets and self._buckets[-1][0] == bucket:
            count += self._buckets.pop()[1]
        self._buckets.append((bucket, count))

    def rate(self, now_s: float) -> float:
        """Events per second over the window, or since the first event if that is less long ago."""
        if self._began_s is None:
            return 0.0
        oldest = int((now_s - WINDOW_S) / BUCKET_S)
        total = sum(count for bucket, count in tuple(self._buckets) if bucket > oldest)
        return total / max(BUCKET_S, min(WINDOW_S, now_s - self._began_s))
