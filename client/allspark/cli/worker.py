"""``allspark worker``."""

from collections.abc import Sequence

from allspark_workers.settings import WorkerSettings

from allspark.cli.process import choose_kernels, configure_logging


def run(argv: Sequence[str]) -> int:
    """Serve until SIGTERM."""
    settings = WorkerSettings.load(argv)
    configure_logging(settings.log_level)
    choose_kernels(settings.kernels)
    from allspark_workers.main import main

    return main(settings)
