"""``allspark bench overload``: a multiple of what the fleet can serve, and what becomes of it.

Four phases: a burst measures the sustainable rate; half of it gives the normal latency; the multiple is the
overload; half of it again shows when latency is back to normal. Requests carry a deadline.
"""

import json
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.table import Table

from allspark.cli.console import activity, out
from allspark.cli.errors import CommandError
from allspark.cli.fleets import load_models, show_line, small_fleet
from allspark.cli.memory_watch import Memory, MemoryWatch
from allspark.cli.models import resolve
from allspark.cli.open_loop import Plan, Sample, run_load
from allspark.cli.settings import BenchSettings
from allspark.client import CACHE_MODES, AllSparkError, ModelOptions
from allspark.launcher import Fleet, LaunchError

MAX_BATCH = 16
BURST_S = 0.1
CALM = 0.5
"""Part of the sustainable rate at which latency is called normal."""
CALM_S = 5.0
#: Latency is back to normal in a second of which the median is at most this multiple of the normal one.
NORMAL = 1.5
#: Load processes that were later than this measured themselves.
MAX_LAG_MS = 50.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Overload:
    """What to do to a fleet: ``times`` the rate at which it serves a ``burst``, for ``seconds``.

    ``calm_s``: how long the normal latency is measured, and watched for after the overload's deadlines.
    """

    model: str
    times: float
    seconds: float
    deadline_s: float
    prompt_tokens: int
    new_tokens: int
    seed: int
    processes: int
    burst: int = 8 * MAX_BATCH
    calm_s: float = CALM_S


class Row(NamedTuple):
    """The result. Rates are per second; latencies of answers are milliseconds from when a request was due.

    ``unanswered``: the call failed. ``no_hint``: denied without saying when to come back. ``lost``: accepted,
    and neither finished nor ended by its deadline. ``recovery_s`` counts from the end of the overload; -1:
    not within the time that was watched.
    """

    model: str
    sustainable_per_s: float
    offered_per_s: float
    offered: int
    accepted: int
    denied: int
    unanswered: int
    no_hint: int
    normal_ms_p50: float
    normal_ms_p99: float
    accepted_ms_p50: float
    accepted_ms_p99: float
    denied_ms_p50: float
    denied_ms_p99: float
    hint_ms_p50: float
    deadline_misses: int
    lost: int
    recovery_s: float
    client_lag_ms_p99: float
    memory_mib: dict[str, Memory]


def run(settings: BenchSettings, config: Path | None) -> int:
    """Start a fleet of one worker, overload it, print what happened."""
    model = resolve(settings.model)
    overload = Overload(
        model=model.name,
        times=settings.times,
        seconds=settings.seconds,
        deadline_s=settings.deadline_s,
        prompt_tokens=settings.prompt_tokens,
        new_tokens=settings.new_tokens,
        seed=settings.seed,
        processes=max(1, min(2, (os.cpu_count() or 1) // 2)),
    )
    built_as = ModelOptions(
        max_batch=MAX_BATCH, cache_mode=CACHE_MODES[settings.cache_mode], enable_prefix_cache=False
    )
    try:
        with Fleet(small_fleet(settings, config, model), show_line) as fleet:
            load_models(fleet, [model], built_as)
            with activity("overloading the fleet"):
                row = measure(fleet, overload)
    except (LaunchError, AllSparkError) as error:
        raise CommandError(f"allspark bench overload: {error}") from error
    _show(row, settings)
    return 0


def measure(fleet: Fleet, overload: Overload) -> Row:
    """Runs the four phases against a fleet whose model is running."""
    o = overload
    with MemoryWatch(fleet) as watch:
        rate = sustainable(_load(fleet, o, (o.burst / BURST_S, BURST_S), deadline_s=0))
        calm = CALM * rate
        normal = _load(fleet, o, (calm, o.calm_s))
        # One follows the other without a pause, as those who send the calm load would see it.
        flood = _load(fleet, o, (o.times * rate, o.seconds), (calm, o.deadline_s + o.calm_s))
    return row_of(o, rate, normal, flood, watch.memory)


def _load(
    fleet: Fleet, overload: Overload, *stages: tuple[float, float], deadline_s: float | None = None
) -> list[Sample]:
    limit_s = overload.deadline_s if deadline_s is None else deadline_s
    plan = Plan(
        addresses=tuple(fleet.addresses),
        model=overload.model,
        stages=stages,
        prompt_tokens=overload.prompt_tokens,
        new_tokens=overload.new_tokens,
        deadline_ms=int(1000 * limit_s),
        seed=overload.seed,
    )
    return run_load(plan, overload.processes)


def sustainable(burst: Sequence[Sample]) -> float:
    """Requests a second that end while more than enough wait, without the first and last tenth of them."""
    ends_s = sorted(sample.due_s + sample.end_s for sample in burst if sample.tokens)
    skipped = len(ends_s) // 10
    kept = ends_s[skipped : len(ends_s) - skipped]
    if len(kept) < 2 or kept[-1] == kept[0]:
        problem = next((sample.reason for sample in burst if sample.reason), "too few requests ended")
        raise CommandError(f"allspark bench overload: the sustainable rate could not be measured: {problem}")
    return (len(kept) - 1) / (kept[-1] - kept[0])


def recovery_s(after: Sequence[Sample], normal_s: float) -> float:
    """Seconds until a second begins from which on latency is normal; -1: it was not by the end of ``after``.

    Latency is that of whole requests; one that was denied has none that could be normal.
    """
    if not after:
        return -1.0
    begin_s, recovered = after[0].due_s, -1.0
    seconds: dict[int, list[float]] = {}
    for sample in after:
        latency_s = sample.end_s if sample.tokens else float("inf")
        seconds.setdefault(int(sample.due_s - begin_s), []).append(latency_s)
    for second, latencies in sorted(seconds.items()):
        if statistics.median(latencies) > NORMAL * normal_s:
            recovered = -1.0
        elif recovered < 0:
            recovered = float(second)
    return recovered


def row_of(
    overload: Overload,
    rate: float,
    normal: Sequence[Sample],
    flood: Sequence[Sample],
    memory: dict[str, Memory],
) -> Row:
    """The figures; ``flood`` has the overload as stage 0 and the calm after it as stage 1."""
    under, after = ([sample for sample in flood if sample.stage == stage] for stage in (0, 1))
    accepted = [sample for sample in under if sample.is_accepted]
    denied = [sample for sample in under if sample.is_denied]
    ends_s = [sample.end_s for sample in normal if sample.is_accepted]
    missed = sum(sample.reason == "deadline" for sample in accepted)
    finished = sum(sample.reason == "length" and sample.tokens == overload.new_tokens for sample in accepted)
    return Row(
        model=overload.model,
        sustainable_per_s=rate,
        offered_per_s=len(under) / overload.seconds,
        offered=len(under),
        accepted=len(accepted),
        denied=len(denied),
        unanswered=len(under) - len(accepted) - len(denied),
        no_hint=sum(sample.hint_ms < 0 for sample in denied),
        normal_ms_p50=_ms([sample.answer_s for sample in normal], 50),
        normal_ms_p99=_ms([sample.answer_s for sample in normal], 99),
        accepted_ms_p50=_ms([sample.answer_s for sample in accepted], 50),
        accepted_ms_p99=_ms([sample.answer_s for sample in accepted], 99),
        denied_ms_p50=_ms([sample.answer_s for sample in denied], 50),
        denied_ms_p99=_ms([sample.answer_s for sample in denied], 99),
        hint_ms_p50=_ms([sample.hint_ms / 1000 for sample in denied], 50),
        deadline_misses=missed,
        lost=len(accepted) - missed - finished,
        recovery_s=recovery_s(after, statistics.median(ends_s)) if ends_s else -1.0,
        client_lag_ms_p99=_ms([sample.lag_s for sample in under], 99),
        memory_mib=memory,
    )


def _ms(seconds: Sequence[float], percent: float) -> float:
    """A percentile in milliseconds; 0 without values."""
    return float(np.percentile(seconds, percent)) * 1000 if seconds else 0.0


def _show(row: Row, settings: BenchSettings) -> None:
    if settings.as_json:
        memory = {name: figures._asdict() for name, figures in row.memory_mib.items()}
        sys.stdout.write(json.dumps(row._asdict() | {"memory_mib": memory}) + "\n")
        return
    title = f"{row.model}: {row.sustainable_per_s:.1f} requests/s sustainable, {settings.times:g} times that"
    table = Table(title=f"{title} for {settings.seconds:g} s", title_justify="left", box=None)
    table.add_column("figure")
    table.add_column("value", justify="right")
    for name, value in row._asdict().items():
        if name not in ("model", "memory_mib"):
            table.add_row(name, f"{value:.1f}" if isinstance(value, float) else str(value))
    for name, figures in row.memory_mib.items():
        table.add_row(f"{name}, MiB at start, peak, end", " ".join(f"{mib:.0f}" for mib in figures))
    out.print(table)
    if row.client_lag_ms_p99 > MAX_LAG_MS:
        out.print(
            "The load processes were late: this machine cannot send so much, the figures are of the client."
        )
