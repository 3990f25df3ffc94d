"""Who enqueues waits for nobody.

Every enqueuer here gives up when it has to wait for a lock, so a wait fails the test; the last
tests show that it does. Case: an enqueue waits until somebody's long transaction, which enqueued
for the same key, commits. Case: concurrent enqueues of several keys in opposite orders deadlock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from procrastinate import App, SyncPsycopgConnector
from procrastinate.exceptions import ConnectorException
from psycopg.conninfo import make_conninfo

from pydispatch import Concurrency, Dispatch
from tests.concurrency.conftest import Background
from tests.concurrency.stops import POINTS, Stops
from tests.concurrency.support import (
    IMPATIENT,
    assert_balanced,
    column,
    define,
    finish,
    stage,
    start,
    tick,
    value,
)
from tests.fixtures import Connect

Enqueuer = Callable[[str], int]


class Application:
    """An application whose task ``t`` follows the policy ``p``."""

    def __init__(self, conninfo: str) -> None:
        self.app = App(connector=SyncPsycopgConnector(conninfo=conninfo, min_size=1, max_size=1))
        self.dispatch = Dispatch(self.app)

        @self.dispatch.policy("p", partition_by="k", gates=[Concurrency(max=2)])
        @self.app.task(name="t")
        def t(k: str) -> None: ...

        self.task = t


@pytest.fixture
def application(dsn: str) -> Iterator[Application]:
    application = Application(make_conninfo(dsn, options=IMPATIENT))
    with application.app.open():
        application.dispatch.sync()
        yield application


@pytest.fixture
def enqueuers(application: Application, connect: Connect) -> dict[str, Enqueuer]:
    """Every way to enqueue a job of a key; none of them waits for a lock."""
    conn = connect(options=IMPATIENT)
    task = application.task

    def in_a_transaction(key: str) -> int:
        with conn.transaction():
            return int(task.configure(connection=conn).defer(k=key))

    return {
        "dispatch_stage": lambda key: value(
            conn, "select dispatch_stage('p', 't', jsonb_build_object('k', %s::text))", key
        ),
        "dispatch_stage_many": lambda key: stage(conn, key, key)[0],
        "defer": lambda key: task.defer(k=key),
        "batch_defer": lambda key: task.batch_defer({"k": key}, {"k": key})[0],
        "defer in a transaction": in_a_transaction,
    }


def has_to_wait(enqueue: Enqueuer, argument: str) -> bool:
    """Enqueue, and tell whether that gave up waiting for a lock."""
    try:
        enqueue(argument)
    except (psycopg.Error, ConnectorException) as error:
        cause = error.__cause__ if isinstance(error, ConnectorException) else error
        if isinstance(cause, (psycopg.errors.LockNotAvailable, psycopg.errors.QueryCanceled)):
            return True
        raise
    return False


# What may be in the middle of a transaction. Each is called with a connection that is in one.

HOLDERS: dict[str, Callable[[Any], object]] = {
    "a tick that was stopped after dispatch_admit": lambda it: it.conn.execute(
        "select * from dispatch_admit('p')"
    ),
    "a tick": lambda it: it.conn.execute("select * from dispatch_tick('p')"),
    "a tick of all policies": lambda it: it.conn.execute("select * from dispatch_tick()"),
    "a driver's tick": lambda it: it.application.dispatch.tick(it.conn, "p"),
    "an enqueuer": lambda it: stage(it.conn, "known", "new"),
    "a sweep": lambda it: it.sweep(),
    "a changed policy": lambda it: define(
        it.conn, gates=[{"type": "concurrency", "max": 1}], admission_batch_size=7
    ),
    "the application's sync": lambda it: it.application.dispatch.sync(it.conn),
    "a dropped policy": lambda it: it.conn.execute("select dispatch_drop_policy('p', true)"),
    "a pause": lambda it: it.conn.execute("select dispatch_pause('p'), dispatch_pause('p', 'new')"),
    "a resume": lambda it: it.conn.execute(
        "select dispatch_resume('p'), dispatch_resume('p', 'known')"
    ),
    "a cancelled job": lambda it: it.conn.execute(
        "select dispatch_cancel(max(id)) from dispatch_staged_jobs"
    ),
    "a force-admit": lambda it: it.conn.execute("select dispatch_force_admit('p', 'known', 1)"),
    "a drain": lambda it: it.conn.execute("select dispatch_drain('p')"),
    "a worker that fetches a job": lambda it: start(it.conn),
    "a worker that finishes a job": lambda it: finish(it.conn, it.running),
    "a worker that retries a job": lambda it: it.conn.execute(
        "select procrastinate_retry_job_v2(%s, null, null, null, null)", [it.running]
    ),
}


class Holder:
    """What ``HOLDERS`` work with: a policy that has a partition with work in it."""

    def __init__(self, conn: psycopg.Connection, application: Application) -> None:
        self.conn = conn
        self.application = application
        stage(conn, *["known"] * 5)
        assert tick(conn) == 2
        running = start(conn)
        assert running is not None
        self.running = running

    def sweep(self) -> None:
        """Sweep so that there is something of everything to do."""
        conn = self.conn
        conn.execute("select dispatch_set('partition_inactive_after', 1)")
        conn.execute(
            "insert into dispatch_partitions (id, policy_name, partition_key, first_seen_at)"
            " values (dispatch_partition_id('p', 'idle'), 'p', 'idle', '2000-01-01')"
        )
        conn.execute(
            "insert into dispatch_inflight_jobs"
            " values (-1, dispatch_partition_id('p', 'known'), now(), null, 'p', 'known')"
        )
        conn.execute("update dispatch_partitions set in_flight_count = 9")
        conn.commit()
        swept: dict[str, int] = dict(
            conn.execute("select task, affected from dispatch_sweep()").fetchall()
        )
        assert swept["slots of ended jobs"] == 1
        assert swept["counters set right"] == 2


@pytest.mark.parametrize("name", HOLDERS)
def test_an_enqueuer_does_not_wait_for_the_open_transaction_of(
    name, application, enqueuers, connect
):
    holder = Holder(connect(autocommit=False), application)
    holder.conn.commit()
    HOLDERS[name](holder)
    assert holder.conn.info.transaction_status == psycopg.pq.TransactionStatus.INTRANS
    for way, enqueue in enqueuers.items():
        for key in ("known", "new"):
            assert not has_to_wait(enqueue, key), f"{way} of the key {key} waited"
    if "dispatch_admit" in name:
        holder.conn.rollback()
    else:
        holder.conn.commit()


@pytest.mark.parametrize("point", POINTS)
def test_an_enqueuer_does_not_wait_for_a_tick_that_stands_still_at(
    point, stops: Stops, conn, connect, enqueuers, background: Background
):
    define(conn, gates=[{"type": "concurrency", "max": {"sql": "stops.one", "default": None}}])
    stage(conn, "known", "known", "new")
    ticking = connect(options=Stops.options(point))
    ticked = background(tick, ticking)
    stops.wait(ticking.info.backend_pid)
    ids = [enqueue(key) for enqueue in enqueuers.values() for key in ("known", "new", "newer")]
    assert not ticked.done()
    stops.release()
    assert ticked.result() == 2
    assert_balanced(conn)
    assert set(ids) <= set(column(conn, "select id from dispatch_staged_jobs"))


def test_enqueuers_of_a_new_key_do_not_wait_for_each_other(conn, connect, enqueuers):
    first = connect(autocommit=False)
    (first_id,) = stage(first, "new")
    ids = [enqueue("new") for enqueue in enqueuers.values()]
    assert tick(conn) == 2
    first.commit()
    waiting = column(conn, "select id from dispatch_staged_jobs order by id")
    admitted = column(conn, "select job_id from dispatch_admissions order by job_id")
    assert admitted == sorted(ids)[:2]
    assert first_id in waiting, "it was not there when its elders were counted"
    assert_balanced(conn)


def test_transactions_that_enqueue_keys_in_opposite_orders_do_not_deadlock(conn, connect, dsn):
    define(conn)
    one, other = (connect(autocommit=False, options=IMPATIENT) for _ in range(2))
    stage(one, "a")
    stage(other, "b")
    stage(one, "b")
    stage(other, "a")
    one.commit()
    other.commit()
    assert tick(conn) == 4


def test_statements_that_enqueue_many_keys_in_opposite_orders_do_not_deadlock(conn, connect):
    define(conn)
    keys = [f"key {n}" for n in range(200)]
    one, other = (connect(autocommit=False, options=IMPATIENT) for _ in range(2))
    for _ in range(3):
        stage(one, *keys)
        stage(other, *reversed(keys))
    other.commit()
    one.commit()
    assert_balanced(conn)
    assert column(conn, "select distinct pending_count from dispatch_partitions") == [6]


def test_many_enqueuers_at_once_while_ticks_run_all_get_through(
    conn, connect, application, background: Background
):
    """Eight enqueuers, all keys in every order, while two ticks fold and admit what they stage."""
    sessions = [connect(options="-c lock_timeout=5s -c statement_timeout=20s") for _ in range(8)]

    def enqueue(session: psycopg.Connection, n: int) -> int:
        keys = [f"key {(n * 3 + i) % 8}" for i in range(8)]
        for _ in range(15):
            with session.transaction():
                for key in keys if n % 2 else reversed(keys):
                    stage(session, key)
        return 15 * 8

    futures = [background(enqueue, session, n) for n, session in enumerate(sessions)]
    ticking = [connect(), connect()]
    admitted = 0
    while not all(future.done() for future in futures):
        admitted += sum(future.result() for future in [background(tick, c) for c in ticking])
    staged = sum(future.result() for future in futures)
    admitted += tick(conn)
    assert staged == admitted + value(conn, "select count(*) from dispatch_staged_jobs")
    assert set(column(conn, "select in_flight_count from dispatch_partitions")) == {2}
    assert_balanced(conn)


# -- the enqueuers of these tests do notice when they have to wait


def test_a_counter_for_each_key_would_make_every_enqueuer_wait(conn, connect, enqueuers):
    """What the tests above guard against, put in by hand: a row that each enqueue updates."""
    conn.execute("create table counters (key text primary key, n integer)")
    conn.execute(
        """
        create function count_staged() returns trigger language plpgsql as $$
        begin
          insert into counters values (new.partition_key, 1)
          on conflict (key) do update set n = counters.n + 1;
          return new;
        end $$;
        create trigger count_staged before insert on dispatch_staged_jobs
          for each row execute function count_staged();
        """
    )
    other = connect(autocommit=False)
    stage(other, "new")
    for way, enqueue in enqueuers.items():
        assert has_to_wait(enqueue, "new"), way


def test_only_a_queueing_lock_is_waited_for(conn, connect, enqueuers, application):
    other = connect(autocommit=False)
    other.execute("select dispatch_stage('p', 't', p_queueing_lock => 'one')")
    impatient = connect(options=IMPATIENT)
    ways: list[Enqueuer] = [
        lambda lock: value(
            impatient, "select dispatch_stage('p', 't', p_queueing_lock => %s)", lock
        ),
        lambda lock: application.task.configure(queueing_lock=lock).defer(k="a"),
    ]
    for n, enqueue in enumerate(ways):
        assert not has_to_wait(enqueue, f"another {n}")
        assert has_to_wait(enqueue, "one")
    other.rollback()
    assert not has_to_wait(ways[0], "one")
