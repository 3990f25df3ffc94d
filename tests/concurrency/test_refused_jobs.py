"""A job that procrastinate's table refuses for a reason of its own stops nobody, in no policy.

Case: a row-level policy refuses one staged job (42501), or an assert in a user's trigger does
(P0004): the tick raises each time, and no policy admits anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from procrastinate.exceptions import ConnectorException
from psycopg import sql

from tests.concurrency.support import assert_balanced, column, define, value
from tests.fixtures import Connect
from tests.ticks import Tick

TRIGGER = """
create function refuse() returns trigger language plpgsql as $$
begin
  assert new.args ->> 'bad' is distinct from 'assert', 'it should not be bad';
  if new.args ->> 'bad' is not null then
    raise exception 'refused' using errcode = new.args ->> 'bad';
  end if;
  return new;
end;
$$;
create trigger refuse before insert or update of priority on procrastinate_jobs
  for each row execute function refuse();
"""

# What the tick's user may see and change of procrastinate's jobs; it is not their owner.
ROW_LEVEL = """
alter table procrastinate_jobs enable row level security;
create policy all_seen on procrastinate_jobs for select using (true);
create policy all_changed on procrastinate_jobs for update using (true);
create policy some_come on procrastinate_jobs for insert with check (args ->> 'bad' is null);
grant usage on schema public to {role};
grant all on all tables in schema public to {role};
grant all on all sequences in schema public to {role};
"""

# Of all SQLSTATEs that a trigger may raise, some that say "nobody's fault" of others.
BAD = ["assert", "42501", "53100", "XX000", "25006", "P0001", "23514"]


@pytest.fixture
def ticker(conn: psycopg.Connection, admin: psycopg.Connection) -> Iterator[str]:
    """A role that ticks, and to which row-level policies apply."""
    name = f"ticker of {conn.info.dbname}"
    admin.execute(sql.SQL("create role {} login").format(sql.Identifier(name)))
    conn.execute(sql.SQL(ROW_LEVEL).format(role=sql.Identifier(name)))
    yield name
    conn.execute(sql.SQL("drop owned by {}").format(sql.Identifier(name)))
    admin.execute(sql.SQL("drop role {}").format(sql.Identifier(name)))


def stage(conn: psycopg.Connection, policy: str, *bad: str | None) -> list[int]:
    return [
        value(
            conn,
            "select dispatch_stage(%s, 't',"
            " jsonb_strip_nulls(jsonb_build_object('bad', %s::text)))",
            policy,
            reason,
        )
        for reason in bad
    ]


def done(results: list[dict[str, Any]]) -> dict[str, tuple[int, int]]:
    return {
        result["policy_name"]: (result["jobs_admitted"], result["handoff_failures"])
        for result in results
    }


def define_three(conn: psycopg.Connection) -> None:
    for name in ("a", "b", "c"):
        define(conn, name, partition_by=[], admission_batch_size=100)


@pytest.mark.parametrize("bad", BAD)
def test_one_among_others_is_set_aside(conn, connect: Connect, tick: Tick, bad: str):
    conn.execute(TRIGGER)
    define_three(conn)
    stage(conn, "a", None, None)
    _, refused, _ = stage(conn, "b", None, bad, None)
    stage(conn, "c", None)
    assert done(tick(connect())) == {"a": (2, 0), "b": (2, 1), "c": (1, 0)}
    assert column(conn, "select id from dispatch_dead_jobs") == [refused]
    assert not value(conn, "select count(*) from dispatch_staged_jobs")
    assert_balanced(conn)


@pytest.mark.parametrize("bad", BAD)
def test_one_alone_keeps_no_other_policy_from_going_on(conn, connect: Connect, tick: Tick, bad):
    conn.execute(TRIGGER)
    define_three(conn)
    stage(conn, "b", bad)
    for turn in range(3):
        stage(conn, "a", None)
        stage(conn, "c", None, None)
        results = done(tick(connect()))
        assert (results["a"], results["c"]) == ((1, 0), (2, 0)), turn
        assert results["b"][0] == 0
    waiting_or_dead = "select count(*) from {}"
    staged, dead = (
        value(conn, waiting_or_dead.format(table))
        for table in ("dispatch_staged_jobs", "dispatch_dead_jobs")
    )
    assert (staged, dead) in {(1, 0), (0, 1)}
    # Beside one that goes, it is known whose fault it is.
    stage(conn, "b", None)
    results = done(tick(connect()))
    assert results["b"] == (1, staged)
    assert value(conn, "select count(*) from dispatch_dead_jobs") == 1
    assert_balanced(conn)


@pytest.mark.parametrize("bad", ["assert", "42501", "P0001"])
def test_a_retry_that_is_refused_when_it_comes_back_is_set_aside_with_its_id(
    conn, connect: Connect, tick: Tick, bad: str
):
    define_three(conn)
    retried, *_ = stage(conn, "b", bad, None, None)
    stage(conn, "a", None)
    assert done(tick(connect())) == {"a": (1, 0), "b": (3, 0), "c": (0, 0)}
    conn.execute("update procrastinate_jobs set status = 'doing'")
    conn.execute(
        "select procrastinate_retry_job_v2(id, null, null, null, null) from procrastinate_jobs"
    )
    conn.execute(TRIGGER)
    assert done(tick(connect())) == {"a": (1, 0), "b": (2, 1), "c": (0, 0)}
    assert column(conn, "select id from dispatch_dead_jobs where parked") == [retried]
    assert value(conn, "select state from dispatch_job(%s)", retried) == "dead"
    conn.execute("drop trigger refuse on procrastinate_jobs")
    conn.execute("select dispatch_requeue_dead(%s)", [retried])
    assert done(tick(connect()))["b"] == (1, 0)
    assert value(conn, "select state from dispatch_job(%s)", retried) == "queued"
    assert_balanced(conn)


def test_a_row_level_policy_refuses_one_job_alone(conn, connect: Connect, tick: Tick, ticker: str):
    define_three(conn)
    stage(conn, "a", None, None)
    _, refused = stage(conn, "b", None, "row")
    ticking = connect(user=ticker)
    assert done(tick(ticking)) == {"a": (2, 0), "b": (1, 1), "c": (0, 0)}
    assert column(conn, "select id from dispatch_dead_jobs") == [refused]
    (alone,) = stage(conn, "b", "row")
    stage(conn, "c", None)
    assert done(tick(ticking)) == {"a": (0, 0), "b": (0, 1), "c": (1, 0)}
    assert column(conn, "select id from dispatch_dead_jobs order by id") == [refused, alone]
    assert_balanced(conn)


def test_several_that_a_row_level_policy_refuses_keep_no_other_policy_from_going_on(
    conn, connect: Connect, tick: Tick, ticker: str
):
    define_three(conn)
    stage(conn, "b", *["row"] * 5)
    ticking = connect(user=ticker)
    for _ in range(3):
        stage(conn, "a", None)
        stage(conn, "c", None)
        results = done(tick(ticking))
        assert (results["a"], results["c"]) == ((1, 0), (1, 0))
    stage(conn, "b", None)
    results = done(tick(ticking))
    assert results["b"] == (1, 5)
    assert_balanced(conn)


def test_without_the_right_to_insert_the_tick_raises_and_no_job_is_set_aside(
    conn, connect: Connect, tick: Tick, ticker: str
):
    define_three(conn)
    for policy in ("a", "b", "c"):
        stage(conn, policy, None, "row")
    conn.execute(
        sql.SQL("revoke insert on procrastinate_jobs from {}").format(sql.Identifier(ticker))
    )
    with pytest.raises((psycopg.errors.InsufficientPrivilege, ConnectorException)) as caught:
        tick(connect(user=ticker))
    cause = caught.value.__cause__ or caught.value
    assert "permission denied for table procrastinate_jobs" in str(cause)
    assert value(conn, "select count(*) from dispatch_staged_jobs") == 6
    assert not value(conn, "select count(*) from dispatch_dead_jobs")
