"""``allspark gateway``."""

from collections.abc import Sequence

from allspark_gateway.settings import GatewaySettings

from allspark.cli.process import configure_logging


def run(argv: Sequence[str]) -> int:
    """Serve until SIGTERM."""
    settings = GatewaySettings.load(argv)
    configure_logging(settings.log_level)
    from allspark_gateway.main import main

    return main(settings)
