"""What a tick hands to procrastinate, in SQL and in Python alike; what it does with bad jobs."""

from __future__ import annotations

import dataclasses
import datetime
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from procrastinate import App, PsycopgConnector, SyncPsycopgConnector, exceptions
from psycopg.rows import dict_row
from psycopg.types.json import Jsonb

from pydispatch import Dispatch, errors
from tests.support import wait_for

UTC = datetime.timezone.utc


def define(conn: psycopg.Connection, name: str = "p", **definition: Any) -> None:
    conn.execute(
        "select dispatch_define_policy(%s, %s)",
        [name, Jsonb({"partition_by": ["k"], **definition})],
    )


def stage(conn: psycopg.Connection, *jobs: dict[str, Any], policy: str = "p") -> list[int]:
    """Stage jobs of the task ``t`` with some keys given."""
    cursor = conn.execute(
        "select dispatch_stage_many(%s, %s)",
        [policy, Jsonb([{"task_name": "t", **job} for job in jobs])],
    )
    return [row[0] for row in cursor.fetchall()]


def queued(conn: psycopg.Connection) -> list[dict[str, Any]]:
    cursor = conn.cursor(row_factory=dict_row)
    return cursor.execute("select * from procrastinate_jobs order by id").fetchall()


def count(conn: psycopg.Connection, table: str) -> int:
    row = conn.execute(f"select count(*) from {table}").fetchone()
    assert row is not None
    return int(row[0])


def defer_other(conn: psycopg.Connection, queueing_lock: str) -> None:
    """Queue a job of the task ``other`` past all policies."""
    conn.execute(
        "select procrastinate_defer_jobs_v1(array["
        "row('default', 'other', 0, null, %s, '{}', null)::procrastinate_job_to_defer_v1])",
        [queueing_lock],
    )


def refuse_poison(conn: psycopg.Connection) -> None:
    """Let procrastinate's table refuse jobs with an argument ``poison``, and log each try."""
    conn.execute("create sequence tries")
    conn.execute(
        """
        create function refuse_poison() returns trigger language plpgsql as $$
        begin
          perform nextval('tries');
          raise exception 'poison %', new.args ->> 'poison';
        end
        $$
        """
    )
    conn.execute(
        "create trigger refuse_poison before insert on procrastinate_jobs for each row"
        " when (new.args ? 'poison') execute function refuse_poison()"
    )


# -- by both ways to tick


def test_a_job_arrives_as_it_was_staged(conn, tick):
    define(conn)
    moment = datetime.datetime(2020, 1, 31, 12, 30, 0, 123456, tzinfo=UTC)
    args = {"k": "ü", "deep": [{"n": 1.5, "none": None, "yes": True}], "big": 2**60}
    stage(
        conn,
        {
            "args": args,
            "queue_name": "http",
            "priority": -7,
            "lock": "l",
            "queueing_lock": "q",
            "scheduled_at": moment.isoformat(),
        },
    )
    tick(conn)
    (row,) = queued(conn)
    assert (row["task_name"], row["queue_name"], row["priority"]) == ("t", "http", -7)
    assert (row["lock"], row["queueing_lock"], row["scheduled_at"]) == ("l", "q", moment)
    assert (row["args"], row["attempts"], row["status"]) == (args, 0, "todo")
    assert row["abort_requested"] is False


def test_jobs_are_admitted_in_turns_and_queued_in_the_order_of_staging(conn, tick):
    define(conn)
    ids = stage(conn, *({"args": {"k": n // 3, "n": n}} for n in range(9)))
    with conn.transaction(force_rollback=True):
        query = "select (args ->> 'k')::int, (args ->> 'n')::int from dispatch_admit('p')"
        admitted = conn.execute(query).fetchall()
    assert [sorted(key for key, _ in admitted[turn : turn + 3]) for turn in (0, 3, 6)] == [
        [0, 1, 2]
    ] * 3
    for key in range(3):
        turns = [n for of, n in admitted if of == key]
        assert turns == sorted(turns)
    tick(conn)
    assert [(row["id"], row["args"]["n"]) for row in queued(conn)] == [
        *zip(ids, range(9), strict=True)
    ]


def test_the_result_says_what_was_done(conn, tick):
    define(conn, gates=[{"type": "concurrency", "max": 2}])
    define(conn, "empty")
    stage(conn, *({"args": {"k": n % 2}} for n in range(10)))
    (empty, result) = tick(conn)
    assert result.pop("duration_ms") > 0
    assert result == {
        "policy_name": "p",
        "partitions_seen": 2,
        "partitions_admitted": 2,
        "partitions_denied": 0,
        "jobs_admitted": 4,
        "handoff_failures": 0,
        "denied_reasons": {},
    }
    assert (empty["policy_name"], empty["partitions_seen"]) == ("empty", 0)


def test_the_result_says_why_nothing_was_admitted(conn, tick):
    define(conn, gates=[{"type": "concurrency", "max": 0}])
    stage(conn, *({"args": {"k": n % 2}} for n in range(10)))
    (result,) = tick(conn, "p")
    assert (result["partitions_seen"], result["partitions_denied"]) == (2, 2)
    assert result["denied_reasons"] == {"max_zero": 2}
    assert (result["partitions_admitted"], result["jobs_admitted"]) == (0, 0)


def test_an_unknown_policy_is_named(conn, tick):
    with pytest.raises(errors.UnknownPolicy, match="no such policy"):
        tick(conn, "no such policy")


def test_a_tick_belongs_to_the_callers_transaction(conn, connect, tick):
    define(conn)
    stage(conn, {"args": {"k": 1}})
    ticking = connect(autocommit=False)
    tick(ticking)
    assert (len(queued(ticking)), len(queued(conn))) == (1, 0)
    ticking.rollback()
    assert (count(conn, "dispatch_staged_jobs"), len(queued(conn))) == (1, 0)
    tick(ticking)
    ticking.commit()
    assert (count(conn, "dispatch_staged_jobs"), len(queued(conn))) == (0, 1)


def test_a_tick_leaves_the_callers_settings_alone(conn, connect, tick):
    define(conn)
    stage(conn, {"args": {"k": 1}})
    ticking = connect(autocommit=False)
    ticking.execute("set local lock_timeout to '7s'")
    tick(ticking)
    assert ticking.execute("show lock_timeout").fetchone() == ("7s",)


def test_poison_is_set_aside_and_its_neighbours_are_handed_off(conn, tick):
    define(conn, admission_batch_size=1000, gates=[{"type": "throttle", "rate": 1000, "per": 1}])
    refuse_poison(conn)
    ids = stage(
        conn,
        *(
            {"args": {"k": n % 4, **({"poison": n} if n in (3, 77, 78) else {})}}
            for n in range(200)
        ),
    )
    (result,) = tick(conn, "p")
    assert (result["jobs_admitted"], result["handoff_failures"]) == (197, 3)
    dead = conn.execute("select id, error from dispatch_dead_jobs order by id").fetchall()
    assert [row[0] for row in dead] == [ids[3], ids[77], ids[78]]
    assert dead[0][1] == "poison 3 (SQLSTATE P0001)"
    assert count(conn, "dispatch_staged_jobs") == 0
    assert [row["args"]["k"] for row in queued(conn)] != []
    tick(conn, "p")
    assert count(conn, "dispatch_dead_jobs") == 3


def test_poison_spends_no_token(conn, tick, clock):
    define(conn, gates=[{"type": "throttle", "rate": 10, "per": 10}])
    refuse_poison(conn)
    stage(conn, *({"args": {"k": 1, "poison": n}} for n in range(5)))
    tick(conn, "p")
    assert count(conn, "dispatch_dead_jobs") == 5
    stage(conn, *({"args": {"k": 1}} for n in range(20)))
    (result,) = tick(conn, "p")
    assert result["jobs_admitted"] == 10


def test_what_procrastinate_cannot_store_is_set_aside(conn, tick):
    define(conn)
    stage(
        conn,
        {"args": {"k": 1}},
        {"args": {"k": 1}, "lock": "".join(chr(97 + n * 7 % 26) for n in range(100_000)) * 3},
    )
    conn.execute("alter table procrastinate_jobs add check (length(lock) < 1000)")
    (result,) = tick(conn, "p")
    assert (result["jobs_admitted"], result["handoff_failures"]) == (1, 1)
    (error,) = conn.execute("select error from dispatch_dead_jobs").fetchone()
    assert "23514" in error


def test_a_held_queueing_lock_delays_its_own_job_alone(conn, tick, clock):
    define(conn)
    stage(conn, *({"args": {"k": 1, "n": n}, "queueing_lock": f"q{n}"} for n in range(20)))
    defer_other(conn, "q7")
    (result,) = tick(conn, "p")
    assert (result["jobs_admitted"], result["handoff_failures"]) == (19, 0)
    assert conn.execute("select args -> 'n' from dispatch_staged_jobs").fetchall() == [(7,)]
    (result,) = tick(conn, "p")
    assert result["jobs_admitted"] == 0
    conn.execute("update procrastinate_jobs set status = 'doing' where task_name = 'other'")
    clock.advance(2)
    (result,) = tick(conn, "p")
    assert result["jobs_admitted"] == 1
    assert count(conn, "dispatch_staged_jobs") == 0


def test_a_queueing_lock_in_an_open_transaction_holds_nobody_up(conn, connect, tick):
    define(conn)
    stage(conn, {"args": {"k": 1}, "queueing_lock": "q"}, {"args": {"k": 1}})
    stranger = connect(autocommit=False)
    defer_other(stranger, "q")
    conn.execute("set statement_timeout to '5s'")
    (result,) = tick(conn, "p")
    assert (result["jobs_admitted"], result["handoff_failures"]) == (1, 0)
    assert count(conn, "dispatch_staged_jobs") == 1


# case: a tick of 400 jobs takes 5.3 s where somebody's open transaction holds 20 queueing locks
@pytest.mark.parametrize("held", [1, 20, 150])
def test_many_queueing_locks_in_an_open_transaction_hold_up_their_own_jobs_alone(
    conn, connect, tick, clock, held
):
    define(conn, admission_batch_size=1000)
    jobs: list[dict[str, Any]] = [{"args": {"k": 1}, "queueing_lock": f"q{n}"} for n in range(400)]
    stage(conn, *jobs, *({"args": {"k": 2}} for _ in range(50)))
    stranger = connect(autocommit=False)
    for n in range(held):
        defer_other(stranger, f"q{n * 400 // held}")
    conn.execute("set statement_timeout to '20s'")
    (result,) = tick(conn, "p")
    assert (result["jobs_admitted"], result["handoff_failures"]) == (450 - held, 0)
    assert count(conn, "dispatch_staged_jobs") == held
    stranger.rollback()
    clock.advance(2)
    (result,) = tick(conn, "p")
    assert result["jobs_admitted"] == held
    assert sorted(row["queueing_lock"] for row in queued(conn) if row["queueing_lock"]) == sorted(
        job["queueing_lock"] for job in jobs
    )


def test_whoever_holds_the_whole_table_is_waited_for_once(conn, connect, admin, tick):
    define(conn)
    stage(conn, *({"args": {"k": number}} for number in range(30)))
    stranger = connect(autocommit=False)
    stranger.execute("lock table procrastinate_jobs in share mode")
    with ThreadPoolExecutor() as executor:
        ticking = executor.submit(tick, conn, "p")
        # One statement waits, and longer than the hand-off lets any lock be waited for.
        waits = (
            "select pid from pg_stat_activity where pid = %s and wait_event_type = 'Lock'"
            " and clock_timestamp() - query_start > '400 ms'"
        )
        wait_for(lambda: admin.execute(waits, [conn.info.backend_pid]).fetchone(), timeout=5)
        stranger.rollback()
        (result,) = ticking.result()
    assert result["jobs_admitted"] == 30


def test_one_policy_that_fails_stops_no_other(conn, tick):
    for name in ("a", "b", "c"):
        define(conn, name)
        stage(conn, {"args": {"k": 1}}, policy=name)
    conn.execute(
        """
        create function fail() returns trigger language plpgsql as $$
        begin raise exception 'no'; end
        $$;
        create trigger fail before insert on dispatch_tick_samples for each row
        when (new.policy_name = 'b') execute function fail();
        """
    )
    results = tick(conn)
    assert [result["policy_name"] for result in results] == ["a", "b", "c"]
    assert [result["jobs_admitted"] for result in results] == [1, 0, 1]
    assert results[1]["denied_reasons"] == {"tick_error": 1}
    assert conn.execute("select policy_name from dispatch_staged_jobs").fetchall() == [("b",)]


# -- by the driver's way


class Application:
    """An application that hands off jobs of its task ``t``, alias ``alias``."""

    def __init__(self, dsn: str, **options: Any) -> None:
        self.app = App(connector=SyncPsycopgConnector(conninfo=dsn, **options))
        self.dispatch = Dispatch(self.app)
        self.app.task(name="t", aliases=["alias"])(lambda **_: None)


def test_tasks_are_known_by_name_and_by_alias(dsn, conn):
    define(conn)
    stage(conn, *({"args": {"k": 1}, "task_name": name} for name in ("t", "alias", "other")))
    (result,) = Application(dsn).dispatch.tick(conn, "p")
    assert (result.jobs_admitted, result.handoff_failures) == (2, 1)
    assert [row["task_name"] for row in queued(conn)] == ["t", "alias"]
    dead = conn.execute("select task_name, error from dispatch_dead_jobs").fetchall()
    assert dead == [("other", "TaskNotFound: unknown task 'other'")]


def test_tasks_are_imported_before_they_are_judged(dsn, conn, monkeypatch, tmp_path):
    application = Application(dsn)
    (tmp_path / "far_away_tasks.py").write_text(
        "from tests import test_handoff\n"
        "test_handoff.importing.task(name='far.away')(lambda **_: None)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("tests.test_handoff.importing", application.app, raising=False)
    application.app.import_paths = ["far_away_tasks"]
    define(conn)
    stage(conn, {"args": {"k": 1}, "task_name": "far.away"})
    (result,) = application.dispatch.tick(conn, "p")
    assert (result.jobs_admitted, result.handoff_failures) == (1, 0)


def test_policies_that_only_other_applications_have_tasks_for_are_left_to_them(dsn, conn):
    for name in ("ours", "theirs", "shared", "nobodys"):
        define(conn, name)
        stage(conn, {"args": {"k": 1}}, policy=name)
    for task, policy in [("t", "ours"), ("x", "theirs"), ("alias", "shared"), ("y", "shared")]:
        conn.execute("select dispatch_map_task(%s, %s)", [task, policy])
    results = Application(dsn).dispatch.tick(conn)
    assert [result.policy_name for result in results] == ["nobodys", "ours", "shared"]
    assert count(conn, "dispatch_staged_jobs") == 1


def dumps(value: Any) -> str:
    return json.dumps({"wrapped": value})


def loads(data: bytes) -> Any:
    return json.loads(data.decode())["wrapped"]


def test_the_applications_own_json_is_read_and_written(dsn, conn):
    define(conn)
    application = Application(dsn, json_dumps=dumps, json_loads=loads)
    stage(conn, {"args": {"wrapped": {"n": 1}}})
    application.dispatch.tick(conn, "p")
    (row,) = queued(conn)
    assert row["args"] == {"wrapped": {"n": 1}}


def test_arguments_that_cannot_be_read_harm_their_own_job_alone(dsn, conn):
    define(conn)
    application = Application(dsn, json_dumps=dumps, json_loads=loads)
    ids = stage(conn, *({"args": {"wrapped": {}}} for _ in range(3)), {"args": {"k": 1}})
    (result,) = application.dispatch.tick(conn, "p")
    assert (result.jobs_admitted, result.handoff_failures) == (3, 1)
    dead = conn.execute("select id, error from dispatch_dead_jobs").fetchall()
    assert dead == [(ids[3], "KeyError: 'wrapped'")]


def test_arguments_are_handed_over_as_they_were_staged(dsn, conn):
    """Nothing is written anew: what an application's json_dumps has become does not matter."""

    def choosy(value: Any) -> str:
        raise TypeError("not today")

    define(conn)
    stage(conn, *({"args": {"n": n, "z": 1, "a": None}} for n in range(5)))
    (result,) = Application(dsn, json_dumps=choosy).dispatch.tick(conn, "p")
    assert (result.jobs_admitted, result.handoff_failures) == (5, 0)
    assert [row["args"] for row in queued(conn)] == [{"n": n, "z": 1, "a": None} for n in range(5)]


@pytest.mark.parametrize("policy", ["p", None])
def test_a_lost_connection_is_no_jobs_fault(dsn, conn, connect, policy):
    define(conn)
    stage(conn, *({"args": {"k": n}} for n in range(4)))
    ticking = connect()

    def lose(data: bytes) -> Any:
        conn.execute("select pg_terminate_backend(%s)", [ticking.info.backend_pid])
        return json.loads(data)

    with pytest.raises((psycopg.OperationalError, exceptions.ConnectorException)):
        Application(dsn, json_loads=lose).dispatch.tick(ticking, policy)
    assert (count(conn, "dispatch_staged_jobs"), count(conn, "dispatch_dead_jobs")) == (4, 0)


def test_what_is_not_settled_cannot_be_committed(conn, connect):
    define(conn)
    stage(conn, {"args": {"k": 1}})
    taking = connect(autocommit=False)
    assert len(taking.execute("select * from dispatch_admit('p')").fetchall()) == 1
    with pytest.raises(psycopg.DatabaseError) as caught:
        taking.commit()
    assert caught.value.sqlstate == errors.HandoffNotSettled.sqlstate
    assert count(conn, "dispatch_staged_jobs") == 1


@pytest.mark.parametrize("app_is_open", [False, True])
async def test_the_asynchronous_tick_does_the_same(dsn, conn, app_is_open):
    define(conn)
    refuse_poison(conn)
    stage(conn, *({"args": {"k": n}, "queueing_lock": f"q{n}"} for n in range(20)))
    stage(conn, {"args": {"k": 5, "poison": 1}}, {"args": {"k": 5}, "task_name": "other"})
    defer_other(conn, "q7")
    application = Application(dsn)
    if app_is_open:
        application.app.connector = PsycopgConnector(conninfo=dsn)
        await application.app.connector.open_async()
    try:
        async with await psycopg.AsyncConnection.connect(dsn) as connection:
            (result,) = await application.dispatch.tick_async(connection)
    finally:
        await application.app.connector.close_async() if app_is_open else None
    values = dataclasses.asdict(result)
    assert values.pop("duration_ms") > 0
    assert (result.jobs_admitted, result.handoff_failures) == (19, 2)
    assert len(queued(conn)) == 20


async def test_a_synchronous_tick_while_the_application_is_open_for_async(dsn, conn):
    define(conn)
    stage(conn, {"args": {"k": 1}})
    app = App(connector=PsycopgConnector(conninfo=dsn))
    app.task(name="t")(lambda k: None)
    async with app.open_async():
        (result,) = Dispatch(app).tick(conn)
    assert result.jobs_admitted == 1
