"""``allspark broker``."""

from collections.abc import Sequence

from allspark_broker.settings import BrokerSettings

from allspark.cli.process import configure_logging


def run(argv: Sequence[str]) -> int:
    """Serve until SIGTERM."""
    settings = BrokerSettings.load(argv)
    configure_logging(settings.log_level)
    from allspark_broker.main import main

    return main(settings)
