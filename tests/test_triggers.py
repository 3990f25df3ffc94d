"""The triggers on procrastinate's table: they work for everybody and fail nobody's job."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.types.json import Jsonb

from tests.fixtures import Connect
from tests.support import Clock

Act = Callable[[psycopg.Connection, int], Any]


def call(function: str) -> Act:
    """Call one of procrastinate's functions for a job."""
    return lambda conn, job_id: conn.execute(f"select procrastinate_{function}".encode(), [job_id])


def start(conn: psycopg.Connection, job_id: int) -> None:
    conn.execute(
        "update procrastinate_jobs set status = 'doing' where id = %s and status = 'todo'", [job_id]
    )


def then(*acts: Act) -> Act:
    def act(conn: psycopg.Connection, job_id: int) -> None:
        for each in acts:
            each(conn, job_id)

    return act


succeed = then(start, call("finish_job_v1(%s, 'succeeded', false)"))
fail = then(start, call("finish_job_v1(%s, 'failed', false)"))
retry = then(start, call("retry_job_v2(%s, null, null, null, null)"))

# What ends a job, and the status that it then has (None: no row).
ENDS: dict[str, tuple[Act, str | None]] = {
    "succeeds": (succeed, "succeeded"),
    "fails": (fail, "failed"),
    "is deleted on success": (then(start, call("finish_job_v1(%s, 'succeeded', true)")), None),
    "is aborted": (
        then(
            start,
            call("cancel_job_v1(%s, true, false)"),
            call("finish_job_v1(%s, 'aborted', false)"),
        ),
        "aborted",
    ),
    "is cancelled": (call("cancel_job_v1(%s, false, false)"), "cancelled"),
    "is deleted": (call("cancel_job_v1(%s, false, true)"), None),
    "is purged": (
        lambda conn, job_id: conn.execute("delete from procrastinate_jobs where id = %s", [job_id]),
        None,
    ),
}
RETRIES: dict[str, Act] = {
    "by the worker": retry,
    "by the older function": then(start, call("retry_job_v1(%s, null, null, null, null)")),
    "by hand": then(fail, call("retry_job_v2(%s, null, null, null, null)")),
}


@pytest.fixture
def admit(conn: psycopg.Connection, clock: Clock) -> Callable[..., int]:
    """A function that defines a policy with room for one job and admits one; returns its id."""

    def admit(**more: Any) -> int:
        definition = {"gates": [{"type": "concurrency", "max": 1, "full_backoff": 3600}], **more}
        conn.execute("select dispatch_define_policy('p', %s)", [Jsonb(definition)])
        conn.execute("select dispatch_stage('p', 'subject', p_lock => 'lock')")
        conn.execute("select dispatch_stage('p', 'follower')")
        assert tick(conn) == 1
        return int(one(conn, "select job_id from dispatch_inflight_jobs"))

    return admit


def one(conn: psycopg.Connection, query: str, *arguments: Any) -> Any:
    """Return the only column of the first row, None when there is no row."""
    row = conn.execute(query.encode(), arguments).fetchone()
    return row[0] if row else None


def tick(conn: psycopg.Connection) -> int:
    """Tick, and return the number of jobs admitted."""
    return int(one(conn, "select jobs_admitted from dispatch_tick('p')"))


def status(conn: psycopg.Connection, job_id: int) -> str | None:
    query = "select status::text from procrastinate_jobs where id = %s"
    found: str | None = one(conn, query, job_id)
    return found


def staged(conn: psycopg.Connection) -> int | None:
    """Return the row in procrastinate that the waiting subject has; None when it does not wait."""
    query = "select id from dispatch_staged_jobs where task_name = 'subject' and parked"
    found: int | None = one(conn, query)
    return found


def slots(conn: psycopg.Connection) -> int:
    return int(one(conn, "select count(*) from dispatch_inflight_jobs"))


# -- a role that knows nothing of dispatch


@pytest.fixture
def worker(conn: psycopg.Connection, connect: Connect) -> psycopg.Connection:
    """A worker's connection: it has rights on procrastinate's tables only, and decoys in its way.

    Its search path leads to tables of our names first, which are no use; so do its temporary ones.
    """
    role = sql.Identifier(f"worker of {conn.info.dbname}")
    conn.execute(sql.SQL("create role {} login").format(role))
    conn.execute(sql.SQL("create schema decoys authorization {}").format(role))
    tables = conn.execute(
        "select format('grant all on %I to ', c.relname) from pg_class as c"
        " where c.relnamespace = 'public'::regnamespace and c.relkind in ('r', 'S')"
        " and c.relname like 'procrastinate%'"
    ).fetchall()
    for (grant,) in tables:
        conn.execute(sql.SQL(grant) + role)
    worker = connect(user=f"worker of {conn.info.dbname}")
    for (name,) in conn.execute(
        "select relname from pg_class where relnamespace = 'public'::regnamespace"
        " and relkind = 'r' and relname like 'dispatch%'"
    ).fetchall():
        worker.execute(sql.SQL("create table decoys.{} ()").format(sql.Identifier(name)))
        worker.execute(sql.SQL("create temporary table {} ()").format(sql.Identifier(name)))
    worker.execute("set search_path to decoys, public")
    return worker


def test_the_worker_of_these_tests_cannot_read_our_tables(worker):
    for table in ("dispatch_inbox", "dispatch_inflight_jobs", "dispatch_staged_jobs"):
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            worker.execute(f"table public.{table}")


@pytest.mark.parametrize("how", ENDS)
def test_a_role_without_rights_on_our_tables_frees_the_slot_when_a_job(conn, admit, worker, how):
    end, ended = ENDS[how]
    job_id = admit()
    end(worker, job_id)
    assert status(conn, job_id) == ended
    assert slots(conn) == 0
    assert tick(conn) == 1


@pytest.mark.parametrize("how", RETRIES)
def test_a_role_without_rights_on_our_tables_brings_a_job_back_when_it_is_retried(
    conn, admit, worker, how
):
    job_id = admit()
    RETRIES[how](worker, job_id)
    assert staged(conn) == job_id
    assert slots(conn) == 0
    assert one(conn, "select lock from procrastinate_jobs where id = %s", job_id) is None
    assert (
        one(conn, "select count(*) from procrastinate_events where at = dispatch_parked_until()")
        == 0
    )
    assert tick(conn) == 1
    assert one(conn, "select lock from procrastinate_jobs where id = %s", job_id) == "lock"


def test_a_role_without_rights_on_our_tables_retries_past_the_policy(conn, admit, worker):
    job_id = admit(retry_strategy="bypass")
    RETRIES["by hand"](worker, job_id)
    assert slots(conn) == 1
    assert tick(conn) == 0


def test_a_role_without_rights_on_our_tables_fetches_what_is_admitted(conn, admit, worker):
    job_id = admit()
    assert one(worker, "select id from procrastinate_fetch_job_v2(null, null)") == job_id


# -- a fault inside


FAULTS: dict[str, tuple[str, str]] = {
    "a table of ours is gone": (
        "alter table dispatch_inbox rename to inbox",
        "alter table inbox rename to dispatch_inbox",
    ),
    "a note is refused": (
        "alter table dispatch_inbox add constraint fault check (kind = 'nothing') not valid",
        "alter table dispatch_inbox drop constraint fault",
    ),
    "a function of ours is gone": (
        "alter function dispatch_channel() rename to channel",
        "alter function channel() rename to dispatch_channel",
    ),
}


@contextmanager
def fault(conn: psycopg.Connection, what: str) -> Iterator[list[str]]:
    """Break something, and mend it afterwards; yields the warnings that come meanwhile."""
    breaks, mends = FAULTS[what]
    warnings: list[str] = []

    def note(diagnostic: psycopg.errors.Diagnostic) -> None:
        if diagnostic.severity_nonlocalized == "WARNING":
            warnings.append(diagnostic.message_primary or "")

    conn.execute(breaks.encode())
    conn.add_notice_handler(note)
    yield warnings
    conn.remove_notice_handler(note)
    conn.execute(mends.encode())


@pytest.mark.parametrize("how", ENDS)
@pytest.mark.parametrize("what", FAULTS)
def test_no_job_fails_to_end_because_of_us_and_the_sweep_mends_it_when(conn, admit, what, how):
    end, ended = ENDS[how]
    job_id = admit()
    with fault(conn, what) as warnings:
        end(conn, job_id)
        assert status(conn, job_id) == ended
    assert [f"the slot of job {job_id} is freed by the next sweep" in w for w in warnings] == [True]
    assert slots(conn) == 1
    conn.execute("select dispatch_sweep()")
    assert slots(conn) == 0
    assert tick(conn) == 1


@pytest.mark.parametrize("how", RETRIES)
@pytest.mark.parametrize("strategy", ["restage", "bypass"])
@pytest.mark.parametrize("what", FAULTS)
def test_no_retry_fails_because_of_us_and_the_job_keeps_its_slot_when(
    conn, admit, what, strategy, how
):
    job_id = admit(retry_strategy=strategy)
    with fault(conn, what):
        RETRIES[how](conn, job_id)
    assert conn.execute(
        "select status::text, lock, scheduled_at, attempts > 0 from procrastinate_jobs"
        " where id = %s",
        [job_id],
    ).fetchone() == ("todo", "lock", None, True), "procrastinate retries it alone"
    assert staged(conn) is None
    conn.execute("select dispatch_sweep()")
    assert slots(conn) == 1
    assert tick(conn) == 0
    succeed(conn, job_id)
    assert slots(conn) == 0
    assert tick(conn) == 1


def test_an_event_that_cannot_be_forgotten_does_not_keep_a_job_from_being_retried(conn, admit):
    job_id = admit()
    conn.execute(
        "create function fault() returns trigger language plpgsql as"
        " $$ begin raise exception 'no'; end $$"
    )
    conn.execute(
        "create trigger fault before delete on procrastinate_events"
        " for each row execute function fault()"
    )
    retry(conn, job_id)
    assert staged(conn) == job_id
    assert slots(conn) == 0


def test_a_lock_on_the_slot_does_not_keep_a_job_with_a_lock_timeout_from_ending(
    conn, connect, admit
):
    job_id = admit()
    holder = connect(autocommit=False)
    holder.execute("select from dispatch_inflight_jobs for update")
    conn.execute("set lock_timeout to '50ms'")
    succeed(conn, job_id)
    assert status(conn, job_id) == "succeeded"
    holder.rollback()
    conn.execute("select dispatch_sweep()")
    assert slots(conn) == 0


def test_many_jobs_that_end_in_one_statement_free_their_slots(conn, clock):
    conn.execute("""select dispatch_define_policy('p', '{"gates": []}')""")
    for _ in range(20):
        conn.execute("select dispatch_stage('p', 'many')")
    assert tick(conn) == 20
    conn.execute("update procrastinate_jobs set status = 'doing' where id %% 2 = 0", [])
    conn.execute("delete from procrastinate_jobs")
    assert slots(conn) == 0
    conn.execute("select dispatch_fold('p', dispatch_now())")
    assert one(conn, "select in_flight_count from dispatch_partitions") == 0


def test_an_end_that_is_rolled_back_frees_nothing(conn, connect, admit):
    job_id = admit()
    with connect(autocommit=False) as worker:
        succeed(worker, job_id)
        worker.rollback()
    assert slots(conn) == 1
    assert tick(conn) == 0
