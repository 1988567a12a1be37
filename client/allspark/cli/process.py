"""What the commands ``gateway``, ``broker`` and ``worker`` have in common."""

import logging
import os
import sys
import time

KERNELS_VARIABLE = "ALLSPARK_KERNELS"  # read by allspark_kernels, which knows no settings
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def configure_logging(level: str) -> None:
    """Log to standard error, in UTC."""
    formatter = logging.Formatter(LOG_FORMAT, "%Y-%m-%dT%H:%M:%SZ")
    formatter.converter = time.gmtime
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def choose_kernels(name: str) -> None:
    """Make ``allspark_kernels`` use an implementation; ``auto`` leaves the choice to it."""
    os.environ.pop(KERNELS_VARIABLE, None)
    if name != "auto":
        os.environ[KERNELS_VARIABLE] = name
