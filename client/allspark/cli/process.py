"""What the commands ``gateway``, ``broker`` and ``worker`` have in common."""

import logging
import os
import re
import sys
import time
from typing import Any

KERNELS_VARIABLE = "ALLSPARK_KERNELS"  # read by allspark_kernels, which knows no settings
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
MAX_LINE = 64 << 10  # characters: a message may quote what came from outside
#: What would begin another line, or command the terminal that shows it.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


class LineFormatter(logging.Formatter):
    """One line for a message, whatever it quotes; a traceback follows on lines that are indented."""

    converter = staticmethod(time.gmtime)

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line."""
        return _shown(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        """The traceback; the text of the exception may quote something, too."""
        return "\n".join(f"  {_shown(line)}" for line in super().formatException(ei).split("\n"))


def _shown(line: str) -> str:
    if len(line) > MAX_LINE:
        line = line[:MAX_LINE] + " ..."
    return _CONTROL.sub(lambda found: repr(found[0])[1:-1], line)


def configure_logging(level: str) -> None:
    """Log to standard error, in UTC."""
    formatter = LineFormatter(LOG_FORMAT, "%Y-%m-%dT%H:%M:%SZ")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def choose_kernels(name: str) -> None:
    """Make ``allspark_kernels`` use an implementation; ``auto`` leaves the choice to it."""
    os.environ.pop(KERNELS_VARIABLE, None)
    if name != "auto":
        os.environ[KERNELS_VARIABLE] = name
