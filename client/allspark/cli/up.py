"""``allspark up``: a whole fleet on this machine, in the foreground."""

import os
import shlex
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

from allspark_bus import redis_url
from allspark_bus.settings import ConfigError, config_file

from allspark import demo_model
from allspark.cli.console import activity, err, out
from allspark.cli.errors import CommandError
from allspark.cli.fleets import common_args, load_models, show_line, worker_args
from allspark.cli.models import LocalModel, resolve_all
from allspark.cli.settings import UpSettings
from allspark.client import CACHE_MODES, ModelOptions
from allspark.launcher import Fleet, FleetOptions, LaunchError


def run(argv: Sequence[str]) -> int:
    """Start the fleet, load the models, serve until Ctrl-C, SIGTERM or ShutdownService; drain; 0."""
    settings = UpSettings.load(argv)
    models = resolve_all(settings.model)
    if settings.secure is not None and not settings.secure.expanduser().exists():
        _make_set(settings.secure.expanduser())
    fleet = _new_fleet(_fleet_options(settings, models, config_file(UpSettings, argv)), show_line)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # drain on SIGTERM as on Ctrl-C
    try:
        return _serve(fleet, settings, models)
    except LaunchError as error:
        raise CommandError(str(error)) from error
    finally:
        _stop(fleet)


def _new_fleet(options: FleetOptions, report: Callable[[str, str], None]) -> Fleet:
    try:
        return Fleet(options, report)
    except LaunchError as error:
        raise CommandError(f"allspark up: --secure: {error}") from error


def _make_set(directory: Path) -> None:
    from allspark.certs import CertsError, write_set

    try:
        write_set(directory)
    except CertsError as error:
        raise CommandError(f"allspark up: --secure: {error}") from error


def _serve(fleet: Fleet, settings: UpSettings, models: Sequence[LocalModel]) -> int:
    try:
        with activity("starting the fleet"):
            fleet.start()
        options = ModelOptions(
            max_length=settings.max_length,
            max_batch=settings.max_batch,
            cache_mode=CACHE_MODES[settings.cache_mode],
        )
        load_models(fleet, models, options)
        _show_status(fleet, models)
        fleet.wait()
    except KeyboardInterrupt:
        return 0
    if problem := fleet.problem():
        raise CommandError(problem)
    return 0  # a client shut the service down


def _stop(fleet: Fleet) -> None:
    """Drain; a second Ctrl-C cuts it short."""
    try:
        with activity("draining; Ctrl-C again to stop at once"):
            fleet.stop()
    except KeyboardInterrupt:
        fleet.stop(drain=False)


def _fleet_options(settings: UpSettings, models: Sequence[LocalModel], config: Path | None) -> FleetOptions:
    common = common_args(settings, config)
    gateway = [f"--allow-shutdown={address}" for address in settings.allow_shutdown]
    gateway += ["--allow-remote"] if settings.allow_remote else []
    try:
        return FleetOptions(
            workers=settings.workers,
            gateways=settings.gateways,
            brokers=settings.brokers,
            grpc=settings.grpc,
            device=settings.device,
            data_dir=settings.data_dir or default_data_dir(),
            redis=settings.redis,
            redis_fsync=settings.redis_fsync,
            secure=settings.secure.expanduser() if settings.secure else None,
            model_roots=_roots(settings, models),
            drain_s=settings.drain_s,
            start_timeout_s=settings.start_timeout_s,
            gateway_args=(*common, *gateway),
            broker_args=common,
            worker_args=(*common, *worker_args(settings), *(["--profile"] if settings.profile else [])),
        )
    except ValueError as error:
        raise ConfigError(f"allspark up: {error}") from error


def _roots(settings: UpSettings, models: Sequence[LocalModel]) -> tuple[Path, ...]:
    given = [root.expanduser().resolve() for root in settings.model_root]
    return tuple(dict.fromkeys([*given, *(model.root for model in models)]))


def default_data_dir() -> Path:
    """``$XDG_STATE_HOME/allspark``, by default ``~/.local/state/allspark``."""
    base = os.environ.get("XDG_STATE_HOME", "")
    return (Path(base) if base else Path.home() / ".local" / "state") / "allspark"


def _show_status(fleet: Fleet, models: Sequence[LocalModel]) -> None:
    names = ", ".join(model.name for model in models) or "none yet"
    lines = {
        "models": names,
        "gRPC": "  ".join(fleet.addresses),
        "ZeroMQ": "  ".join(fleet.frontends),
        "store": redis_url.shown(fleet.redis_url),
        "workers": "  ".join(f"{worker.name} (pid {worker.pid})" for worker in fleet.workers),
    }
    out.print("\n[bold]AllSpark fleet is up.[/bold] Ctrl-C drains and stops it.")
    for label, text in lines.items():
        out.print(f"  {label:<8} {text}", markup=False, soft_wrap=True)
    if models:
        out.print("\nTry:", style="bold")
        out.print(f"  {example_command(fleet, models[0])}\n", markup=False, soft_wrap=True)
    err.file.flush()


def example_command(fleet: Fleet, model: LocalModel) -> str:
    """A command line that asks a model something."""
    words = ["allspark", "generate", "--chat", "What is the capital of France?"]
    words.append(f"--grpc={fleet.addresses[0]}")
    words += fleet.secured.client_flags() if fleet.secured else []
    words.append(f"--model={model.name}")
    if model.name != demo_model.NAME:
        words.append(f"--tokenizer={model.path}")
    return shlex.join(words)
