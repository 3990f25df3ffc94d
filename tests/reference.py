"""Write the parts of docs/ that repeat what database and code say: ``python -m tests.reference``.

``tests/test_docs.py`` fails when they differ.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import psycopg

from pydispatch import metrics as exposed
from tests import commands
from tests.fixtures import create_database, start_server

DOCS = Path(__file__).parent.parent / "docs"

FUNCTIONS = {
    "Policies": [
        "dispatch_define_policy",
        "dispatch_drop_policy",
        "dispatch_map_task",
        "dispatch_gate_spec",
    ],
    "Staging": ["dispatch_stage", "dispatch_stage_many", "dispatch_stage_periodic"],
    "Ticking": ["dispatch_tick", "dispatch_run", "dispatch_next_due", "dispatch_channel"],
    "A driver of your own": ["dispatch_admit", "dispatch_settle"],
    "Jobs": [
        "dispatch_job",
        "dispatch_job_status",
        "dispatch_cancel",
        "dispatch_cancel_job",
        "dispatch_retry_job",
        "dispatch_end_staged",
        "dispatch_finish",
    ],
    "Operating": [
        "dispatch_pause",
        "dispatch_resume",
        "dispatch_force_admit",
        "dispatch_drain",
        "dispatch_requeue_dead",
        "dispatch_discard_dead",
        "dispatch_requeue_note",
        "dispatch_discard_note",
        "dispatch_sweep",
        "dispatch_audit",
    ],
    "Looking": [
        "dispatch_explain",
        "dispatch_partitions_page",
        "dispatch_waiting_page",
        "dispatch_workers_alive",
    ],
    "Simulating": ["dispatch_simulate", "dispatch_load_spec"],
    "Settings": ["dispatch_set", "dispatch_setting", "dispatch_setting_spec"],
    "Identity and time": ["dispatch_partition_id", "dispatch_now"],
}

HEAD = """\
# SQL

<!-- Written by python -m tests.reference from the comments in the database. -->

Everything is in the schema that procrastinate's tables are in, under names that begin with
`dispatch_`. What is not listed here is internal, and may change. Names of arguments are part of the
interface: name them, as in `dispatch_stage('endpoints', 'fetch', p_priority => 5)`. Errors are in
[errors](errors.md).
"""


def reference(conn: psycopg.Connection[Any]) -> str:
    """Return docs/sql.md."""
    parts = [HEAD, "## Functions\n"]
    for title, names in FUNCTIONS.items():
        parts.append(f"### {title}\n")
        for name in names:
            parts += [_function(conn, name), ""]
    for title, kind in (("Views", "v"), ("Tables", "r"), ("Types", "c")):
        relations = conn.execute(
            """
            select oid, relname, obj_description(
              case relkind when 'c' then reltype else oid end,
              case relkind when 'c' then 'pg_type' else 'pg_class' end)
            from pg_class
            where relnamespace = 'public'::regnamespace
              and relname like 'dispatch\\_%%'
              and relkind = %s
            order by relname
            """,
            [kind],
        ).fetchall()
        if not relations:
            continue
        parts.append(f"## {title}\n")
        for oid, name, comment in relations:
            parts += [f"### `{name}`\n", comment, ""]
            parts += [*_columns(conn, oid, described=kind != "c"), ""]
    return "\n".join(parts).rstrip() + "\n"


def _function(conn: psycopg.Connection[Any], name: str) -> str:
    rows = conn.execute(
        """
        select prokind, pg_get_function_arguments(oid), pg_get_function_result(oid),
          obj_description(oid, 'pg_proc')
        from pg_proc
        where pronamespace = 'public'::regnamespace and proname = %s
        """,
        [name],
    ).fetchall()
    assert len(rows) == 1, f"{name} is {len(rows)} functions"
    ((kind, arguments, result, comment),) = rows
    arguments = re.sub(r"::\w+|\bIN ", "", _short(arguments)).replace(" DEFAULT ", " = ")
    arrow = f" → {_short(result)}" if kind == "f" and result != "void" else ""
    return f"**`{'call ' if kind == 'p' else ''}{name}({arguments}){arrow}`**\n\n{comment}"


def _short(types: str) -> str:
    """Return the names of types as people write them."""
    for long, short in (
        ("timestamp with time zone", "timestamptz"),
        ("double precision", "float8"),
        ("SETOF", "setof"),
        ("TABLE", "table"),
        ("NULL", "null"),
    ):
        types = types.replace(long, short)
    return types


def _columns(conn: psycopg.Connection[Any], oid: int, *, described: bool) -> list[str]:
    columns = conn.execute(
        """
        select attname, format_type(atttypid, atttypmod), col_description(attrelid, attnum)
        from pg_attribute
        where attrelid = %s and attnum > 0 and not attisdropped
        order by attnum
        """,
        [oid],
    ).fetchall()
    lines = []
    for name, kind, comment in columns:
        lines.append(
            f"| `{name}` | {_short(kind)} |" + (f" {_cell(comment)} |" if described else "")
        )
    head = ["| column | type | |", "|---|---|---|"]
    return [*(head if described else ["| column | type |", "|---|---|"]), *lines]


def settings(conn: psycopg.Connection[Any]) -> str:
    """Return the table of settings in docs/operations.md."""
    rows = conn.execute("select * from dispatch_setting_spec()").fetchall()
    lines = ["| setting | default | range | |", "|---|---|---|---|"]
    for name, default, minimum, maximum, meaning in rows:
        lines.append(
            f"| `{name}` | {number(default)} | {number(minimum)} to {number(maximum)} "
            f"| {_cell(meaning)} |"
        )
    return "\n".join(lines)


def metrics() -> str:
    """Return the table of metrics in docs/metrics.md."""
    lines = ["| metric | type | labels | |", "|---|---|---|---|"]
    for kind, labels, named in (
        *(("gauge", ["policy"], named) for named in exposed.GAUGES),
        *(("counter", ["policy"], named) for named in exposed.COUNTERS),
        ("counter", ["policy", "reason"], exposed.DENIED),
        ("histogram", ["policy"], exposed.TICKS),
        ("gauge", [], exposed.WORKERS),
        ("gauge", [], exposed.UP),
        ("gauge", [], exposed.SCRAPE_SECONDS),
        ("counter", [], exposed.SCRAPE_ERRORS),
    ):
        name = f"{named.name}_total" if kind == "counter" else named.name
        lines.append(
            f"| `{name}` | {kind} | {', '.join(f'`{each}`' for each in labels)} | {named.help} |"
        )
    return "\n".join(lines)


def with_part(page: str, mark: str, table: str) -> str:
    """Return a page with a table put between its marks."""
    return re.sub(
        rf"(<!-- {mark}: .*? -->\n).*?(<!-- end -->)",
        lambda match: f"{match[1]}\n{table}\n\n{match[2]}",
        page,
        flags=re.DOTALL,
    )


def number(value: Any) -> str:
    """Return a number as the docs write it: 86,400 or 0.5."""
    return f"{value:,f}".rstrip("0").rstrip(".") if value % 1 else f"{int(value):,}"


def _cell(text: str | None) -> str:
    return (text or "").replace("|", "\\|")


def main() -> None:
    """Write them."""
    with start_server() as server:
        create_database(server, "dispatch")
        with psycopg.connect(server.dsn("dispatch")) as conn:
            DOCS.joinpath("sql.md").write_text(reference(conn), encoding="utf-8")
            page = DOCS / "operations.md"
            text = with_part(page.read_text(encoding="utf-8"), "settings", settings(conn))
            page.write_text(text, encoding="utf-8")
    DOCS.joinpath("cli.md").write_text(commands.page(), encoding="utf-8")
    page = DOCS / "metrics.md"
    text = with_part(page.read_text(encoding="utf-8"), "metrics", metrics())
    page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
