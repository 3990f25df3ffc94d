"""The cost curve as a picture: ``python -m bench.draw curve.json performance.svg``.

Needs matplotlib: ``pip install -e '.[bench]'``. The numbers come from ``python -m bench --json``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import matplotlib as mpl
import typer
from matplotlib.figure import Figure

SWEEPS = {
    "partitions": ("partitions", "partitions, 5 jobs waiting in each"),
    "jobs": ("jobs", "jobs waiting in 1,000 partitions"),
}
LINES = {
    "tick": ("a tick: 1,000 notes folded, 100 jobs admitted", "#0b5cad", "o"),
    "stage": ("a call that stages 1,000 jobs", "#c0561a", "s"),
}


def draw(points: list[dict[str, Any]]) -> Figure:
    """Return one chart a sweep: the time over bare procrastinate's, by size, on a log axis."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    axes = figure.subplots(1, len(SWEEPS), sharey=True)
    for axis, (sweep, (key, label)) in zip(axes, SWEEPS.items(), strict=True):
        chosen = [point for point in points if point["sweep"] == sweep]
        sizes = [point[key] for point in chosen]
        for name, (text, colour, marker) in LINES.items():
            values = [point[f"{name}_ms"] / point[f"bare_{name}_ms"] for point in chosen]
            axis.plot(sizes, values, color=colour, marker=marker, label=text)
        axis.set_xscale("log")
        axis.set_xticks(sizes, [_short(size) for size in sizes])
        axis.minorticks_off()
        axis.set_ylim(bottom=0)
        axis.set_xlabel(label)
        axis.grid(axis="y", color="#dddddd", linewidth=0.7)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("time over bare procrastinate's\nfor as many jobs a call")
    axes[1].legend(frameon=False, loc="upper right")
    return figure


def _short(size: int) -> str:
    return f"{size // 1_000_000} M" if size >= 1_000_000 else f"{size // 1_000} k"


def main(
    source: Annotated[Path, typer.Argument(help="What `python -m bench --json` wrote.")],
    target: Annotated[Path, typer.Argument(help="The SVG to write.")],
) -> None:
    """Draw the cost curve of a run."""
    mpl.rcParams["svg.fonttype"] = "none"  # text stays text
    mpl.rcParams["svg.hashsalt"] = "pydispatch"  # the same numbers give the same file
    points = json.loads(source.read_text(encoding="utf-8"))["curve"]
    draw(points).savefig(target, metadata={"Creator": None, "Date": None})


if __name__ == "__main__":
    typer.run(main)
