"""A role that may only look sees everything, and changes nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg import sql

PAGE = Path(__file__).parent.parent / "docs" / "operations.md"


@pytest.fixture
def reader(conn: psycopg.Connection) -> Iterator[psycopg.Connection]:
    """A session of the reader of the operations page, in a database where something goes on."""
    conn.execute(
        """
        select dispatch_define_policy('p', '{"partition_by": "k", "gates": [
            {"type": "throttle", "rate": 2, "per": 3600},
            {"type": "adaptive_concurrency", "initial_max": 1, "target_lag_ms": 9}]}');
        select dispatch_stage('p', 't', '{"k": 1}') from generate_series(1, 3);
        select dispatch_tick();
        update procrastinate_jobs set status = 'doing';
        update procrastinate_jobs set status = 'failed';
        select dispatch_tick();
        select dispatch_stage('p', 't', '{"k": 2}');
        select dispatch_pause('p', '2');
        select dispatch_tick();
        select dispatch_sweep();
        select dispatch_set('hint_queued_after', 1), dispatch_set('hint_wait_after', 1);
        select dispatch_audit('me', 'pause', 'p', '2', null, null);
        """
    )
    conn.execute("revoke create on schema public from public")
    conn.execute("create role reader")
    for block in re.findall(r"^```sql\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE):
        for statement in block.split(";\n"):
            if statement.startswith("grant") and statement.endswith("reader"):
                conn.execute(statement.encode())
    conn.execute("set role reader")
    conn.execute("select set_config('dispatch.fake_now', (now() + interval '1 hour')::text, false)")
    yield conn
    conn.execute("reset role; drop owned by reader; drop role reader")


def test_a_reader_reads_every_view(reader: psycopg.Connection) -> None:
    views = reader.execute(
        "select viewname from pg_views where schemaname = 'public' and viewname like 'dispatch\\_%'"
    ).fetchall()
    assert len(views) > 8
    for (view,) in views:
        # As the values that they are: no time in them is one that Python does not have.
        found = reader.execute(sql.SQL("select * from {}").format(sql.Identifier(view))).fetchall()
        assert found or view in ("dispatch_stalled_jobs",), view


@pytest.mark.parametrize(
    "call",
    [
        "dispatch_job((select min(id) from dispatch_staged_jobs))",
        "dispatch_job_status((select min(job_id) from dispatch_admissions))",
        "dispatch_explain((select min(id) from dispatch_staged_jobs))",
        "dispatch_explain((select min(job_id) from dispatch_admissions))",
        "dispatch_partitions_page('p')",
        "dispatch_waiting_page('p', '1')",
        "dispatch_next_due()",
        "dispatch_setting('metrics_retention')",
        "dispatch_setting_spec()",
        "dispatch_gate_spec()",
    ],
)
def test_a_reader_calls_what_looks(reader: psycopg.Connection, call: str) -> None:
    assert reader.execute(f"select found::text from {call} as found".encode()).fetchall()


@pytest.mark.parametrize(
    "statement",
    [
        "select dispatch_stage('p', 't')",
        "select dispatch_tick()",
        "select dispatch_pause('p')",
        "select dispatch_set('metrics_retention', 100)",
        "select dispatch_audit('me', 'pause', 'p', null, null, null)",
        "update dispatch_partitions set due_at = null",
        "delete from dispatch_audit_log",
    ],
)
def test_a_reader_changes_nothing(reader: psycopg.Connection, statement: str) -> None:
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        reader.execute(statement.encode())
