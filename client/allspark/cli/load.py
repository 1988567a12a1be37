"""``allspark load``: build and start models on a fleet that runs already."""

from collections.abc import Sequence

from allspark.cli.access import access_of
from allspark.cli.console import activity, out
from allspark.cli.errors import CommandError
from allspark.cli.settings import LoadSettings
from allspark.client import CACHE_MODES, AllSparkError, Client, ModelOptions


def run(argv: Sequence[str]) -> int:
    """Load them one after the other; 0 when all serve."""
    settings = LoadSettings.load(argv)
    options = ModelOptions(
        compute_unit=settings.compute_unit,
        max_length=settings.max_length,
        max_batch=settings.max_batch,
        cache_mode=CACHE_MODES[settings.cache_mode],
        lora_names=settings.lora_names,
    )
    access = access_of(settings, settings.grpc)
    with Client(settings.grpc, model_timeout_s=settings.timeout_s, access=access) as client:
        for text in settings.model:
            path, _, name = text.partition("=")
            try:
                with activity(f"loading {name or path}"):
                    client.build_model(name or path, path, options, is_operator=True)
                    client.start_model(name or path)
            except AllSparkError as error:
                raise CommandError(f"allspark load: {text}: {error}") from error
            out.print(f"{name or path} is running", markup=False)
    return 0
