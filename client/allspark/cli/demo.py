"""``allspark demo``: the whole chain once, with a real model."""

import shlex
import signal
from collections.abc import Sequence

from allspark_bus.settings import config_file

from allspark import demo_model
from allspark.cli.console import activity, err
from allspark.cli.errors import CommandError
from allspark.cli.fleets import load_models, show_line, small_fleet
from allspark.cli.generate import stream_answer
from allspark.cli.models import resolve
from allspark.cli.settings import DemoSettings
from allspark.client import AllSparkError, Client, GenerateOptions, ModelOptions
from allspark.launcher import Fleet, LaunchError
from allspark.text import TextError, encode_chat, load_tokenizer


def run(argv: Sequence[str]) -> int:
    """Fetch, start, ask, answer, stop; 0 if the answer finished."""
    settings = DemoSettings.load(argv)
    model = resolve(demo_model.NAME)
    options = small_fleet(settings, config_file(DemoSettings, argv), model)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    fleet = Fleet(options, show_line)
    try:
        with activity("starting a fleet: Valkey, broker, gateway, worker"):
            fleet.start()
        load_models(fleet, [model], ModelOptions())
        _ask(fleet, settings)
    except (LaunchError, AllSparkError, TextError) as error:
        raise CommandError(f"allspark demo: {error}") from error
    finally:
        with activity("shutting down"):
            fleet.stop()
    return 0


def _ask(fleet: Fleet, settings: DemoSettings) -> None:
    command = ["allspark", "generate", "--chat", settings.question, f"--grpc={fleet.addresses[0]}"]
    err.print(f"\n$ {shlex.join(command)}", style="bold", markup=False, soft_wrap=True)
    tokenizer = load_tokenizer(demo_model.fetch())
    prompt = encode_chat(tokenizer, [{"role": "user", "content": settings.question}])
    options = GenerateOptions(max_new_tokens=settings.max_new_tokens, eos_token_id=tokenizer.eos_ids[0])
    with Client(fleet.addresses) as client:
        stream_answer(client, demo_model.NAME, prompt, options, tokenizer, has_stats=True)
