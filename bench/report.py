"""What the benchmark prints and writes."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import rich.box
from rich.console import Console
from rich.table import Table

from bench.measurement import Measurement

__all__ = ["number", "print_curve", "print_table", "write_json"]


def print_table(measurements: Sequence[Measurement]) -> None:
    """Print each bar, what was measured, and whether the bar is met."""
    table = Table(box=rich.box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("what")
    for heading in ("pydispatch", "reference", "bar", "measured", "range"):
        table.add_column(heading, justify="right")
    table.add_column("met")
    for row in measurements:
        ours, reference = (
            *(number(statistics.median(values)) for values in row.details.values()),
            *("", ""),
        )[:2]
        table.add_row(
            row.what,
            ours,
            reference,
            f"{'≥' if row.at_least else '≤'} {_with_unit(row, row.bar)}",
            _with_unit(row, row.measured),
            f"{number(min(row.values))} - {number(max(row.values))}",
            "[green]yes" if row.met else "[red]no",
        )
    Console().print(table)


def _with_unit(row: Measurement, value: float) -> str:
    return f"{number(value)} {row.unit}".replace(" /s", "/s").replace(" x", "x")


def number(value: float) -> str:
    """Show three digits, or a whole number."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.{1 if value >= 10 else 2}f}"


def print_curve(points: Sequence[dict[str, Any]]) -> None:
    """Print the cost curve."""
    table = Table(box=rich.box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    headings = ("partitions", "staged jobs", "tick, ms", "x bare", "admitted/s", "stage 1,000, ms")
    for heading in (*headings, "x bare"):
        table.add_column(heading, justify="right")
    for point in points:
        table.add_row(
            f"{point['partitions']:,}",
            f"{point['jobs']:,}",
            number(point["tick_ms"]),
            number(point["tick_ms"] / point["bare_tick_ms"]),
            number(point["admitted_per_s"]),
            number(point["stage_ms"]),
            number(point["stage_ms"] / point["bare_stage_ms"]),
        )
    Console().print(table)


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Write everything that was measured."""
    path.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n")
