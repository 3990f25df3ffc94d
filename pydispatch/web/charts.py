"""Charts as SVG, made here on the server: pure functions from numbers to markup.

A chart has a title, axes with labels, and its numbers in words for who does not see it. Series
differ in their dashes and in their names at the end of the line as well as in colour. Nothing in
it carries a style of its own, so that a strict Content-Security-Policy holds: colours come from
the style sheet by class.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone

from markupsafe import Markup, escape

from pydispatch.web.shown import number

__all__ = ["Chart", "Series", "bar", "draw", "nice_ceiling", "ticks_of"]

WIDTH, HEIGHT = 600, 204
LEFT, RIGHT, TOP, BOTTOM = 44, 16, 26, 24
EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


@dataclasses.dataclass(frozen=True)
class Series:
    """One line of a chart.

    Attributes:
        name: What it shows.
        values: A value for each time of the chart; None where nothing is known.
        area: Fill what is below the line.
        steps: Draw each value as a bar over its time, for what is counted in a time span.
    """

    name: str
    values: Sequence[float | None]
    area: bool = False
    steps: bool = False


@dataclasses.dataclass(frozen=True)
class Chart:
    """What is drawn over time.

    Attributes:
        id: Of the element; its parts' ids begin with it.
        title: What is seen, with the unit.
        unit: Of the values, for the labels: such as ``jobs``.
        times: Of the values, evenly spaced, in order.
        series: The lines.
        empty: What to say when there are no values.
    """

    id: str
    title: str
    unit: str
    times: Sequence[datetime]
    series: Sequence[Series]
    empty: str = "Nothing was recorded in this time."

    @property
    def has_values(self) -> bool:
        """Is there anything to draw?"""
        return any(value is not None for each in self.series for value in each.values)

    @property
    def summary(self) -> str:
        """The lines in words: the last value of each, its least and its most."""
        said = []
        for each in self.series:
            known = [value for value in each.values if value is not None]
            if known:
                said.append(
                    f"{each.name}: last {number(known[-1])}, "
                    f"from {number(min(known))} to {number(max(known))} {self.unit}"
                )
        return "; ".join(said) + "." if said else self.empty

    @property
    def table(self) -> list[tuple[datetime, list[float | None]]]:
        """The numbers, the newest first."""
        rows = [
            (moment, [each.values[place] for each in self.series])
            for place, moment in enumerate(self.times)
        ]
        return [row for row in reversed(rows) if any(value is not None for value in row[1])]


def nice_ceiling(value: float) -> float:
    """The least of 1, 2, 2.5, 4, 5, 10 times a power of ten that is not below a value.

    At least 4, so that the axis of small counts has whole numbers.
    """
    if not math.isfinite(value) or value <= 4:
        return 4.0
    power = 10.0 ** math.floor(math.log10(value))
    for step in (1, 2, 4, 5, 8, 10):
        if step * power >= value:
            return step * power
    return 10 * power


def ticks_of(first: datetime, last: datetime, most: int = 6) -> list[datetime]:
    """Round times between two moments, not more than ``most``."""
    span = (last - first).total_seconds()
    for step in (60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400):
        if span / step <= most:
            break
    else:
        step = math.ceil(span / most / 86400) * 86400
    begin = math.ceil(first.timestamp() / step) * step
    return [
        EPOCH + timedelta(seconds=moment)
        for moment in range(int(begin), math.floor(last.timestamp()) + 1, int(step))
    ]


def draw(chart: Chart) -> Markup:
    """The chart as an SVG element, or a sentence when there is nothing to draw."""
    if not chart.times or not chart.has_values:
        return Markup('<p class="empty">{}</p>').format(chart.empty)
    top, bottom = TOP, HEIGHT - BOTTOM
    ceiling = nice_ceiling(
        max(value for each in chart.series for value in each.values if value is not None)
    )
    first, last = chart.times[0], chart.times[-1]
    span = max((last - first).total_seconds(), 1.0)
    step = span / max(len(chart.times) - 1, 1)
    inner = WIDTH - LEFT - RIGHT

    def x(moment: datetime) -> float:
        return LEFT + inner * ((moment - first).total_seconds() + step / 2) / (span + step)

    def y(value: float) -> float:
        return bottom - (bottom - top) * min(max(value, 0.0), ceiling) / ceiling

    title, description = f"{chart.id}-title", f"{chart.id}-description"
    parts = [
        f'<svg class="chart" role="img" aria-labelledby="{escape(title)} {escape(description)}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" xmlns="http://www.w3.org/2000/svg">',
        f'<title id="{escape(title)}">{escape(chart.title)}</title>',
        f'<desc id="{escape(description)}">{escape(chart.summary)}</desc>',
    ]
    for part in range(5):
        level = ceiling * part / 4
        height_of = y(level)
        kind = "axis" if part == 0 else "grid"
        parts.append(
            f'<line class="{kind}" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{height_of:.1f}" '
            f'y2="{height_of:.1f}"/>'
            f'<text class="label" x="{LEFT - 6}" y="{height_of + 3.5:.1f}" text-anchor="end">'
            f"{_short(level)}</text>"
        )
    for moment in ticks_of(first, last):
        place = x(moment)
        parts.append(
            f'<line class="tick" x1="{place:.1f}" x2="{place:.1f}" y1="{bottom}" '
            f'y2="{bottom + 4}"/>'
            f'<text class="label" x="{place:.1f}" y="{bottom + 16}" text-anchor="middle">'
            f"{moment:%H:%M}</text>"
        )
    parts.append(f'<text class="label unit" x="0" y="12">{escape(chart.unit)}</text>')
    names = [each.name for each in chart.series]
    if len(names) > 1:
        places = [
            WIDTH - RIGHT - sum(map(_legend_width, names[place:])) for place in range(len(names))
        ]
        parts += map(_legend, names, range(1, len(names) + 1), places)
    for place, each in enumerate(chart.series, 1):
        points = [
            (x(moment), y(value)) if value is not None else None
            for moment, value in zip(chart.times, each.values, strict=True)
        ]
        if each.steps:
            parts.append(_bars(points, inner / len(chart.times), bottom, place))
        else:
            parts.append(_line(points, bottom, place, area=each.area))
    return Markup("".join([*parts, "</svg>"]))


def bar(used: float, of: float, label: str, *, limit: bool = True) -> Markup:
    """A bar that shows a part of a whole. Where that is a limit, reaching it is marked.

    The label says it in words.
    """
    share = min(used / of, 1.0) if of > 0 else (1.0 if used > 0 else 0.0)
    kind = "over" if used > of else "full" if used == of and of > 0 else "part"
    kind = kind if limit else "part"
    return Markup(
        '<svg class="bar" role="img" aria-label="{}" viewBox="0 0 100 8" '
        'preserveAspectRatio="none"><rect class="whole" width="100" height="8"/>'
        '<rect class="{}" width="{:.1f}" height="8"/></svg>'
    ).format(label, kind, 100 * share)


def span_of(now: datetime, span: timedelta, step: timedelta) -> list[datetime]:
    """The beginnings of the steps that lie within a time span up to now, on round times."""
    size = step.total_seconds()
    last = math.floor(now.timestamp() / size)
    count = round(span / step)
    return [EPOCH + timedelta(seconds=(last - place) * size) for place in range(count - 1, -1, -1)]


def _line(
    points: Sequence[tuple[float, float] | None], bottom: float, place: int, *, area: bool
) -> str:
    """A line through the points, broken where one is missing."""
    runs: list[list[tuple[float, float]]] = [[]]
    for point in points:
        if point is None:
            runs.append([])
        else:
            runs[-1].append(point)
    drawn = []
    for run in filter(None, runs):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in run)
        if area and len(run) > 1:
            around = f"{run[0][0]:.1f},{bottom} {path} {run[-1][0]:.1f},{bottom}"
            drawn.append(f'<polygon class="area s{place}" points="{around}"/>')
        if len(run) == 1:
            drawn.append(
                f'<circle class="dot s{place}" cx="{run[0][0]:.1f}" cy="{run[0][1]:.1f}" r="2"/>'
            )
        else:
            drawn.append(f'<polyline class="line s{place}" points="{path}"/>')
    return "".join(drawn)


def _bars(
    points: Sequence[tuple[float, float] | None], width: float, bottom: float, place: int
) -> str:
    gap = min(1.0, width / 5)
    return "".join(
        f'<rect class="column s{place}" x="{x - width / 2 + gap / 2:.1f}" y="{y:.1f}" '
        f'width="{width - gap:.1f}" height="{bottom - y:.1f}"/>'
        for x, y in filter(None, points)
    )


def _legend_width(name: str) -> float:
    """How much room a name takes, about: letters are about half as wide as high."""
    return 46 + 6 * len(name)


def _legend(name: str, place: int, left: float) -> str:
    return (
        f'<line class="line s{place}" x1="{left}" x2="{left + 22}" y1="8.5" y2="8.5"/>'
        f'<text class="label legend" x="{left + 28}" y="12">{escape(name)}</text>'
    )


def _short(value: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.4g}{letter}"
    return f"{value:.4g}"
