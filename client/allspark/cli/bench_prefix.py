"""``allspark bench prefix``: time to first token against the part of the prompt that is cached."""

import asyncio
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from allspark_bus.settings import ConfigError
from rich.table import Table

from allspark.cli.console import out, progress
from allspark.cli.errors import CommandError
from allspark.cli.fleets import load_models, show_line, small_fleet
from allspark.cli.models import LocalModel, resolve
from allspark.cli.plot import Point, line_plot
from allspark.cli.settings import BenchSettings
from allspark.client import AllSparkError, AsyncClient, GenerateOptions, ModelOptions
from allspark.launcher import Fleet, LaunchError

SPAN_TOKENS = 32
#: Ids of the random prompts: every vocabulary has as many.
IDS = (3, 128)


class Row(NamedTuple):
    """One hit rate: measured with the server's own counters; times are milliseconds over the repetitions."""

    model: str
    prompt_tokens: int
    cached_tokens: int
    hit_rate: float
    ttft_ms: float
    ttft_ms_low: float
    ttft_ms_high: float


def run(settings: BenchSettings, config: Path | None) -> int:
    """Start a fleet of one worker, measure every hit rate in turns, print the medians, draw them."""
    rates = _rates(settings)
    model = resolve(settings.model)
    options = small_fleet(settings, config, model)
    try:
        with Fleet(options, show_line) as fleet:
            load_models(fleet, [model], ModelOptions(max_batch=4, span_size=SPAN_TOKENS))
            rows = asyncio.run(_measure(settings, model, fleet.addresses, rates))
    except (LaunchError, AllSparkError) as error:
        raise CommandError(f"allspark bench prefix: {error}") from error
    _show(rows, settings)
    if settings.plot is not None:
        settings.plot.write_text(_plot(rows, settings), encoding="utf-8")
    return 0


def _rates(settings: BenchSettings) -> list[float]:
    try:
        rates = [float(text.removesuffix("%")) / 100 for text in settings.hit_rate]
    except ValueError as error:
        raise ConfigError(f"allspark bench: --hit-rate: {error}") from error
    if not rates or not all(0 <= rate < 1 for rate in rates):
        raise ConfigError("allspark bench: --hit-rate is a percentage from 0 to below 100")
    return rates


def cached_tokens(rate: float, prompt_tokens: int) -> int:
    """The whole spans nearest to that part of a prompt, its last token excepted: that is always computed."""
    most = (prompt_tokens - 1) // SPAN_TOKENS
    return SPAN_TOKENS * min(most, round(rate * prompt_tokens / SPAN_TOKENS))


async def _measure(
    settings: BenchSettings, model: LocalModel, addresses: Sequence[str], rates: Sequence[float]
) -> list[Row]:
    length = settings.prefix_tokens
    rng = np.random.default_rng(settings.seed)
    times: dict[int, list[float]] = {cached_tokens(rate, length): [] for rate in rates}
    hits: dict[int, list[float]] = {cached: [] for cached in times}
    async with AsyncClient(addresses) as client:
        with progress() as bars:
            task = bars.add_task("measuring", total=len(times) * (settings.repeat + 1))
            for repetition in range(settings.repeat + 1):
                for cached in times:
                    prompt = [int(token) for token in rng.integers(*IDS, length)]
                    if cached:
                        await _first_token_s(client, model.name, prompt[: cached + 1])
                    taken_s, hit_rate = await _timed(client, model.name, prompt)
                    if repetition:  # the first round only warms everything up
                        times[cached].append(1000 * taken_s)
                        hits[cached].append(hit_rate)
                    bars.advance(task)
    return [_row(model.name, length, cached, times[cached], hits[cached]) for cached in times]


async def _timed(client: AsyncClient, model: str, prompt: Sequence[int]) -> tuple[float, float]:
    """Seconds to the first token, and the hit rate of this request by the server's counters."""
    before = await client.stat(model)
    taken_s = await _first_token_s(client, model, prompt)
    after = await client.stat(model)
    hit = after.prefix_cache_hit_token - before.prefix_cache_hit_token
    missed = after.prefix_cache_miss_token - before.prefix_cache_miss_token
    if hit + missed != len(prompt):
        raise CommandError(f"the server counts {hit} + {missed} prompt tokens, {len(prompt)} were sent")
    return taken_s, hit / len(prompt)


async def _first_token_s(client: AsyncClient, model: str, prompt: Sequence[int]) -> float:
    started = time.monotonic()
    async with await client.submit(model, prompt, GenerateOptions(max_new_tokens=1)) as request:
        await request.result()
        return time.monotonic() - started


def _row(model: str, length: int, cached: int, times: Sequence[float], hits: Sequence[float]) -> Row:
    return Row(model, length, cached, statistics.mean(hits), statistics.median(times), min(times), max(times))


def _show(rows: Sequence[Row], settings: BenchSettings) -> None:
    if settings.as_json:
        sys.stdout.writelines(json.dumps(row._asdict()) + "\n" for row in rows)
        return
    prompt = f"{rows[0].prompt_tokens} prompt tokens"
    title = f"{rows[0].model}: {prompt}, through gRPC, median of {settings.repeat}"
    table = Table(title=title, title_justify="left", box=None)
    for column in ("hit rate", "cached tokens", "first token, ms", "lowest", "highest", "times as fast"):
        table.add_column(column, justify="right")
    for r in rows:
        times = [f"{ms:.1f}" for ms in (r.ttft_ms, r.ttft_ms_low, r.ttft_ms_high)]
        gain = f"{rows[0].ttft_ms / r.ttft_ms:.2f}"
        table.add_row(f"{r.hit_rate:.1%}", str(r.cached_tokens), *times, gain)
    out.print(table)


def _plot(rows: Sequence[Row], settings: BenchSettings) -> str:
    points = [Point(100 * r.hit_rate, r.ttft_ms, r.ttft_ms_low, r.ttft_ms_high) for r in rows]
    title = f"{rows[0].model}, {rows[0].prompt_tokens} prompt tokens, median and range of {settings.repeat}"
    return line_plot(points, title, "prefix cache hit rate, %", "time to first token, ms")
