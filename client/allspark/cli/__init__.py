"""The command line: ``allspark COMMAND``.

Each command is a small module that is imported when it is used, so a gateway or broker host needs none of the
packages that only workers or the launcher use.
"""

import difflib
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple

from allspark_bus.settings import ConfigError, check_environment

from allspark.cli.errors import CommandError, missing_extra

EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130


class _Command(NamedTuple):
    summary: str
    extra: str  # the extra of the distribution that this command needs, or ""


COMMANDS = {
    "up": _Command("run a whole fleet on this machine", "up"),
    "demo": _Command("run a fleet, ask the demo model one question, shut down", "up"),
    "generate": _Command("send a prompt and stream the answer", "up"),
    "load": _Command("build and start models on a running fleet", ""),
    "certs": _Command("make certificates, keys and tokens for development", "up"),
    "dashinfer-shim": _Command("let DashInfer 1.x programs run on a fleet", ""),
    "status": _Command("show models, workers and requests", ""),
    "bench": _Command("measure speed, the prefix cache, or overload", "up"),
    "gateway": _Command("one gateway of a fleet", ""),
    "broker": _Command("one broker of a fleet", ""),
    "worker": _Command("one worker of a fleet", "worker"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status: 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        sys.stdout.write(_overview() + "\n")
        return EXIT_OK if arguments else EXIT_USAGE
    if arguments[0] == "--version":
        from allspark_proto.version import version_full

        sys.stdout.write(version_full() + "\n")
        return EXIT_OK
    # A shell ignores SIGINT for background jobs; an interrupt still has to release what was submitted.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return _run(arguments[0], arguments[1:])
    except ConfigError as error:
        return _fail(str(error), EXIT_USAGE)
    except CommandError as error:
        return _fail(str(error), EXIT_FAILED)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _run(name: str, arguments: Sequence[str]) -> int:
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean allspark {close[0]}?" if close else f"known: {', '.join(COMMANDS)}"
        raise ConfigError(f"allspark: unknown command {name!r}; {hint}")
    from allspark.cli.settings import all_settings

    check_environment(all_settings())
    try:
        module = import_module(f"allspark.cli.{name.replace('-', '_')}")
        return int(module.run(arguments))
    except ModuleNotFoundError as error:
        known = missing_extra(name, COMMANDS[name].extra, error)
        if known is None:
            raise
        raise known from error


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        ["usage: allspark COMMAND [flags]", "", *lines, "", "allspark COMMAND --help explains a command."]
    )


def _fail(message: str, code: int) -> int:
    sys.stderr.write(message + "\n")
    return code
