"""What a chaos run says: how long clients waited after each kind of fault, in words and as a plot."""

import bisect
import math
from pathlib import Path

from tests.chaos import recovery
from tests.chaos.run import Outcome
from tests.chaos.schedule import CUT_SETTLE_S, SETTLE_S

WIDTH, LEFT, ROW = 860, 150, 34
LOW_S, HIGH_S = 0.01, 60.0
NEAR_S = 8.0  # a fault so long before a wait may have part in it


def recoveries(outcome: Outcome) -> dict[str, list[float]]:
    """Per fault kind, for each fault the longest wait of a client that it explains, in seconds.

    A wait between two arrivals at one client belongs to the first fault within it or, without one, to the
    last fault before it; what passed before that fault does not count.
    """
    hits = sorted(outcome.hits, key=lambda hit: hit[1])
    times = [at for _, at in hits]
    longest = [0.0] * len(hits)
    for story in outcome.stories:
        for before, after in zip(story.events, story.events[1:], strict=False):
            within = bisect.bisect_left(times, before)
            index = within if within < len(times) and times[within] < after else within - 1
            if index >= 0:
                longest[index] = max(longest[index], after - max(before, times[index]))
    found: dict[str, list[float]] = {}
    for (fault, _), wait in zip(hits, longest, strict=True):
        found.setdefault(fault.name, []).append(wait)
    return {name: sorted(found[name]) for name in sorted(found)}


def longest_waits(outcome: Outcome, count: int = 8) -> list[str]:
    """The longest waits of clients but for the time that faults lasted, each with the faults near it."""
    waits = sorted(
        (
            (
                after - before - recovery.covered(outcome.periods, before, after),
                before,
                after,
                f"{story.index} for " + (f"token {length}" if place else "its acceptance"),
            )
            for story in outcome.stories
            for place, (before, after, length) in enumerate(
                zip(story.events, story.events[1:], story.lengths, strict=False)
            )
        ),
        reverse=True,
    )
    lines = []
    for rest_s, before, after, what in waits[:count]:
        near = [
            f"{at - before:+.1f} s {fault.details}"
            for fault, at in sorted(outcome.hits, key=lambda hit: hit[1])
            if before - NEAR_S < at < after
        ]
        lines.append(
            f"- {after - before:.2f} s of request {what}, {rest_s:.2f} s of it while no fault lasted: "
            + (", ".join(near) or "no fault")
        )
    return lines


def is_slow(outcome: Outcome) -> bool:
    """Whether requests went on too late after a kill of their worker that no other fault overlapped."""
    alone = sorted(r.seconds for r in recovery.recoveries(outcome.samples, outcome.periods) if r.is_alone)
    return bool(alone) and percentile(alone, 0.99) >= recovery.LIMIT_S


def recovery_table(outcome: Outcome) -> list[str]:
    """What `recovery` measures, in words."""
    found = recovery.recoveries(outcome.samples, outcome.periods)
    rows = {
        "alone": [r.seconds for r in found if r.is_alone],
        "with other faults": [r.seconds for r in found if not r.is_alone],
        "with other faults, less the time they lasted": [r.excess_s for r in found if not r.is_alone],
    }
    lines = [
        "From SIGKILL of a worker to the next token of each request that ran on it (s). Alone: no other "
        f"fault was in progress, had ended less than {SETTLE_S:g} s before (a cut: {CUT_SETTLE_S:g} s), or "
        f"came within {recovery.LIMIT_S:g} s, and the client had got something in the last "
        f"{recovery.STALLED_S:g} s. The 99th percentile of these shall be below {recovery.LIMIT_S:g} s"
        f"{', and is not' if is_slow(outcome) else ''}:",
        "",
        "| recovery after a worker kill | requests | median | p90 | p99 | longest |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    return lines + [_row(name, sorted(seconds)) for name, seconds in rows.items() if seconds]


def _row(name: str, ordered: list[float]) -> str:
    cells = [percentile(ordered, share) for share in (0.5, 0.9, 0.99, 1.0)]
    return f"| {name} | {len(ordered)} | " + " | ".join(f"{c:.2f}" for c in cells) + " |"


def percentile(ordered: list[float], share: float) -> float:
    """The nearest-rank percentile of sorted values."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def markdown(outcome: Outcome) -> str:
    """The report as text; `recovery.svg` lies next to it."""
    waits = recoveries(outcome)
    lines = [
        "# Chaos run",
        "",
        f"Repeat it: `{outcome.options.replay}`",
        "",
        f"{len(outcome.hits)} of {outcome.options.faults} faults and {len(outcome.stories)} requests in "
        f"{outcome.seconds:.0f} s; {outcome.denied} denials, which clients repeated. Ends: "
        + ", ".join(f"{n} {reason}" for reason, n in outcome.reasons().most_common())
        + f". Quarantined (poison) though a worker of theirs had not been killed: {outcome.num_wronged()}.",
        "",
        f"**{len(outcome.complaints)} broken promises.**",
        *(f"- {c}" for c in outcome.complaints),
        "",
        *recovery_table(outcome),
        "",
        "Longest wait of any client after a fault (s); faults overlap, so a wait may have several causes:",
        "",
        "| fault | count | median | p90 | p99 | longest |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    lines += [_row(name, ordered) for name, ordered in waits.items()]
    lines += [
        "",
        "The longest waits without the time that faults lasted, and the faults in them or shortly before:",
        "",
        *longest_waits(outcome),
    ]
    return "\n".join([*lines, "", "![Longest wait after each fault](recovery.svg)", ""])


def svg(waits: dict[str, list[float]]) -> str:
    """A row for each kind of fault, a dot for each fault, a bar at the median; the axis is logarithmic."""
    height = ROW * len(waits) + 60
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
    ]
    for tick in (0.01, 0.1, 1.0, 10.0, 60.0):
        x = _x(tick)
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="10" y2="{height - 40}" stroke="#ddd"/>')
        parts.append(f'<text x="{x:.1f}" y="{height - 22}" text-anchor="middle">{tick:g}</text>')
    parts.append(
        f'<text x="{(WIDTH + LEFT) / 2}" y="{height - 5}" text-anchor="middle">'
        "longest wait of a client (s)</text>"
    )
    for row, (name, ordered) in enumerate(waits.items()):
        y = 10 + ROW * (row + 0.5)
        parts.append(f'<text x="{LEFT - 12}" y="{y + 4:.1f}" text-anchor="end">{name}</text>')
        for i, wait in enumerate(ordered):
            jitter = (i * 7 % 11 - 5) * 1.6  # so that equal waits do not hide each other
            parts.append(
                f'<circle cx="{_x(wait):.1f}" cy="{y + jitter:.1f}" r="2.5" '
                'fill="#1f77b4" fill-opacity="0.5"/>'
            )
        x = _x(percentile(ordered, 0.5))
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y - 12:.1f}" y2="{y + 12:.1f}" '
            'stroke="#d62728" stroke-width="2"/>'
        )
    return "\n".join([*parts, "</svg>", ""])


def _x(seconds: float) -> float:
    clipped = min(HIGH_S, max(LOW_S, seconds))
    return LEFT + (WIDTH - LEFT - 30) * math.log(clipped / LOW_S) / math.log(HIGH_S / LOW_S)


def write(outcome: Outcome, directory: Path) -> None:
    """`report.md` and `recovery.svg`."""
    (directory / "report.md").write_text(markdown(outcome))
    (directory / "recovery.svg").write_text(svg(recoveries(outcome)))
