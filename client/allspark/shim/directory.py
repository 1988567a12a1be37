"""The directory for AS_DAEMON_PATH."""

import shlex
import sys
from pathlib import Path

import allspark_proto

import allspark
from allspark.shim.settings import ShimError, ShimSettings

LAUNCHER = "mpirun"
_SCRIPT = """\
#!/bin/sh
# Written by `allspark dashinfer-shim`. DashInfer's ClientEngine starts this as $AS_DAEMON_PATH/mpirun.
exec {python} -I -c {program} "$(dirname -- "$0")" "$@"
"""
# Isolated (-I): the client's PYTHONPATH and PYTHONHOME are about another Python.
_PROGRAM = (
    "import sys; sys.path[:0] = {path!r}; from allspark.shim.main import main; sys.exit(main(sys.argv[1:]))"
)


def write_directory(directory: Path, settings: ShimSettings) -> Path:
    """Makes or renews the directory; the launcher in it. Raises ``ShimError`` if it holds something else."""
    launcher = directory / LAUNCHER
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if launcher.exists() and b"allspark dashinfer-shim" not in launcher.read_bytes():
            raise ShimError(f"{launcher} is not ours: choose a directory of its own, not one of DashInfer's")
        settings.write(directory)
        launcher.write_text(_script(), encoding="utf-8")
        launcher.chmod(0o755)
    except OSError as error:
        raise ShimError(f"cannot write {error.filename or directory}: {error.strerror}") from error
    return launcher


def _script() -> str:
    """The launcher finds this very installation, whatever environment its caller has."""
    roots = [str(Path(package.__path__[0]).resolve().parent) for package in (allspark, allspark_proto)]
    program = _PROGRAM.format(path=list(dict.fromkeys(roots)))
    return _SCRIPT.format(python=shlex.quote(sys.executable), program=shlex.quote(program))
