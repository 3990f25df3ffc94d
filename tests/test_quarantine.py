"""Jobs that cannot be handed off are set aside, and cost all others nothing."""

from __future__ import annotations

import psycopg
import pytest
from procrastinate import exceptions
from psycopg.types.json import Jsonb

from tests.support import Clock
from tests.ticks import Tick

PARTITIONS = 100
JOBS = 100  # in each partition
POISON = {(0, 0), (0, 1), (17, 50), (63, 99), (99, 99)}  # partition, number


def stage(conn: psycopg.Connection, poison: set[tuple[int, int]]) -> None:
    definition = {
        "partition_by": "k",
        "gates": [{"type": "throttle", "rate": JOBS, "per": 3600}],
        "max_queued": None,
    }
    conn.execute("select dispatch_define_policy('p', %s)", [Jsonb(definition)])
    jobs = [
        {
            "task_name": "poison" if (key, number) in poison else "fine",
            "args": {"k": key, "number": number},
        }
        for number in range(JOBS)
        for key in range(PARTITIONS)
    ]
    conn.execute("select dispatch_stage_many('p', %s)", [Jsonb(jobs)])


def tick_to_the_end(conn: psycopg.Connection, tick: Tick) -> list[tuple[int, int]]:
    """Tick until nothing is seen; return what was admitted and what failed in each tick."""
    results = []
    while (result := tick(conn, "p")[0])["partitions_seen"]:
        results.append((result["jobs_admitted"], result["handoff_failures"]))
    return results


# case: five jobs of one policy fail in the hand-off and are tried again at every tick
def test_five_bad_jobs_among_ten_thousand_cost_the_others_nothing(
    conn: psycopg.Connection, clock: Clock, tick: Tick
):
    conn.execute(
        "alter table procrastinate_jobs add constraint no_poison check (task_name <> 'poison')"
    )
    stage(conn, POISON)
    results = tick_to_the_end(conn, tick)

    assert sum(failed for _, failed in results) == 5
    assert sum(admitted for admitted, _ in results) == PARTITIONS * JOBS - 5
    assert len(results) == PARTITIONS // 50, "as many ticks as without the bad ones"
    dead = conn.execute(
        "select (args ->> 'k')::int, (args ->> 'number')::int, error from dispatch_dead_jobs"
    ).fetchall()
    assert {(key, number) for key, number, _ in dead} == POISON
    assert len(dead) == 5
    assert all("no_poison" in error and "23514" in error for _, _, error in dead)
    assert conn.execute(
        "select count(*), count(distinct args) from procrastinate_jobs"
    ).fetchone() == (PARTITIONS * JOBS - 5, PARTITIONS * JOBS - 5)
    assert conn.execute("select count(*) from dispatch_staged_jobs").fetchone() == (0,)


@pytest.mark.parametrize("error", ["40001", "53200", "57014", "25006", "42501"])
def test_a_fault_of_the_server_sets_no_job_aside(
    conn: psycopg.Connection, clock: Clock, tick: Tick, error: str
):
    conn.execute("""select dispatch_define_policy('p', '{"gates": []}')""")
    conn.execute("select dispatch_stage('p', 'fine'), dispatch_stage('p', 'fine')")
    conn.execute(
        "create function fail() returns trigger language plpgsql as"
        f" $$ begin raise exception 'not now' using errcode = '{error}'; end $$"
    )
    conn.execute(
        "create trigger fail before insert on procrastinate_jobs for each row"
        " execute function fail()"
    )
    with pytest.raises(exceptions.ConnectorException) as raised:
        tick(conn, "p")
    assert getattr(raised.value.__cause__, "sqlstate", None) == error
    conn.execute("drop trigger fail on procrastinate_jobs")
    assert tick(conn, "p")[0]["jobs_admitted"] == 2
    assert conn.execute("select count(*) from dispatch_dead_jobs").fetchone() == (0,)


def test_a_schema_that_is_not_the_one_that_is_called_sets_no_job_aside(
    conn: psycopg.Connection, clock: Clock, tick: Tick
):
    conn.execute("""select dispatch_define_policy('p', '{"gates": []}')""")
    conn.execute("select dispatch_stage('p', 'fine'), dispatch_stage('p', 'fine')")
    conn.execute("alter table procrastinate_jobs rename queueing_lock to another_name")
    with pytest.raises(exceptions.ConnectorException) as raised:
        tick(conn, "p")
    assert isinstance(raised.value.__cause__, psycopg.errors.UndefinedColumn)
    conn.execute("alter table procrastinate_jobs rename another_name to queueing_lock")
    assert tick(conn, "p")[0]["jobs_admitted"] == 2


def test_what_a_trigger_on_the_queue_lacks_for_a_job_is_that_jobs_fault(
    conn: psycopg.Connection, clock: Clock, tick: Tick
):
    conn.execute("""select dispatch_define_policy('p', '{"gates": []}')""")
    conn.execute("select dispatch_stage('p', 'fine'), dispatch_stage('p', 'audited')")
    conn.execute(
        """
        create function audit() returns trigger language plpgsql as $$
        begin insert into no_such_table values (new.id); return new; end $$;
        create trigger audit before insert on procrastinate_jobs for each row
        when (new.task_name = 'audited') execute function audit()
        """
    )
    result = tick(conn, "p")[0]
    assert (result["jobs_admitted"], result["handoff_failures"]) == (1, 1)
