"""``allspark bench``: how fast the engine is, and how much of that arrives through a fleet."""

import asyncio
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from allspark_bus.settings import ConfigError, config_file
from rich.table import Table

from allspark.cli.console import activity, out, progress
from allspark.cli.errors import CommandError
from allspark.cli.fleets import load_models, show_line, small_fleet
from allspark.cli.models import LocalModel, resolve
from allspark.cli.process import choose_kernels
from allspark.cli.settings import BenchSettings
from allspark.client import CACHE_MODES, AllSparkError, ModelOptions
from allspark.launcher import Fleet, LaunchError

if TYPE_CHECKING:
    from allspark.cli.bench_measure import Result


class Row(NamedTuple):
    """Medians over the repetitions at one batch size; ratios are medians over the pairs."""

    model: str
    batch: int
    engine_decode_tokens_per_s: float
    fleet_decode_tokens_per_s: float
    decode_ratio: float
    engine_total_tokens_per_s: float
    fleet_total_tokens_per_s: float
    total_ratio: float
    engine_ttft_ms: float
    fleet_ttft_ms: float


def run(argv: Sequence[str]) -> int:
    """Measure engine and fleet in turns and print the medians."""
    settings = BenchSettings.load(argv)
    if settings.benchmark == "prefix":
        from allspark.cli import bench_prefix

        return bench_prefix.run(settings, config_file(BenchSettings, argv))
    if settings.benchmark == "overload":
        from allspark.cli import bench_overload

        return bench_overload.run(settings, config_file(BenchSettings, argv))
    batches = _batches(settings)
    from allspark_workers.engine.threads import set_environment

    choose_kernels(settings.kernels)
    set_environment(settings.num_threads)  # before anything imports torch
    model = resolve(settings.model)
    options = small_fleet(settings, config_file(BenchSettings, argv), model)
    try:
        with Fleet(options, show_line) as fleet:
            built_as = ModelOptions(
                max_batch=max(batches),
                cache_mode=CACHE_MODES[settings.cache_mode],
                # The prompts of one repetition come again in others: cached, they would cost no prefill.
                enable_prefix_cache=False,
            )
            load_models(fleet, [model], built_as)
            rows = _measure(settings, model, fleet, batches)
    except (LaunchError, AllSparkError) as error:
        raise CommandError(f"allspark bench: {error}") from error
    _show(rows, settings)
    return 0


def _batches(settings: BenchSettings) -> list[int]:
    try:
        batches = [int(text) for text in settings.batch]
    except ValueError as error:
        raise ConfigError(f"allspark bench: --batch: {error}") from error
    if not batches or min(batches) < 1:
        raise ConfigError("allspark bench: --batch must be at least 1")
    return batches


def _measure(settings: BenchSettings, model: LocalModel, fleet: Fleet, batches: Sequence[int]) -> list[Row]:
    from allspark_workers.engine.types import ModelConfig
    from allspark_workers.load import load_engine

    from allspark.cli.bench_measure import measure_engine, measure_fleet, random_prompts

    config = ModelConfig(
        model_path=str(model.path),
        device=f"{settings.device}:0" if settings.device == "cuda" else settings.device,
        dtype=settings.dtype,
        max_batch=max(batches),
        cache_mode=CACHE_MODES[settings.cache_mode],
        kv_bytes=int(settings.kv_memory or 0),
        num_threads=settings.num_threads,
    )
    with activity("loading the model into this process"):
        engine = load_engine(config, lambda fraction, text: None)
        engine.start()
    rows = []
    with progress() as bars:
        task = bars.add_task("measuring", total=len(batches) * (settings.repeat + 1))
        for batch in batches:
            pairs = []
            for index in range(settings.repeat + 1):
                vocabulary, seed = engine.facts.vocab_size, settings.seed + index
                prompts = random_prompts(batch, settings.prompt_tokens, vocabulary, seed)
                alone = measure_engine(engine, prompts, settings.new_tokens)
                calls = measure_fleet(fleet.addresses, model.name, prompts, settings.new_tokens)
                pairs.append((alone, asyncio.run(calls)))
                bars.advance(task)
            rows.append(_row(model.name, batch, pairs[1:]))  # the first pair only warms both up
    return rows


def _row(model: str, batch: int, pairs: Sequence[tuple["Result", "Result"]]) -> Row:
    def median(figure: Callable[["Result", "Result"], float]) -> float:
        return statistics.median(figure(engine, fleet) for engine, fleet in pairs)

    return Row(
        model=model,
        batch=batch,
        engine_decode_tokens_per_s=median(lambda engine, fleet: engine.decode),
        fleet_decode_tokens_per_s=median(lambda engine, fleet: fleet.decode),
        decode_ratio=median(lambda engine, fleet: fleet.decode / engine.decode),
        engine_total_tokens_per_s=median(lambda engine, fleet: engine.total),
        fleet_total_tokens_per_s=median(lambda engine, fleet: fleet.total),
        total_ratio=median(lambda engine, fleet: fleet.total / engine.total),
        engine_ttft_ms=median(lambda engine, fleet: engine.ttft_ms),
        fleet_ttft_ms=median(lambda engine, fleet: fleet.ttft_ms),
    )


def _show(rows: Sequence[Row], settings: BenchSettings) -> None:
    if settings.as_json:
        sys.stdout.writelines(json.dumps(row._asdict()) + "\n" for row in rows)
        return
    title = f"{rows[0].model}: {settings.prompt_tokens} prompt tokens, {settings.new_tokens} new, greedy"
    table = Table(title=f"{title}, median of {settings.repeat}", title_justify="left", box=None)
    for column in ("batch", "figure", "engine", "fleet", "fleet/engine"):
        table.add_column(column, justify="left" if column == "figure" else "right")
    for r in rows:
        figures = [
            ("decode tokens/s", r.engine_decode_tokens_per_s, r.fleet_decode_tokens_per_s, r.decode_ratio),
            ("with prefill", r.engine_total_tokens_per_s, r.fleet_total_tokens_per_s, r.total_ratio),
            ("first token, ms", r.engine_ttft_ms, r.fleet_ttft_ms, r.fleet_ttft_ms / r.engine_ttft_ms),
        ]
        for name, engine, fleet, ratio in figures:
            table.add_row(str(r.batch), name, f"{engine:.1f}", f"{fleet:.1f}", f"{ratio:.3f}")
    out.print(table)
