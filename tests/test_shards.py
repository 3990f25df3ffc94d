"""Shards: which driver ticks a partition, and nothing about what it may admit."""

from __future__ import annotations

import json
from typing import Any

import psycopg
import pytest

from tests.fixtures import Connect
from tests.ticks import Tick


def define(conn: psycopg.Connection, **definition: Any) -> list[str]:
    """Define a policy and return the warnings that came with it."""
    warnings: list[str] = []
    conn.add_notice_handler(lambda notice: warnings.append(notice.message_primary or ""))
    defaults = {"partition_by": ["tenant", "region"], "shard_by": ["region"]}
    conn.execute("select dispatch_define_policy('p', %s)", [json.dumps(defaults | definition)])
    return warnings


def stage(conn: psycopg.Connection, tenant: str, region: str | None, jobs: int = 1) -> None:
    conn.execute(
        "select dispatch_stage('p', 't', %s) from generate_series(1, %s)",
        [json.dumps({"tenant": tenant, "region": region}), jobs],
    )


def admitted(conn: psycopg.Connection) -> dict[str, int]:
    rows = conn.execute("select args ->> 'tenant', count(*) from procrastinate_jobs group by 1")
    return dict(rows.fetchall())


def test_a_tick_of_a_shard_leaves_the_others_alone(conn, tick: Tick):
    define(conn)
    stage(conn, "a", "eu", 2)
    stage(conn, "b", "us", 3)
    stage(conn, "c", None, 4)
    assert [row["jobs_admitted"] for row in tick(conn, "p", "us")] == [3]
    assert admitted(conn) == {"b": 3}
    assert [row["jobs_admitted"] for row in tick(conn, "p", "default")] == [4]
    assert [row["jobs_admitted"] for row in tick(conn, "p")] == [2]
    assert admitted(conn) == {"a": 2, "b": 3, "c": 4}


def test_a_partition_stays_in_the_shard_of_its_first_job(conn, tick: Tick):
    define(conn, partition_by=["tenant"])
    stage(conn, "a", "eu")
    stage(conn, "a", "us")
    tick(conn, "p", "us")
    assert admitted(conn) == {}
    tick(conn, "p", "eu")
    assert admitted(conn) == {"a": 2}


def test_a_cap_holds_over_ticks_of_shards_side_by_side(conn, connect: Connect, tick: Tick):
    define(conn, partition_by=["tenant"], gates=[{"type": "concurrency", "max": 2}])
    for region in ("eu", "us", "eu", "us"):
        stage(conn, "a", region)
    one, other, both = (connect(autocommit=False) for _ in range(3))
    for session, shard in ((one, "eu"), (other, "us"), (both, None)):
        tick(session, "p", shard)
    for session in (one, other, both):
        session.commit()
    assert admitted(conn) == {"a": 2}


def test_the_next_due_time_is_the_shard_s_own(conn, clock):
    define(conn, gates=[{"type": "throttle", "rate": 1, "per": 60}])
    stage(conn, "a", "eu", 2)
    stage(conn, "b", "us", 1)
    conn.execute("select dispatch_tick()")
    due = "select extract(epoch from dispatch_next_due('p', %s) - dispatch_now())::int"
    assert conn.execute(due, ["eu"]).fetchone() == (60,)
    assert conn.execute(due, ["us"]).fetchone() == (None,)


@pytest.mark.parametrize(
    ("partition_by", "shard_by", "warned"),
    [
        (["tenant"], ["region"], True),
        (["tenant", "region"], ["region"], False),
        (["tenant"], ["tenant"], False),
        (["tenant"], [], False),
    ],
)
def test_a_shard_that_is_finer_than_its_partitions_is_warned_of(
    conn, partition_by: list[str], shard_by: list[str], warned: bool
):
    warnings = define(conn, partition_by=partition_by, shard_by=shard_by)
    said = ["policy p: shard_by names region, which partition_by does not"]
    assert warnings == (said if warned else [])


def test_cron_s_procedure_goes_on_while_a_tick_only_folds(conn):
    """More notes of future jobs than a tick folds stand before those of one that is due."""
    define(conn)
    conn.execute(
        """
        insert into dispatch_inbox
          (policy_name, partition_id, kind, jobs, due_at, newest_id, partition_key, shard, context)
        select 'p', dispatch_partition_id('p', n::text), 'staged', 0, 'tomorrow', n, n, 'default',
          '{}'
        from generate_series(1, 20001) as n
        """
    )
    stage(conn, "a", "eu")
    conn.execute("call dispatch_run('1 minute')")
    assert admitted(conn) == {"a": 1}
