"""Several ticks fold the inbox at once: no wait, no clash over a new key, sums come out right."""

from __future__ import annotations

import psycopg
import pytest

from tests.concurrency.conftest import Background
from tests.concurrency.stops import POINTS, Stops
from tests.concurrency.support import (
    IMPATIENT,
    assert_balanced,
    cap,
    column,
    define,
    finish,
    in_flight,
    stage,
    start,
    tick,
    value,
)
from tests.fixtures import Connect


def pending(conn: psycopg.Connection) -> dict[str, int]:
    rows = conn.execute("select partition_key, pending_count from dispatch_partitions").fetchall()
    return dict(rows)


@pytest.mark.parametrize("point", POINTS)
def test_a_tick_that_stands_still_leaves_other_keys_to_other_ticks(
    point, stops: Stops, conn, connect: Connect, background: Background
):
    define(conn, gates=[{"type": "concurrency", "max": {"sql": "stops.one", "default": None}}])
    stage(conn, "a", "a", "b")
    slow = connect(options=Stops.options(point))
    ticked = background(tick, slow)
    stops.wait(slow.info.backend_pid)
    stage(conn, "a", "c", "d", "d")
    quick = connect(options=IMPATIENT)
    assert tick(quick) == 2
    assert in_flight(conn) == {"c": 1, "d": 1}
    stage(conn, "b", "d", "e")
    assert tick(quick) == 1
    assert not ticked.done()
    stops.release()
    assert ticked.result() == 2
    assert_balanced(conn)
    assert pending(conn) == {"a": 2, "b": 1, "c": 0, "d": 2, "e": 0}
    assert in_flight(conn) == dict.fromkeys("abcde", 1)


def test_a_new_key_is_created_by_the_tick_that_holds_its_first_note(conn, connect: Connect):
    """The other tick neither waits for it nor creates the key a second time."""
    define(conn)
    stage(conn, "new")
    first = connect(autocommit=False)
    assert tick(first) == 1
    stage(conn, "new")
    assert tick(connect(options=IMPATIENT)) == 0
    first.commit()
    assert tick(conn) == 1
    assert_balanced(conn)


def test_a_note_of_a_new_key_that_was_committed_late_is_left_to_the_tick_that_creates_it(
    conn, connect: Connect
):
    """The late note has the lower id: a look at older notes alone does not show the other."""
    define(conn)
    late = connect(autocommit=False)
    stage(late, "new")
    stage(conn, "new")
    first = connect(autocommit=False)
    assert tick(first) == 1
    late.commit()
    assert tick(connect(options=IMPATIENT)) == 0
    first.commit()
    assert tick(conn) == 1
    assert_balanced(conn)


def test_where_a_fold_is_cut_off_a_new_key_is_still_created_by_one_tick_alone(
    conn, connect: Connect
):
    """However many late notes stand before those that the other tick holds."""
    define(conn)
    late = connect(autocommit=False)
    for _ in range(3):
        stage(late, "new")
    stage(conn, "new", "new")
    first, other = connect(autocommit=False), connect(options=IMPATIENT)
    fold = "select dispatch_fold('p', now(), 3)"
    assert value(first, fold) == 1
    late.commit()
    assert value(other, fold) == 0
    first.commit()
    assert value(other, fold) == 3
    assert_balanced(conn)
    assert pending(conn) == {"new": 5}


def test_a_new_key_is_created_once_however_many_ticks_fold_it(
    conn, connect: Connect, background: Background
):
    """Some enqueuers commit late, so notes become visible out of the order of their ids."""
    define(conn, **cap(3))
    sessions = [connect(autocommit=False, options=IMPATIENT) for _ in range(4)]
    enqueuers = [connect(autocommit=False) for _ in range(4)]

    def ticks(session: psycopg.Connection) -> int:
        admitted = 0
        for _ in range(3):
            admitted += tick(session)
            session.commit()
        return admitted

    staged = admitted = 0
    for round_ in range(25):
        keys = [f"{round_}.{n}" for n in range(5)]
        for enqueuer in enqueuers:
            staged += len(stage(enqueuer, *keys))
        futures = []
        for enqueuer, session in zip(reversed(enqueuers), sessions, strict=True):
            enqueuer.commit()
            futures.append(background(ticks, session))
        admitted += sum(future.result() for future in futures)
    admitted += tick(conn)
    assert staged == 500
    assert admitted == 375
    assert set(in_flight(conn).values()) == {3}
    assert_balanced(conn)


def test_notes_of_one_key_are_summed_whoever_folds_them(
    conn, connect: Connect, background: Background
):
    """Jobs come in, are cancelled and finish while four ticks fold."""
    define(conn, **cap(5))
    stopped = False

    def ticks(session: psycopg.Connection) -> None:
        while not stopped:
            tick(session)

    def enqueue(session: psycopg.Connection) -> int:
        for _ in range(40):
            first, *_ = stage(session, "one", "one", "other")
            session.execute("select dispatch_cancel(%s)", [first])
        return 40 * 3

    def work(session: psycopg.Connection) -> None:
        while not stopped:
            if (job_id := start(session)) is not None:
                finish(session, job_id)

    ticking = [background(ticks, connect(options=IMPATIENT)) for _ in range(4)]
    working = [background(work, connect()) for _ in range(2)]
    enqueuing = [background(enqueue, connect()) for _ in range(3)]
    staged = sum(future.result() for future in enqueuing)
    stopped = True
    for future in ticking + working:
        future.result()
    assert_balanced(conn)
    ended = value(conn, "select count(*) from dispatch_admissions")
    assert staged == ended + value(conn, "select count(*) from dispatch_staged_jobs")
    assert value(conn, "select sum(total_admitted) from dispatch_partitions") == value(
        conn, "select count(*) from procrastinate_jobs where status <> 'cancelled'"
    )


def test_a_fold_that_is_cut_off_goes_on_where_it_ended(conn, connect: Connect):
    define(conn)
    for n in range(40):
        stage(conn, f"key {n % 2}")
    one, other = (connect(autocommit=False, options=IMPATIENT) for _ in range(2))
    fold = "select dispatch_fold('p', now(), 10)"
    assert value(one, fold) == 10
    assert value(other, fold) == 0, "all keys are new, and the other tick is creating them"
    one.commit()
    other.commit()
    assert value(other, fold) == 20, "ten of them, and ten that it had put off"
    assert value(one, fold) == 0, "the rows of all keys are locked"
    other.commit()
    assert value(one, fold) == 10
    one.commit()
    assert_balanced(conn)
    assert column(conn, "select pending_count from dispatch_partitions") == [20, 20]


def test_notes_of_a_partition_that_somebody_holds_do_not_keep_those_behind_them(
    conn, connect: Connect
):
    """However many there are: they are put off, and folded in order once it is free again."""
    define(conn, **cap(1))
    stage(conn, "a")
    operator = connect(autocommit=False)
    assert value(operator, "select dispatch_force_admit('p', 'a', 1)") == 1
    conn.execute("select dispatch_stage('p', 't', '{\"k\": \"a\"}') from generate_series(1, 25009)")
    stage(conn, "c")
    quick = connect(options=IMPATIENT)
    ticks = 1
    while not tick(quick):
        ticks += 1
    assert ticks <= 4
    assert in_flight(conn) == {"c": 1}
    stage(conn, "a", "d")
    assert tick(quick) == 1, "what is put off is passed over from then on"
    operator.commit()
    while value(quick, "select count(*) from dispatch_inbox"):
        assert value(quick, "select dispatch_fold('p', now())") > 0
    assert_balanced(conn)
    assert pending(conn) == {"a": 25010, "c": 0, "d": 0}


def test_notes_of_a_key_that_somebody_is_creating_do_not_keep_those_behind_them(
    conn, connect: Connect
):
    define(conn)
    stage(conn, "a")
    creator = connect(autocommit=False)
    fold = "select dispatch_fold('p', now(), 10)"
    assert value(creator, fold) == 1
    for _ in range(25):
        stage(conn, "a")
    stage(conn, "c")
    folded = [value(conn, fold) for _ in range(3)]
    assert folded == [0, 0, 1]
    creator.rollback()
    while value(conn, "select count(*) from dispatch_inbox"):
        assert value(conn, fold) > 0
    assert pending(conn) == {"a": 26, "c": 1}
    assert_balanced(conn)


def test_the_newest_context_counts_and_the_shard_of_the_first_whatever_was_put_off(
    conn, connect: Connect
):
    define(conn, shard_by="s")
    holder = connect(autocommit=False)
    fold = "select dispatch_fold('p', now(), 4)"
    stage_ = "select dispatch_stage('p', 't', jsonb_build_object('k', 'a', 's', %s::text))"
    holder.execute(stage_, ["first"])
    holder.execute(fold)
    for n in range(12):
        conn.execute(stage_, [str(n)])
        value(conn, fold)
    assert value(conn, "select count(*) from dispatch_inbox where put_off")
    holder.commit()
    while value(conn, fold):
        pass
    assert conn.execute("select shard, context ->> 's' from dispatch_partitions").fetchall() == [
        ("first", "11")
    ]
    assert_balanced(conn)


def test_many_folds_at_once_put_off_and_set_aside_and_lose_nothing(
    conn, connect: Connect, background: Background
):
    """One partition is held all the time by somebody else, one note in ten cannot be folded."""
    define(conn)
    stage(conn, "held", *map(str, range(5)))
    assert_balanced(conn)
    conn.execute("update dispatch_partitions set pending_count = 9223372036854775000")
    holder = connect(autocommit=False)
    holder.execute("select from dispatch_partitions where partition_key = 'held' for update")
    for n in range(300):
        stage(conn, "held" if n % 2 else str(n % 5))
    conn.execute("update dispatch_inbox set newest_id = null, jobs = 2147483647 where id % 7 = 0")
    bad = value(conn, "select count(*) from dispatch_inbox where newest_id is null")

    def fold(session: psycopg.Connection) -> int:
        session.execute("set client_min_messages = error")
        return sum(value(session, "select dispatch_fold('p', now(), 20)") for _ in range(60))

    sessions = [connect(options=IMPATIENT) for _ in range(4)]
    folded = sum(job.result() for job in [background(fold, session) for session in sessions])
    left = value(conn, "select count(*) from dispatch_inbox")
    dead = value(conn, "select count(*) from dispatch_dead_notes")
    assert left == 150
    assert value(conn, "select count(*) from dispatch_inbox where not put_off") <= 20 / 2
    assert folded + left + dead == 300
    assert value(conn, "select bool_and(jobs = 2147483647) from dispatch_dead_notes")
    holder.rollback()
    folded += fold(conn)
    dead = value(conn, "select count(*) from dispatch_dead_notes")
    assert folded + dead == 300
    assert dead == bad


def test_a_policy_creates_as_many_partitions_as_come_whatever_others_create(conn, connect: Connect):
    """In one transaction, or policy by policy."""
    policies = [f"p{n}" for n in range(60)]
    for policy in policies:
        define(conn, policy)
        conn.execute(
            "select dispatch_stage_many(%s, (select jsonb_agg(jsonb_build_object('task_name', 't',"
            " 'args', jsonb_build_object('k', n))) from generate_series(1, 600) as n))",
            [policy],
        )
    with conn.transaction(force_rollback=True):
        ticks = conn.execute("select policy_name, denied_reasons from dispatch_tick()").fetchall()
        assert ticks == [(policy, {}) for policy in sorted(policies)]
        locks = value(conn, "select count(*) from pg_locks where pid = pg_backend_pid()")
        assert locks < 256
    other = connect(autocommit=False)
    tick(other, "p0")
    assert sum(tick(conn, policy) for policy in policies[1:]) == 59 * 50
