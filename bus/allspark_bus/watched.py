"""Files that an operator changes while processes run: keys, tokens."""

import contextlib
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

log = logging.getLogger(__name__)

LOOK_AGAIN_S = 1.0  # a change counts after this time at the latest

Stamp = tuple[str, int, int, int]
T = TypeVar("T")


def stamp(path: Path) -> Stamp:
    """Differs when the file was written or replaced. Raises OSError."""
    found = os.stat(path)  # noqa: PTH116 (the same, without a Path method call for each look)
    return str(path), found.st_mtime_ns, found.st_size, found.st_ino


class Watched(Generic[T]):
    """What `read()` makes of files, made anew when `stamps()` differ.

    Raises what `read` raises at first. Files that become unusable later (`error`, OSError) change nothing:
    the log says why, once for each cause, and they are tried again.
    """

    def __init__(
        self,
        what: str,
        stamps: Callable[[], list[Stamp]],
        read: Callable[[], T],
        error: type[Exception],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._what = what
        self._stamps = stamps
        self._read = read
        self._errors = (error, OSError)
        self._clock = clock
        self._seen: list[Stamp] = []
        with contextlib.suppress(OSError):  # `read` tells it better
            self._seen = stamps()
        self._value = read()
        self._problem = ""
        self._looked_s = clock()

    def now(self) -> T:
        """The newest usable value."""
        now_s = self._clock()
        if now_s - self._looked_s >= LOOK_AGAIN_S:
            self._looked_s = now_s
            self._look()
        return self._value

    def _look(self) -> None:
        try:
            stamps = self._stamps()
            if stamps != self._seen:
                self._value, self._seen = self._read(), stamps
                log.info("read %s", self._what)
            self._problem = ""
        except self._errors as e:
            if str(e) != self._problem:
                log.error("%s stay as they were: %s", self._what, e)
            self._problem = str(e)
