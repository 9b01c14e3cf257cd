"""Line charts on logarithmic axes as SVG text: no library, readable in a browser and beside a document."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 520, 360
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 34, 46
COLOURS = ("#1b6ca8", "#c2572b", "#2f8f5b", "#8a4fa3", "#b8952a", "#5b6770", "#c0392b", "#16a3a3")
STYLE = "text{font:12px sans-serif;fill:#222} .axis{stroke:#222} .grid{stroke:#ddd} path{fill:none;stroke-width:1.8}"


@dataclass(frozen=True, slots=True)
class Series:
    """One line: points (x, y), both above 0, by rising x. Dashed without marks when it was not measured."""

    label: str
    points: Sequence[tuple[float, float]]
    colour: int = 0
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """A panel with logarithmic axes."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]


def ticks(low: float, high: float, base: float) -> list[float]:
    """Powers of `base` from just below `low` to just above `high`."""
    first, last = math.floor(math.log(low, base) + 1e-9), math.ceil(math.log(high, base) - 1e-9)
    return [base**n for n in range(first, max(last, first + 1) + 1)]


def number(value: float) -> str:
    """12345 -> 12k, 0.25 -> 0.25."""
    if value >= 1024 and value % 1024 == 0:
        return f"{value / 1024:g}k"
    return f"{value / 1000:g}k" if value >= 10000 else f"{value:.4g}"


def page(charts: Sequence[Chart]) -> str:
    """The panels side by side. Raises ValueError when nothing is to be drawn, or a value is not above 0."""
    charts = [c for c in charts if any(s.points for s in c.series)]
    if not charts:
        raise ValueError("no series has a point: there is nothing to draw")
    body = "".join(f'<g transform="translate({i * WIDTH},0)">{_chart(c)}</g>' for i, c in enumerate(charts))
    width = WIDTH * len(charts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{HEIGHT}" viewBox="0 0 {width} {HEIGHT}">'
        f'<style>{STYLE}</style><rect width="100%" height="100%" fill="white"/>{body}</svg>\n'
    )


def _chart(chart: Chart) -> str:
    points = [p for s in chart.series for p in s.points]
    if any(value <= 0 or not math.isfinite(value) for p in points for value in p):
        raise ValueError(f"{chart.title}: logarithmic axes need finite values above 0")
    xs, ys = zip(*points, strict=True)
    x_ticks, y_ticks = ticks(min(xs), max(xs), 2.0), ticks(min(ys), max(ys), 10.0 if max(ys) > 256 * min(ys) else 2.0)

    def x_at(x: float) -> float:
        low, high = math.log(x_ticks[0]), math.log(x_ticks[-1])
        return LEFT + (WIDTH - LEFT - RIGHT) * (math.log(x) - low) / (high - low)

    def y_at(y: float) -> float:
        low, high = math.log(y_ticks[0]), math.log(y_ticks[-1])
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (math.log(y) - low) / (high - low)

    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    out = [f'<text x="{WIDTH / 2}" y="18" text-anchor="middle" font-weight="bold">{escape(chart.title)}</text>']
    for x in x_ticks:
        at = f"{x_at(x):.1f}"
        out.append(f'<line class="grid" x1="{at}" x2="{at}" y1="{TOP}" y2="{bottom}"/>')
        out.append(f'<text x="{at}" y="{bottom + 16}" text-anchor="middle">{number(x)}</text>')
    for y in y_ticks:
        at = f"{y_at(y):.1f}"
        out.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{at}" y2="{at}"/>')
        out.append(f'<text x="{LEFT - 6}" y="{float(at) + 4:.1f}" text-anchor="end">{number(y)}</text>')
    out.append(f'<path class="axis" d="M{LEFT},{TOP}V{bottom}H{right}"/>')
    out.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 10}" text-anchor="middle">{escape(chart.x_label)}</text>')
    middle = HEIGHT / 2
    out.append(
        f'<text x="14" y="{middle}" text-anchor="middle" transform="rotate(-90 14 {middle})">'
        f"{escape(chart.y_label)}</text>"
    )
    for place, series in enumerate(s for s in chart.series if s.points):
        colour = COLOURS[series.colour % len(COLOURS)]
        path = "M" + "L".join(f"{x_at(x):.1f},{y_at(y):.1f}" for x, y in series.points)
        dash = ' stroke-dasharray="4 3"' if series.dashed else ""
        out.append(f'<path d="{path}" stroke="{colour}"{dash}/>')
        marks = () if series.dashed else series.points
        out += [f'<circle cx="{x_at(x):.1f}" cy="{y_at(y):.1f}" r="2.6" fill="{colour}"/>' for x, y in marks]
        at = TOP + 12 + 15 * place
        out.append(f'<line x1="{LEFT + 8}" x2="{LEFT + 28}" y1="{at}" y2="{at}" stroke="{colour}"{dash}/>')
        out.append(f'<text x="{LEFT + 33}" y="{at + 4}">{escape(series.label)}</text>')
    return "".join(out)
