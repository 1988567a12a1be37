"""Warnings that somebody outside can cause as often as he likes, written at a bounded rate."""

import logging
import time
from collections.abc import Callable

REPORT_S = 1.0


class SparseLog:
    """Writes one warning in `REPORT_S`, with the number of those that it passed over before."""

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._written_s = float("-inf")
        self._untold = 0

    def warning(self, text: str) -> None:
        """Writes the text, or counts it."""
        now_s = self._clock()
        if now_s - self._written_s < REPORT_S:
            self._untold += 1
            return
        more = f" (and {self._untold} more before it)" if self._untold else ""
        self._log.warning("%s%s", text, more)
        self._written_s, self._untold = now_s, 0
