"""What ``up``, ``demo`` and ``bench`` have in common: fleet options, log lines, loading models."""

from collections.abc import Sequence
from pathlib import Path

from rich.text import Text

from allspark.cli.console import err
from allspark.cli.errors import CommandError
from allspark.cli.loading import loading_bar
from allspark.cli.models import LocalModel
from allspark.cli.settings import FleetSettings
from allspark.client import AllSparkError, ModelOptions
from allspark.launcher import Fleet, FleetOptions


def show_line(name: str, line: str) -> None:
    """A line of one of the processes; the store's own chatter is kept for error messages."""
    if name != "store":
        err.print(Text.assemble((f"{name} | ", "dim"), line), soft_wrap=True)


def common_args(settings: FleetSettings, config: Path | None) -> tuple[str, ...]:
    """Flags for every process: they read their own tables of the same configuration file."""
    args = [f"--log-level={settings.log_level}"]
    return (*args, f"--config={config.absolute()}") if config else tuple(args)


def worker_args(settings: FleetSettings) -> tuple[str, ...]:
    """Flags for the workers, as far as they were given."""
    args = [f"--dtype={settings.dtype}", f"--kernels={settings.kernels}"]
    if settings.num_threads:
        args.append(f"--num-threads={settings.num_threads}")
    if settings.kv_memory is not None:
        args.append(f"--kv-memory={int(settings.kv_memory)}")
    return tuple(args)


def small_fleet(settings: FleetSettings, config: Path | None, model: LocalModel) -> FleetOptions:
    """A fleet of one of each for one model, with a store that goes with it."""
    common = common_args(settings, config)
    return FleetOptions(
        device=settings.device,
        model_roots=(model.root,),
        gateway_args=common,
        broker_args=common,
        worker_args=(*common, *worker_args(settings)),
    )


def load_models(fleet: Fleet, models: Sequence[LocalModel], options: ModelOptions) -> None:
    """Build and start models one after the other, with a bar for each."""
    for model in models:
        try:
            keys = fleet.secured.keys() if fleet.secured else None
            with loading_bar(model.name, fleet.frontends, keys):
                fleet.load_model(model.name, model.path, options)
        except AllSparkError as error:
            raise CommandError(f"model {model.name} ({model.path}) could not be loaded: {error}") from error
