"""Small text files of models, read with a bound and without waiting for whatever lies there instead."""

import errno
import os
import stat
from pathlib import Path


def read_text(path: Path, max_bytes: int) -> str:
    """The UTF-8 text of a regular file.

    Raises OSError (also for a pipe, a device or more than `max_bytes`), UnicodeDecodeError.
    """
    # Opening a pipe would wait for somebody to write into it.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "is no regular file", str(path))
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            data = file.read(max_bytes + 1)
    finally:
        os.close(descriptor)
    if len(data) > max_bytes:
        raise OSError(errno.EFBIG, f"has more than {max_bytes} bytes", str(path))
    return data.decode()
