"""The counters of ``dispatch_totals`` while ticks, sweeps and readers are at work at once."""

from __future__ import annotations

import random
import threading
from collections import Counter
from typing import Any

import psycopg
import pytest

from tests.concurrency.support import cap, define, stage, tick, value
from tests.fixtures import Connect

Totals = dict[tuple[str, str, str], float]
LONG_AGO = {"options": "-c dispatch.fake_now=2000-01-01"}


def totals(conn: psycopg.Connection) -> Totals:
    rows = conn.execute("select policy_name, counter, label, value from dispatch_totals")
    return {(policy, counter, label): value for policy, counter, label, value in rows if value}


def told(conn: psycopg.Connection) -> Totals:
    """What all samples, removed ones as well, add up to: a trigger has kept a copy of each."""
    rows = conn.execute(
        """
        select policy_name, counter, label, sum(value)
        from every_sample as s
        cross join lateral dispatch_tick_counts(s.sample)
        group by policy_name, counter, label
        """
    )
    return {(policy, counter, label): value for policy, counter, label, value in rows if value}


@pytest.fixture
def copies(conn: psycopg.Connection) -> None:
    """Keeps a copy of each sample, out of the sweep's reach."""
    conn.execute(
        """
        create table every_sample (policy_name text, sample dispatch_tick_samples);
        create function copy_sample() returns trigger language plpgsql as $$
        begin
          insert into public.every_sample values (new.policy_name, new);
          return null;
        end;
        $$;
        create trigger copy_sample after insert on dispatch_tick_samples
        for each row execute function copy_sample();
        """
    )


@pytest.mark.usefixtures("copies")
def test_totals_never_go_back_and_are_exact_at_the_end(conn: psycopg.Connection, connect: Connect):
    """Ticks commit late, roll back, run in subtransactions; sweeps count and remove samples.

    Who ticks lives long ago, so each sample is past its retention when it is written.
    """
    policies = ["p", "q"]
    past = connect(**LONG_AGO)
    for policy in policies:
        define(conn, policy, **cap(9), tick_admission_budget=3, partition_batch_size=4)
        stage(past, *(f"{number}" for number in range(30) for _ in range(9)), policy=policy)
        assert tick(past, policy) == 3
    long = connect(autocommit=False, **LONG_AGO)
    assert tick(long, "p") == 3

    stop = threading.Event()
    errors: list[BaseException] = []

    def ticks(mine: psycopg.Connection, seed: int) -> None:
        choose = random.Random(seed)
        for _ in range(25):
            mine.execute("savepoint a")
            tick(mine, choose.choice(policies))
            if choose.random() < 0.3:
                mine.execute("rollback to savepoint a")
            if choose.random() < 0.5:
                tick(mine, choose.choice(policies))
            mine.commit() if choose.random() < 0.8 else mine.rollback()

    def sweeps(mine: psycopg.Connection) -> None:
        while not stop.is_set():
            mine.execute("select dispatch_count_ticks(dispatch_now(), 3)")
            mine.execute("select dispatch_sweep()")

    def reads(mine: psycopg.Connection) -> None:
        before = Counter(totals(mine))
        while not stop.is_set():
            now = Counter(totals(mine))
            back = {key: (before[key], now[key]) for key in before if now[key] < before[key]}
            assert not back, back
            before = now

    def guarded(work: Any, *arguments: Any) -> None:
        try:
            work(*arguments)
        except BaseException as error:
            errors.append(error)

    tickers = [
        threading.Thread(target=guarded, args=(ticks, connect(autocommit=False, **LONG_AGO), seed))
        for seed in range(4)
    ]
    others = [
        threading.Thread(target=guarded, args=(work, connect()))
        for work in (sweeps, sweeps, reads, reads)
    ]
    for thread in (*tickers, *others):
        thread.start()
    for thread in tickers:
        thread.join()

    # The tick that has been open all the while is not there yet, and then it is.
    seen = totals(conn)["p", "jobs_admitted", ""]
    assert totals(conn) == told(conn)
    long.commit()
    assert totals(conn)["p", "jobs_admitted", ""] == seen + 3
    stop.set()
    for thread in others:
        thread.join()
    assert errors == []

    conn.execute("select dispatch_sweep()")
    assert value(conn, "select count(*) from dispatch_tick_samples") == 0
    found = totals(conn)
    assert found == told(conn)
    for policy in policies:
        admitted = "select sum(total_admitted) from dispatch_partitions where policy_name = %s"
        assert found[policy, "jobs_admitted", ""] == value(conn, admitted, policy)
