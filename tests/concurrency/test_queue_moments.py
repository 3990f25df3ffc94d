"""max_queued at each commit, told from what was written and not from looking now and then.

Also who starts when, while a tick follows each job: the queue that max_queued bounds is
procrastinate's, which runs in the order in which jobs were deferred.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

from tests.concurrency.support import (
    assert_balanced,
    column,
    define,
    finish,
    places,
    stage,
    start,
    value,
)
from tests.fixtures import create_database, start_server
from tests.support import wait_for
from tests.ticks import Tick

TICKS = 8
FINISHERS = 2

# Each transaction's change of how many jobs wait in the queue. A parked retry does not.
MOVES = """
create table moves (xid xid8 not null default pg_current_xact_id(), jobs integer not null);

create function queues(job procrastinate_jobs) returns integer language sql immutable
return (job.status = 'todo' and job.scheduled_at is distinct from dispatch_parked_until())::integer;

create function move() returns trigger language plpgsql as $$
declare
  v_jobs constant integer := queues(new) - case tg_op when 'UPDATE' then queues(old) else 0 end;
begin
  if v_jobs <> 0 then
    insert into moves (jobs) values (v_jobs);
  end if;
  return null;
end;
$$;
create trigger move after insert or update on procrastinate_jobs
  for each row execute function move();
"""

# Who hands over has seen the commits that made room before it commits itself. So in the order of
# the commits the queue is never longer than it was at some moment.
LONGEST = """
select max(queued), min(queued), (array_agg(queued order by at desc))[1]
from (
  select at, sum(jobs) over (order by at, jobs) as queued
  from (
    select pg_xact_commit_timestamp(xid::xid) as at, sum(jobs) as jobs from moves group by xid
  ) as commits
) as moments
"""


@pytest.fixture
def noting_dsn() -> Iterator[str]:
    """The conninfo of a database whose server notes when each transaction committed."""
    with start_server(track_commit_timestamp="on") as server:
        create_database(server, "moments")
        yield server.dsn("moments")


@pytest.mark.parametrize("bound", [1, 5, 50])
@pytest.mark.timeout(240)
def test_at_no_commit_are_more_queued_than_the_bound(noting_dsn: str, tick: Tick, bound: int):
    jobs = {1: 60, 5: 250, 50: 1200}[bound]
    done = threading.Event()

    def connect() -> psycopg.Connection:
        return psycopg.connect(noting_dsn, autocommit=True)

    with connect() as conn:
        conn.execute(MOVES)
        define(
            conn,
            max_queued=bound,
            admission_batch_size=20,
            gates=[{"type": "concurrency", "max": 30, "full_backoff": 0.001}],
        )
        ids = stage(conn, *(str(n % 7) for n in range(jobs // 2)))

        def ticks() -> None:
            with connect() as session:
                while not done.is_set():
                    tick(session, "p")

        def work(seed: int) -> None:
            dice = random.Random(seed)
            retried: set[int] = set()
            with connect() as session:
                while not done.is_set():
                    job_id = start(session)
                    if job_id is None:
                        continue
                    if job_id not in retried and dice.random() < 0.2:
                        retried.add(job_id)
                        session.execute(
                            "select procrastinate_retry_job_v2(%s, null, null, null, null)",
                            [job_id],
                        )
                    else:
                        finish(session, job_id, dice.choice(["succeeded", "failed"]))

        def cancel() -> None:
            with connect() as session:
                for job_id in ids[:: len(ids) // 10]:
                    session.execute("select dispatch_cancel_job(%s, false, false)", [job_id])

        with ThreadPoolExecutor(max_workers=TICKS + FINISHERS + 1) as threads, connect() as looking:
            others = [threads.submit(ticks) for _ in range(TICKS)]
            others += [threads.submit(work, seed) for seed in range(FINISHERS)]
            others += [threads.submit(cancel)]
            most = 0

            def settled() -> bool:
                nonlocal most
                queued = "select count(*) from procrastinate_jobs where status = 'todo'"
                most = max(most, value(looking, queued + " and priority = 0"))
                failed = [it for it in others if it.done() and it.exception()]
                return bool(failed) or not value(
                    looking,
                    "select (select count(*) from dispatch_staged_jobs)"
                    " + (select count(*) from dispatch_inflight_jobs)",
                )

            try:
                for n in range(jobs // 2):
                    ids += stage(conn, str(n % 5))
                wait_for(settled, timeout=180)
            finally:
                done.set()
            for other in others:
                other.result()

        longest, shortest, last = conn.execute(LONGEST).fetchall()[0]
        assert 0 < longest <= bound
        assert most <= bound
        assert (shortest, last) == (0, 0)
        assert column(conn, "select id from procrastinate_jobs order by id") == sorted(ids)
        assert set(places(conn).values()) <= {"ended", "cancelled"}
        assert_balanced(conn)


BOUND = 50
LOUD = 3000
QUIET = 20


# case: one account's burst of 10,000 delays everybody else's single job until the burst is through
@pytest.mark.timeout(180)
@pytest.mark.parametrize("room", [1, 7, BOUND])
def test_who_comes_later_does_not_wait_for_a_burst_while_ticks_go_on(
    conn: psycopg.Connection, tick: Tick, room: int
):
    """``room``: so many jobs start between two ticks."""
    define(conn, max_queued=BOUND)
    stage(conn, *["loud"] * LOUD)
    for _ in range(3):
        tick(conn, "p")
    started: list[int] = []

    def work() -> None:
        for _ in range(room):
            if (job_id := start(conn)) is not None:
                started.append(job_id)
                finish(conn, job_id)
        tick(conn, "p")

    while len(started) < 100:
        work()
    before = len(started)
    quiet = set(stage(conn, *(f"quiet {n}" for n in range(QUIET))))
    # What is queued goes before them, and what is handed over beside them.
    most = before + 2 * BOUND + QUIET + room
    while len(started) < most:
        work()
    waiting = quiet - set(started)
    assert not waiting, f"{len(waiting)} of {QUIET} wait after {len(started) - before} jobs"


@pytest.mark.timeout(180)
def test_who_comes_now_and_then_does_not_wait_for_a_burst(conn: psycopg.Connection, tick: Tick):
    define(conn, max_queued=10)
    stage(conn, *["loud"] * 1000)
    tick(conn, "p")
    late: dict[int, int] = {}
    waits: list[int] = []
    for n in range(300):
        if n % 20 == 0:
            late[stage(conn, f"quiet {n}")[0]] = n
        tick(conn, "p")
        job_id = start(conn)
        assert job_id is not None
        if job_id in late:
            waits.append(n - late.pop(job_id))
        finish(conn, job_id)
    assert max(waits, default=1000) <= 3 * 10
    assert len(late) <= 2
