"""``allspark dashinfer-shim``: let programs of DashInfer 1.x run on a fleet."""

import shlex
from collections.abc import Sequence

from allspark.cli.access import access_of, files_of
from allspark.cli.console import out
from allspark.cli.errors import CommandError
from allspark.cli.settings import DashinferShimSettings
from allspark.shim import ShimError, ShimSettings, write_directory
from allspark.shim.settings import parse_models


def run(argv: Sequence[str]) -> int:
    """Write the directory and say how to use it; 0."""
    settings = DashinferShimSettings.load(argv)
    directory = settings.directory.expanduser().absolute()
    access_of(settings, settings.grpc)  # what cannot be used is said now, not to the program that runs later
    files = {name: str(path) for name, path in files_of(settings).items()}
    try:
        write_directory(directory, ShimSettings(settings.grpc, parse_models(settings.model), files))
    except ShimError as error:
        raise CommandError(f"allspark dashinfer-shim: {error}") from error
    out.print("Run the DashInfer program with", markup=False)
    out.print(f"  AS_DAEMON_PATH={shlex.quote(str(directory))} AS_NUMA_NUM=1", markup=False, soft_wrap=True)
    return 0
