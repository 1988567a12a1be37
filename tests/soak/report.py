"""What a soak says: a table of what was held and whether it grew, and a plot of it over time."""

from collections.abc import Sequence
from pathlib import Path

from tests.soak.run import Outcome

DAY_REQUESTS = 86_400  # one a second
PLOTTED = ("resident bytes", "descriptors", "objects", "keys")
WIDTH, HEIGHT, LEFT, TOP = 300, 130, 60, 26


def markdown(outcome: Outcome) -> str:
    """The report as text; `soak.svg` lies next to it."""
    options, rate = outcome.options, outcome.num_requests / max(outcome.seconds, 1e-9)
    lines = [
        "# Soak",
        "",
        f"{outcome.num_requests} requests in {outcome.seconds:.0f} s ({rate:.0f}/s) after "
        f"{options.warm_up_s:g} s of warm-up, engine {options.engine}, seed {options.seed}: as many as one "
        f"a second brings in {24 * outcome.num_requests / DAY_REQUESTS:.1f} hours.",
        "",
        "What was done: " + ", ".join(f"{n} {what.strip('_')}" for what, n in outcome.counts.most_common()),
        "",
        f"**{len(outcome.complaints)} complaints.**",
        *(f"- {c}" for c in outcome.complaints),
        "",
        "Growth over the second half (Theil-Sen slope times its duration):",
        "",
        "| process | quantity | median | growth | bound |",
        "| --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {t.process} | {t.quantity} | {t.median:.0f} | {t.growth:.1f} | {t.bound:.0f} |"
        for t in outcome.trends
    ]
    return "\n".join([*lines, "", "![Levels over time](soak.svg)", ""])


def svg(outcome: Outcome) -> str:
    """A row for each process, a column for each quantity; every panel begins at 0."""
    series = outcome.samples.series
    width, height = (WIDTH + LEFT) * len(PLOTTED), (HEIGHT + TOP) * max(1, len(series)) + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for row, (process, known) in enumerate(series.items()):
        for column, quantity in enumerate(PLOTTED):
            if quantity in known:
                where = (column * (WIDTH + LEFT) + LEFT - 10, row * (HEIGHT + TOP) + TOP)
                parts += _panel(where, f"{process}: {quantity}", known[quantity])
    return "\n".join([*parts, "</svg>", ""])


def _panel(where: tuple[int, int], title: str, points: Sequence[tuple[float, float]]) -> list[str]:
    x, y = where
    longest, highest = max(at for at, _ in points) or 1.0, max(value for _, value in points) or 1.0
    line = " ".join(
        f"{x + at / longest * WIDTH:.1f},{y + HEIGHT * (1 - value / highest):.1f}" for at, value in points
    )
    return [
        f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#ccc"/>',
        f'<text x="{x}" y="{y - 5}">{title}, up to {highest:.4g}, {longest:.0f} s</text>',
        f'<polyline points="{line}" fill="none" stroke="#1f77b4" stroke-width="1.5"/>',
    ]


def write(outcome: Outcome, directory: Path) -> None:
    """`report.md` and `soak.svg`."""
    (directory / "report.md").write_text(markdown(outcome))
    (directory / "soak.svg").write_text(svg(outcome))
