"""Commands that show what goes on, and change nothing."""

from __future__ import annotations

import sys
from enum import Enum
from types import SimpleNamespace
from typing import Annotated, Any

import psycopg
import typer
from psycopg.rows import dict_row
from rich.console import Group
from rich.text import Text

from pydispatch import errors
from pydispatch.cli_command import JobId, command, query, show
from pydispatch.cli_live import watch
from pydispatch.cli_output import cut_table, print_json, print_line, print_rows, screen, shown
from pydispatch.cli_session import Session

__all__ = ["explain", "hints", "metrics", "partitions", "status", "top"]

_PANEL = "Looking"
_MOST = 1000  # rows of a page at most

_PolicyOption = Annotated[str | None, typer.Option(help="This policy only. Default: all.")]


class Sort(str, Enum):
    """The orders of dispatch_partitions_page()."""

    pending = "pending"
    admitted = "admitted"
    stale = "stale"
    recent = "recent"
    key = "key"


class Level(str, Enum):
    """How bad a hint is, the worst first."""

    critical = "critical"
    warning = "warning"
    info = "info"


_WITH_HINTS = """
from dispatch_policy_status as status
left join (
  select policy_name, jsonb_object_agg(level, hints) as hints
  from (select policy_name, level, count(*) as hints from dispatch_hints group by 1, 2) as levels
  group by policy_name
) as found on found.policy_name = status.policy_name
where %(policy)s::text is null or status.policy_name = %(policy)s
order by status.policy_name
"""

# What scripts get of a policy, and what people see.
_STATUS = "select status.*, coalesce(found.hints, '{}') as hints" + _WITH_HINTS
_GLANCE = (
    """
    select
      status.policy_name as policy, pending, in_flight, queued,
      oldest_wait as longest_wait,
      dispatch_now() - oldest_queued_at as longest_queued,
      admitted_last_minute,
      partitions, blocked, dead, paused,
      coalesce((hints ->> 'critical')::int, 0) + coalesce((hints ->> 'warning')::int, 0) as hints
    """
    + _WITH_HINTS
)

_HINTS = """
select level, hint, policy_name, partition_key, since, message, what_to_do
from dispatch_hints
where %(policy)s::text is null or policy_name = %(policy)s
order by array_position(array['critical', 'warning', 'info'], level), since, policy_name, hint
"""

_PAGE = """
from dispatch_partitions_page(%(policy)s, p_sort => %(sort)s, p_cursor => %(cursor)s,
  p_limit => %(limit)s, p_search => %(search)s, p_only_pending => %(pending)s)
"""

# What people see of a partition. looked_at_in is when a tick looks next.
_WAITS = """
  policy_name as policy, partition_key as partition, pending_count as pending,
  in_flight_count as in_flight, dispatch_now() - waiting_since as waits,
  case when paused then 'paused' else blocked_reason end as held_by,
  case when due_at is not null then greatest(due_at - dispatch_now(), interval '0') end
    as looked_at_in
"""
_PARTITION = (
    _WAITS
    + """
  , total_admitted as admitted, dispatch_now() - last_admitted_at as last_admitted, cursor
"""
)
_SERVED = """
  policy_name as policy, partition_key as partition, pending_count as pending,
  in_flight_count as in_flight, total_admitted as admitted,
  dispatch_now() - last_admitted_at as last_admitted
"""


@command(panel=_PANEL)
def status(session: Session, policy: _PolicyOption = None) -> None:
    """Show each policy: what waits and for how long, what runs, how many hints there are."""
    rows = query(session, _STATUS if session.json else _GLANCE, policy=policy)
    if policy is not None and not rows:
        raise errors.UnknownPolicy(f"unknown policy {policy!r}")
    show(session, rows, empty="no policy is defined")


@command(panel=_PANEL)
def top(
    session: Session,
    policy: _PolicyOption = None,
    interval: Annotated[
        float, typer.Option(min=0.2, max=3600, help="Seconds between two pages.")
    ] = 2.0,
    once: Annotated[
        bool, typer.Option("--once", help="Print one page, as without a terminal.")
    ] = False,
) -> None:
    """Watch policies, where most jobs wait and what was last admitted; q ends it."""
    console = screen()
    if session.json:
        found = _look(session, policy, _LINES)
        print_json({name: found[name] for name in ("policies", "waiting", "served", "hints")})
    elif once or not console.is_terminal:
        console.print(_page(_look(session, policy, _LINES), console.width))
    else:
        last: dict[str, Any] = {}

        def draw(height: int) -> Group:
            nonlocal last
            try:
                last = _look(session, policy, height)
            except psycopg.OperationalError as error:
                return _page({**last, "problem": str(error).strip()}, console.width)
            return _page(last, console.width)

        watch(console, draw, interval)


_LINES = 60  # of a page that is no terminal


def _look(session: Session, policy: str | None, lines: int) -> dict[str, Any]:
    """Ask for what fits on a page of so many lines, and for all policies and hints."""
    with session.connect() as connection, connection.cursor(row_factory=dict_row) as cursor:

        def ask(statement: str, **more: Any) -> list[dict[str, Any]]:
            return cursor.execute(statement.encode(), {"policy": policy, **more}).fetchall()

        cursor.execute("set statement_timeout to '10s'")
        policies = sorted(ask(_GLANCE), key=lambda row: -row["pending"])
        if policy is not None and not policies:
            raise errors.UnknownPolicy(f"unknown policy {policy!r}")
        (now,) = ask("select to_char(dispatch_now(), 'HH24:MI:SS') as time")
        found = {"lines": lines, "policies": policies, "hints": ask(_HINTS), **now}
        # What is left by the first line, the hints, the policies, and the heads of three tables.
        room = lines - 1 - len(_worst(found)) - (4 + len(_first(found))) - 2 * 4
        page = {"cursor": None, "search": None, "limit": max(room // 2, 1)}
        served = ask(f"select {_SERVED} {_PAGE}", sort="recent", pending=False, **page)
        return {
            **found,
            "waiting": ask(f"select {_WAITS} {_PAGE}", sort="pending", pending=True, **page),
            "served": [row for row in served if row["last_admitted"] is not None],
        }


def _worst(found: dict[str, Any]) -> list[dict[str, Any]]:
    """The hints that have their place on the page."""
    hints: list[dict[str, Any]] = found.get("hints", [])
    return hints[: max(found.get("lines", 0) // 10, 1)]


def _first(found: dict[str, Any]) -> list[dict[str, Any]]:
    """The policies that have their place on the page."""
    policies: list[dict[str, Any]] = found.get("policies", [])
    return policies[: max(found.get("lines", 0) // 4, 1)]


def _short(row: dict[str, Any]) -> dict[str, Any]:
    """A policy with headings that leave room on a narrow terminal."""
    return {
        "policy": row["policy"],
        "pending": row["pending"],
        "waits": row["longest_wait"],
        "held": row["blocked"],
        "in_flight": row["in_flight"],
        "queued": row["queued"],
        "for": row["longest_queued"],
        "/min": row["admitted_last_minute"],
        "dead": row["dead"],
    }


def _page(found: dict[str, Any], width: int) -> Group:
    """Lay what was found out as a page."""
    policies = found.get("policies", [])
    sums = {name: sum(row[name] for row in policies) for name in ("pending", "in_flight", "dead")}
    head = f"pydispatch {found.get('time', '')}   policies {len(policies)}"
    for name, count in sums.items():
        head += f"   {name.replace('_', ' ')} {count}"
    parts: list[Any] = [Text(head, "bold", no_wrap=True, overflow="ellipsis")]
    if "problem" in found:
        parts.append(Text("no answer: ", "bold red") + shown(found["problem"]))
    for hint in _worst(found):
        style = {"critical": "bold red", "warning": "yellow"}.get(hint["level"], "")
        line = Text(f"{hint['level']} {hint['hint']} ", style, no_wrap=True, overflow="ellipsis")
        if hint["policy_name"] is not None:
            line += shown(hint["policy_name"]) + Text(": ")
        parts.append(line + shown(hint["message"]))

    seen = _first(found)
    for heading, rows in (
        ("", [_short(row) for row in seen]),
        ("most waiting", found.get("waiting")),
        ("last admitted", found.get("served")),
    ):
        if rows:
            parts += [Text(heading, "bold"), cut_table(rows, width)]
            if not heading and len(policies) > len(seen):
                parts.append(Text(f"and {len(policies) - len(seen)} more policies"))
            parts.append(Text(""))
    if policies == [] and "problem" not in found:
        parts.append(Text("no policy is defined"))
    return Group(*parts)


@command(panel=_PANEL)
def partitions(
    session: Session,
    policy: Annotated[
        str | None, typer.Argument(metavar="POLICY", help="Of this policy. Default: of all.")
    ] = None,
    sort: Annotated[
        Sort,
        typer.Option(
            help="pending and admitted: most first; stale: longest not looked at first; "
            "recent: last admission first; key: by its bytes."
        ),
    ] = Sort.pending,
    search: Annotated[
        str | None, typer.Option(help="Whose key has this in it, in upper or lower case.")
    ] = None,
    pending: Annotated[bool, typer.Option("--pending", help="With waiting jobs only.")] = False,
    limit: Annotated[int, typer.Option(min=1, max=_MOST - 1, help="How many at most.")] = 50,
    cursor: Annotated[
        str | None, typer.Option(help="Go on behind the row with this cursor.")
    ] = None,
    all_: Annotated[bool, typer.Option("--all", help="All of them, however many.")] = False,
) -> None:
    """Show partitions: what waits, what runs, what holds them back."""
    columns = "*" if session.json else _PARTITION
    wanted = _MOST if all_ else limit
    rows: list[dict[str, Any]] = []
    more = True
    with session.connect() as connection, connection.cursor(row_factory=dict_row) as results:
        while more and (all_ or not rows):
            page = results.execute(
                f"select {columns} {_PAGE}".encode(),
                {
                    "policy": policy,
                    "sort": sort.value,
                    "cursor": rows[-1]["cursor"] if rows else cursor,
                    "limit": wanted if all_ else wanted + 1,
                    "search": search,
                    "pending": pending,
                },
            ).fetchall()
            more = len(page) == _MOST if all_ else len(page) > wanted
            rows += page[:wanted]
    if session.json:
        print_json(rows)
        return
    next_cursor = rows[-1]["cursor"] if more and rows else None
    for row in rows:
        del row["cursor"]
        if policy is not None:
            del row["policy"]
    print_rows(rows, empty="no partition")
    if next_cursor is not None:
        print_line("")
        print_line(f"more: --cursor {next_cursor}")


@command(panel=_PANEL)
def explain(
    session: Session,
    job_id: JobId,
) -> None:
    """Say why a job does not run: what it waits for, since when and until about when."""
    rows = query(session, "select * from dispatch_explain(%(id)s)", id=job_id)
    if session.json:
        print_json(rows)
        return
    job, *items = rows
    numbers = job["numbers"]
    where = "".join(
        f", {word} {numbers[name]}"
        for word, name in (("policy", "policy_name"), ("partition", "partition_key"))
        if numbers.get(name)
    )
    print_line(f"job {job_id}: {numbers['state']}{where}")
    print_line(job["message"])
    if items:
        print_line("")
        print_rows(
            [
                {
                    "what": item["item"]
                    if item["gate_name"] is None
                    else f"gate {item['gate_name']}",
                    "holds_it": item["blocks"],
                    "since": item["since"],
                    "until_about": item["estimated_at"],
                    "why": item["message"],
                }
                for item in items
            ],
            empty="",
        )


@command(panel=_PANEL)
def hints(
    session: Session,
    policy: _PolicyOption = None,
    fail_on: Annotated[
        Level | None,
        typer.Option(help="End with status 1 where a hint is at least this bad: for monitoring."),
    ] = None,
) -> None:
    """Show what is wrong and what to do about it, the worst first."""
    rows = query(session, _HINTS, policy=policy)
    if session.json or not rows:
        show(session, rows, empty="nothing is wrong")
    else:
        for row in rows:
            about = {"policy": row["policy_name"], "partition": row["partition_key"]}
            print_line(
                f"{row['level']}: {row['hint']}"
                + "".join(f", {name} {value}" for name, value in about.items() if value is not None)
            )
            print_line(f"  {row['message']}")
            print_line(f"  -> {row['what_to_do']}")
    if fail_on is not None:
        bad = list(Level)[: list(Level).index(fail_on) + 1]
        if any(row["level"] in bad for row in rows):
            raise typer.Exit(1)


@command(panel=_PANEL)
def metrics(session: Session) -> None:
    """Print the metrics once as Prometheus reads them (needs the extra "web").

    Where the database does not answer they say so, and the status is 1.
    """
    try:
        from pydispatch.metrics import Collector
    except ModuleNotFoundError as error:
        raise errors.DispatchError(str(error), sqlstate="") from error
    from prometheus_client import generate_latest

    families = list(Collector(session.connect).collect())
    samples = [sample for family in families for sample in family.samples]
    if session.json:
        names = ("name", "labels", "value")
        print_json([{name: getattr(sample, name) for name in names} for sample in samples])
    else:
        registry: Any = SimpleNamespace(collect=lambda: families)
        sys.stdout.write(generate_latest(registry).decode())
    if any(sample.name == "dispatch_up" and not sample.value for sample in samples):
        raise typer.Exit(1)
