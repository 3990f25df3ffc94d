"""The command: ``python -m bench``."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any

import typer

from bench import admission, curve, pages, report, running, staging
from bench.measurement import Measurement
from bench.plan import Plan
from bench.server import open_server

ROWS: dict[str, Callable[[Plan], Iterator[Measurement]]] = {
    "sql_tick": admission.sql_tick,
    "driver_tick": admission.driver_tick,
    "stage_many": staging.stage_many,
    "one_defer": staging.one_defer,
    "backoff": admission.backoff,
    "enqueuers": staging.enqueuers,
    "latency": running.latency,
    "worker": running.worker,
    "pages": pages.looks,
}
CURVE = "curve"


def main(
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write all numbers.")
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help=f"One of {', '.join([*ROWS, CURVE])}; may be repeated."),
    ] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Repetitions of which the median counts.")] = 5,
    small: Annotated[
        bool, typer.Option("--small", help="Small sizes: shows that it works, not how fast.")
    ] = False,
    large: Annotated[
        bool,
        typer.Option("--curve", help="The cost curve up to 1,000,000 partitions, 5,000,000 jobs."),
    ] = False,
) -> None:
    """Measure pydispatch against bare procrastinate on one server, in turns.

    BENCH_DSN names a server whose user may create databases; without it an embedded one with
    durable commits is started. Exits with 0 whether or not the bars are met.
    """
    names = only or [*ROWS, CURVE]
    unknown = set(names) - {*ROWS, CURVE}
    if unknown:
        raise typer.BadParameter(f"unknown: {', '.join(sorted(unknown))}")
    measurements: list[Measurement] = []
    points: list[dict[str, Any]] = []
    with open_server() as server:
        plan = Plan(server, repeat, small)
        document: dict[str, Any] = {
            "at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "cpus": os.cpu_count(),
            "python": platform.python_version(),
            "server": server.description(),
            "repeat": repeat,
            "small": small,
        }
        for name in names:
            print(f"measuring {name} ...", file=sys.stderr, flush=True)
            if name == CURVE:
                points = curve.cost_curve(plan, large=large)
            else:
                measurements += ROWS[name](plan)
    if measurements:
        report.print_table(measurements)
    if points:
        report.print_curve(points)
    if json_file is not None:
        document["rows"] = [row.as_json() for row in measurements]
        document["curve"] = points
        report.write_json(json_file, document)


if __name__ == "__main__":
    typer.run(main)
