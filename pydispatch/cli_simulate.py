"""The command that shows what another definition would have admitted, before it is put in force."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import groupby
from typing import Annotated, Any

import psycopg
import typer
from psycopg.rows import dict_row
from rich.cells import cell_len, set_cell_size

from pydispatch import errors
from pydispatch.cli_command import command
from pydispatch.cli_output import print_json, print_line, print_rows, screen, shown
from pydispatch.cli_session import Session

__all__ = ["simulate"]

_UNITS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400}
_BLOCKS = " ▁▂▃▄▅▆▇█"
_CHART = 60  # columns of a chart where there is room
_FINE = timedelta(milliseconds=1)  # a step so short that it is made as short as it can be
_LABEL = 24  # columns of a partition's name beside it

Row = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """One simulation: under which definition, and the rows of dispatch_simulate()."""

    name: str
    definition: Any
    rows: list[Row]

    @property
    def groups(self) -> dict[str | None, list[Row]]:
        """The series of each group of partitions, those with the most jobs first."""
        rows = sorted(
            self.rows, key=lambda row: (row["partition_key"] is None, row["partition_key"] or "")
        )
        series = {
            key: list(steps) for key, steps in groupby(rows, lambda row: row["partition_key"])
        }
        order = list(dict.fromkeys(row["partition_key"] for row in self.rows))
        return {key: series[key] for key in order}


@command(panel="Looking")
def simulate(
    session: Session,
    policy: Annotated[str, typer.Argument(metavar="POLICY")],
    definition: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help='A file with a definition in JSON, "-" for standard input. Default: in force.',
        ),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="PATH=VALUE",
            help="Change one value of it; gates by their name: gates.throttle.rate=120.",
        ),
    ] = None,
    load: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Simulate the load in this file, not the jobs of the past."
        ),
    ] = None,
    last: Annotated[
        str, typer.Option(metavar="TIME", help="How much of the past: 90s, 15m, 1h, 2d.")
    ] = "1h",
    service_time: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="From a job's admission to its finish. Default: the median of recent jobs.",
        ),
    ] = None,
    tick_every: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Between two ticks, as from cron. Default: tick when something happens, as a "
            "driver does.",
        ),
    ] = None,
    groups: Annotated[
        int,
        typer.Option(
            min=1, max=100, help="How many partitions to show by themselves: those with most jobs."
        ),
    ] = 5,
    max_jobs: Annotated[
        int, typer.Option(min=1, max=100_000, help="How many jobs to simulate at most.")
    ] = 10_000,
) -> None:
    """Show what another definition would admit, beside the one in force; change nothing.

    Simulated are the jobs of the last hour and those that wait. See docs/simulate.md.
    """
    span = _time(last, "--last")
    options = {
        "service_time": service_time and _time(service_time, "--service-time"),
        "tick_every": tick_every and _time(tick_every, "--tick-every"),
        "groups": groups,
        "max_jobs": max_jobs,
    }
    given = None if definition is None else _json(definition, "--definition")
    jobs = None if load is None else _json(load, "--load")
    with session.connect() as connection:
        known, since, until = _known(connection, policy, timedelta(0) if load else span)
        if known is None and (given is None or jobs is None):
            raise errors.UnknownPolicy(
                f"unknown policy {policy!r}",
                hint="One that is not defined yet needs both --definition and --load.",
            )
        changed = _changed(known if given is None else given, set_ or [])
        runs = []
        if known is not None:
            runs.append(("in force", known))
        if changed != known:
            runs.append(("changed", changed))
        results = [
            Run(name, used, _simulate(connection, policy, used, jobs, since, until, options))
            for name, used in runs
        ]
    if session.json:
        print_json({"policy": policy, "since": since, "runs": [_report(run) for run in results]})
    elif not results[0].rows:
        print_line("no jobs to simulate")
    else:
        _print(results)


def _known(
    connection: psycopg.Connection[Any], policy: str, span: timedelta
) -> tuple[Any, datetime, datetime]:
    """The definition in force, or None, and of which time the jobs are."""
    row: tuple[Any, datetime, datetime] | None = connection.execute(
        """
        select (select definition from dispatch_policies where policy_name = %s),
          dispatch_now() - %s::interval, dispatch_now()
        """,
        [policy, span],
    ).fetchone()
    assert row is not None
    return row


def _simulate(
    connection: psycopg.Connection[Any],
    policy: str,
    definition: Any,
    load: Any,
    since: datetime,
    until: datetime,
    options: dict[str, Any],
) -> list[Row]:
    with connection.cursor(row_factory=dict_row) as cursor:
        return cursor.execute(
            """
            select * from dispatch_simulate(%(policy)s, %(definition)s, %(load)s,
              p_since => %(since)s, p_until => %(until)s, p_service_time => %(service_time)s,
              p_tick_every => %(tick_every)s, p_step => %(step)s, p_groups => %(groups)s,
              p_max_jobs => %(max_jobs)s)
            """,
            {
                "policy": policy,
                "definition": json.dumps(definition),
                "load": None if load is None else json.dumps(load),
                "since": since,
                "until": until,
                "step": _FINE,
                **options,
            },
        ).fetchall()


# -- what is given


def _time(text: str, option: str) -> timedelta:
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,6})?) ?(ms|s|m|h|d)", text)
    if found is None:
        raise typer.BadParameter(f"{text!r} is not like 90s, 15m, 1h or 2d", param_hint=option)
    return timedelta(seconds=float(found[1]) * _UNITS[found[2]])


def _json(path: str, option: str) -> Any:
    try:
        if path == "-":
            given = json.load(sys.stdin)
        else:
            with open(path, encoding="utf-8") as file:  # noqa: PTH123  # a name as given
                given = json.load(file)
    except (OSError, ValueError, RecursionError) as error:
        raise typer.BadParameter(f"{path}: {error}", param_hint=option) from error
    if given is None:  # which stands for what is in force, and for the past
        raise typer.BadParameter(f"{path}: there is nothing but null", param_hint=option)
    return given


def _changed(definition: Any, changes: Sequence[str]) -> Any:
    """A copy of a definition with values set in it."""
    definition = json.loads(json.dumps(definition))
    for change in changes:
        path, equals, text = change.partition("=")
        if not equals:
            raise typer.BadParameter(f"{change!r} is not like path=value", param_hint="--set")
        *way, last = path.split(".")
        place = definition
        for part in way:
            place = place[_step(place, part, path)]
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        place[_step(place, last, path, new=True)] = value
    return definition


def _step(place: Any, part: str, path: str, *, new: bool = False) -> str | int:
    """The key or index that one part of a path stands for: a gate's is its name or its number."""
    known: list[str] = []
    if isinstance(place, dict):
        known = list(place)
        if part in place or new:
            return part
    elif isinstance(place, list):
        known = [
            str(each.get("name") or each.get("type")) if isinstance(each, dict) else str(index)
            for index, each in enumerate(place)
        ]
        if part in known:
            return known.index(part)
        if part.isdecimal() and int(part) < len(place):
            return int(part)
    raise typer.BadParameter(
        f"{path}: there is no {part!r}" + (f", but {', '.join(known)}" if known else ""),
        param_hint="--set",
    )


# -- what is shown


def _summary(steps: Sequence[Row]) -> Row:
    """What became of one group's jobs."""
    admitted = sum(row["admitted"] for row in steps)
    waited = sum(
        (row["mean_wait"] * row["admitted"] for row in steps if row["admitted"]), timedelta(0)
    )
    left = max((place for place, row in enumerate(steps) if row["pending"]), default=-1) + 1
    return {
        "jobs": sum(row["staged"] for row in steps),
        "admitted": admitted,
        "longest_wait": max(
            (row["longest_wait"] for row in steps if row["admitted"]), default=None
        ),
        "mean_wait": waited / admitted if admitted else None,
        "most_waiting": max(row["pending"] for row in steps),
        "most_in_flight": max(row["in_flight"] for row in steps),
        "drained_at": steps[left]["elapsed"] if left < len(steps) else None,
    }


def _report(run: Run) -> Row:
    return {
        "name": run.name,
        "definition": run.definition,
        "note": run.rows[0]["note"] if run.rows else None,
        "summary": [
            {
                "partition_key": key,
                "partitions": steps[0]["partitions"],
                **_summary(steps),
                "denied": _denied(steps),
            }
            for key, steps in run.groups.items()
        ],
        "series": [
            {name: value for name, value in row.items() if name != "note"} for row in run.rows
        ],
    }


def _denied(steps: Sequence[Row]) -> dict[str, int]:
    total: dict[str, int] = {}
    for row in steps:
        for reason, times in row["denied"].items():
            total[reason] = total.get(reason, 0) + times
    return total


def _label(key: str | None, steps: Sequence[Row]) -> str:
    if key is None:
        return f"({steps[0]['partitions']} others)"
    return shown(key).plain or '""'


def _keys(runs: Sequence[Run]) -> list[str | None]:
    """The groups of all; another definition may make other partitions."""
    return list(dict.fromkeys(key for run in runs for key in run.groups))


def _print(runs: Sequence[Run]) -> None:
    """Print how many jobs wait over time, and a line for each group and definition."""
    for run in runs:
        print_line(f"{run.name}: {run.rows[0]['note']}")
    print()
    _print_chart(runs)
    print()
    print_rows(
        [
            {
                "partition": _label(key, run.groups[key]),
                "definition": run.name,
                **_summary(run.groups[key]),
            }
            for key in _keys(runs)
            for run in runs
            if key in run.groups
        ],
        empty="",
    )


def _print_chart(runs: Sequence[Run]) -> None:
    end = max(run.rows[-1]["elapsed"] + _step_of(run) for run in runs)
    lines = []
    for key in _keys(runs):
        found = [(run, run.groups[key]) for run in runs if key in run.groups]
        most = max(row["pending"] for _, steps in found for row in steps)
        for place, (run, steps) in enumerate(found):
            lines.append(("" if place else _label(key, steps), run.name, steps, most))
    label = min(max(cell_len(line[0]) for line in lines), _LABEL)
    name = max(len(line[1]) for line in lines)
    page = screen()
    width = max(min(_CHART, page.width - label - name - 10), 10)
    print_line(f"jobs waiting, over {shown(end).plain}; the most at one time")
    for text, definition, steps, most in lines:
        if cell_len(text) > label:
            text = set_cell_size(text, label - 1) + "…"
        peak = max(row["pending"] for row in steps)
        bars = _bars(steps, end, width, most)
        print_line(f"{set_cell_size(text, label)}  {definition:{name}}  {bars} {peak:>5}")


def _step_of(run: Run) -> timedelta:
    later: timedelta = next((row["elapsed"] for row in run.rows if row["elapsed"]), timedelta(0))
    return later or timedelta(seconds=1)


def _bars(steps: Sequence[Row], end: timedelta, width: int, most: int) -> str:
    """How many wait, as a row of blocks: each the most in its part of the time."""
    columns = [0] * width
    places = [min(int(row["elapsed"] / end * width), width - 1) for row in steps]
    for place, (row, first) in enumerate(zip(steps, places, strict=True)):
        last = places[place + 1] if place + 1 < len(steps) else first + 1
        for column in range(first, max(last, first + 1)):
            columns[column] = max(columns[column], row["pending"])
    return "".join(_BLOCKS[-(-waiting * 8 // most) if most else 0] for waiting in columns)
