"""Files that hold secrets: whoever else can read them is told about."""

import logging
import stat
from pathlib import Path

log = logging.getLogger(__name__)


def warn_if_exposed(path: Path) -> None:
    """Logs a warning if every user of this machine can read a file. Raises OSError if it is not there.

    No refusal: secrets mounted into a container often have such a mode, and nobody else is in there.
    """
    if path.stat().st_mode & stat.S_IROTH:
        log.warning("every user of this machine can read the secret in %s: chmod o-r it", path)
