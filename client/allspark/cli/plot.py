"""One line through measured points as an SVG file, so that a benchmark can be looked at without a library."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 640, 400
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 40, 55
_STYLE = "font-family='sans-serif' font-size='13' fill='#222'"


class Point(NamedTuple):
    """A median and the range it comes from."""

    x: float
    y: float
    low: float
    high: float


def ticks(high: float) -> list[float]:
    """Round numbers from 0 to at least `high`, at most eight of them."""
    step = 10.0 ** math.floor(math.log10(high))
    step *= next(factor for factor in (0.2, 0.5, 1.0, 2.0) if high / (step * factor) <= 7)
    return [step * index for index in range(math.ceil(high / step) + 1)]


def line_plot(points: Sequence[Point], title: str, x_label: str, y_label: str) -> str:
    """An SVG document; both axes begin at 0. Raises ValueError without a point above 0."""
    if not points or max(point.high for point in points) <= 0:
        raise ValueError("there is nothing to draw")
    x_ticks = ticks(max(1.0, *(point.x for point in points)))
    y_ticks = ticks(max(point.high for point in points))
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM

    def place(x: float, y: float) -> tuple[str, str]:
        return (
            f"{LEFT + (right - LEFT) * x / x_ticks[-1]:.1f}",
            f"{bottom - (bottom - TOP) * y / y_ticks[-1]:.1f}",
        )

    def shapes() -> Iterator[str]:
        yield f"<rect width='{WIDTH}' height='{HEIGHT}' fill='white'/>"
        for tick in y_ticks:
            _, y = place(0, tick)
            yield f"<line x1='{LEFT}' y1='{y}' x2='{right}' y2='{y}' stroke='#ddd'/>"
            yield f"<text x='{LEFT - 8}' y='{y}' dy='4' text-anchor='end' {_STYLE}>{tick:g}</text>"
        for tick in x_ticks:
            x, _ = place(tick, 0)
            yield f"<line x1='{x}' y1='{bottom}' x2='{x}' y2='{bottom + 5}' stroke='#222'/>"
            yield f"<text x='{x}' y='{bottom + 20}' text-anchor='middle' {_STYLE}>{tick:g}</text>"
        yield f"<line x1='{LEFT}' y1='{bottom}' x2='{right}' y2='{bottom}' stroke='#222'/>"
        path = " ".join(",".join(place(point.x, point.y)) for point in points)
        yield f"<polyline points='{path}' fill='none' stroke='#1f6fb4' stroke-width='2'/>"
        for point in points:
            x, low = place(point.x, point.low)
            _, high = place(point.x, point.high)
            _, y = place(point.x, point.y)
            yield f"<line x1='{x}' y1='{low}' x2='{x}' y2='{high}' stroke='#1f6fb4'/>"
            yield f"<circle cx='{x}' cy='{y}' r='4' fill='#1f6fb4'/>"
            yield f"<text x='{x}' y='{high}' dx='8' dy='-6' {_STYLE}>{point.y:.1f}</text>"
        middle, centre = (TOP + bottom) / 2, (LEFT + right) / 2
        yield f"<text x='{LEFT}' y='22' font-weight='bold' {_STYLE}>{escape(title)}</text>"
        yield (f"<text x='{centre}' y='{HEIGHT - 12}' text-anchor='middle' {_STYLE}>{escape(x_label)}</text>")
        yield (
            f"<text x='18' y='{middle}' text-anchor='middle' transform='rotate(-90 18 {middle})' {_STYLE}>"
            f"{escape(y_label)}</text>"
        )

    head = f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {HEIGHT}'>"
    return "\n".join([head, *shapes(), "</svg>"]) + "\n"
