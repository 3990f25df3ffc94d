"""Small line charts as SVG, one above the other on one time axis."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, LEFT, RIGHT = 960, 62, 20
HEAD, PANEL, GAP, FOOT = 76, 170, 46, 44

STYLES = {
    "strong": 'stroke="#0b5cad" stroke-width="2"',
    "light": 'stroke="#e9a04c" stroke-width="1.1"',
    "dashed": 'stroke="#555" stroke-width="1.4" stroke-dasharray="6 4"',
}


@dataclass(frozen=True)
class Band:
    """A named stretch of the time axis."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Line:
    """A curve: a value for each x, and one of the styles."""

    name: str
    values: Sequence[float]
    style: str


@dataclass(frozen=True)
class Panel:
    """One chart."""

    label: str
    lines: Sequence[Line]


def draw(
    *, title: str, x_label: str, xs: Sequence[float], bands: Sequence[Band], panels: Sequence[Panel]
) -> str:
    """Return the SVG of some charts that share their x axis."""
    height = HEAD + len(panels) * (PANEL + GAP) - GAP + FOOT
    last = bands[-1].end if bands else max(xs)
    width = WIDTH - LEFT - RIGHT

    def x(value: float) -> float:
        return LEFT + value / last * width

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'font-family="DejaVu Sans, Helvetica, Arial, sans-serif" font-size="12" fill="#222">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
        _text(LEFT, 24, title, size=16),
    ]
    bottom = height - FOOT
    for number, band in enumerate(bands):
        if number % 2 == 0:
            parts.append(
                f'<rect x="{x(band.start):.1f}" y="{HEAD - 26}" '
                f'width="{x(band.end) - x(band.start):.1f}" height="{bottom - HEAD + 26}" '
                'fill="#f1f4f8"/>'
            )
        middle = (x(band.start) + x(band.end)) / 2
        parts.append(_text(middle, HEAD - 32, band.name, anchor="middle"))
    for number, panel in enumerate(panels):
        parts += _panel(panel, HEAD + number * (PANEL + GAP), xs, x)
    step = _round_step(last / 10)
    for number in range(int(last / step) + 1):
        parts.append(_text(x(number * step), bottom + 18, f"{number * step:g}", anchor="middle"))
    parts.append(_text(LEFT + width / 2, bottom + 36, x_label, anchor="middle"))
    return "\n".join([*parts, "</svg>\n"])


def _panel(panel: Panel, top: float, xs: Sequence[float], x: Callable[[float], float]) -> list[str]:
    highest = max(max(line.values) for line in panel.lines)
    step = _round_step(highest / 4 or 1)
    steps = math.ceil(highest / step) or 1

    def y(value: float) -> float:
        return top + PANEL - value / (steps * step) * PANEL

    parts = []
    for number in range(steps + 1):
        level = y(number * step)
        parts.append(
            f'<path d="M{LEFT} {level:.1f}H{WIDTH - RIGHT}" stroke="#ccd2da" stroke-width="0.7"/>'
        )
        parts.append(_text(LEFT - 8, level + 4, f"{number * step:g}", anchor="end"))
    for line in panel.lines:
        points = " ".join(
            f"{x(at):.1f},{y(value):.1f}" for at, value in zip(xs, line.values, strict=True)
        )
        parts.append(f'<polyline points="{points}" fill="none" {STYLES[line.style]}/>')
    # The legend stands above the chart, right of its name.
    parts.append(_text(LEFT, top - 8, panel.label, weight="bold"))
    at = LEFT + 9 * len(panel.label) + 20.0
    for line in panel.lines:
        parts.append(f'<path d="M{at} {top - 12}h24" {STYLES[line.style]}/>')
        parts.append(_text(at + 30, top - 8, line.name))
        at += 30 + 8 * len(line.name) + 16
    return parts


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", size: int = 12, weight: str = "normal"
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" '
        f'font-weight="{weight}">{escape(text)}</text>'
    )


def _round_step(rough: float) -> float:
    """Return the round number (1, 2 or 5 times a power of ten) next above."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
