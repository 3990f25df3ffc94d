"""The work that is measured: a policy with two gates, and jobs of many tenants."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import Any

import psycopg
from procrastinate import App, SyncPsycopgConnector
from procrastinate.connector import BaseConnector
from procrastinate.tasks import Task

from pydispatch import Concurrency, Dispatch, Policy, Throttle, ctx

POLICY = Policy(
    "bench",
    partition_by="tenant",
    queue="bench",
    gates=[Throttle(rate=ctx("rate", default=60), per=1), Concurrency(max=1000)],
    max_queued=1_000_000,
)
"""Both gates are asked for each partition, and let everything pass: the rate is in the jobs. The
queue's bound is asked for each tick, and far."""

TASK = "bench.fetch"


@dataclasses.dataclass(frozen=True)
class Program:
    """An application with one task."""

    app: App
    task: Task[Any, Any, Any]


def program(connector: BaseConnector, policy: Policy | None = POLICY) -> Program:
    """Return an application whose task follows a policy, or None for bare procrastinate."""
    app = App(connector=connector)

    def fetch(tenant: str, url: str, rate: int) -> None:
        """Do nothing."""

    task = app.task(name=TASK, queue="bench")(fetch)
    if policy is not None:
        task = Dispatch(app).policy(policy)(task)
    return Program(app, task)


def sync_program(dsn: str, policy: Policy | None = POLICY) -> Program:
    """Return the same with a connector for ordinary functions."""
    return program(SyncPsycopgConnector(conninfo=dsn), policy)


def arguments(partition: int, number: int = 0) -> dict[str, Any]:
    """Return the arguments of a job."""
    url = f"https://api.example.com/v1/orders/{number:08}/lines?page=1"
    return {"tenant": f"tenant-{partition:07}", "url": url, "rate": 100_000}


def batches(partitions: int, jobs: int, size: int) -> Iterator[list[dict[str, Any]]]:
    """Yield the arguments of jobs, a batch at a time, each going round the partitions."""
    for start in range(0, jobs, size):
        numbers = range(start, min(start + size, jobs))
        yield [arguments(number % partitions, number) for number in numbers]


def define(conn: psycopg.Connection[Any], policy: Policy = POLICY) -> None:
    """Define the policy and its task."""
    definition = json.dumps(policy.definition())
    conn.execute("select dispatch_define_policy(%s, %s)", [policy.name, definition])
    conn.execute("select dispatch_map_task(%s, %s)", [TASK, policy.name])


def stage(conn: psycopg.Connection[Any], jobs: Sequence[dict[str, Any]]) -> list[int]:
    """Stage jobs in SQL, and return their ids."""
    rows = [{"task_name": TASK, "queue_name": "bench", "args": args} for args in jobs]
    cursor = conn.execute(
        "select * from dispatch_stage_many(%s, %s)", [POLICY.name, json.dumps(rows)]
    )
    return [id for (id,) in cursor]


def stage_all(conn: psycopg.Connection[Any], partitions: int, jobs: int) -> None:
    """Stage jobs in calls in which no partition comes twice: so each job has a note of its own."""
    for batch in batches(partitions, jobs, min(partitions, 1000)):
        stage(conn, batch)


# A large backlog is written as staging and folding leave it, without their cost.

SEED_PARTITIONS = """
insert into dispatch_partitions (id, policy_name, partition_key, due_at, blocked_until,
  blocked_after_finish, blocked_reason, first_seen_at, last_checked_at, pending_count, context)
select
  dispatch_partition_id(%(policy)s, key), %(policy)s, key,
  case when number < %(due)s then now() else now() + interval '1 day' end,
  case when number >= %(due)s then now() + interval '1 day' end,
  case when number >= %(due)s then now() + interval '1 day' end,
  case when number >= %(due)s then 'throttle_empty' end,
  now(), now(), %(jobs)s, jsonb_build_object('tenant', key, 'rate', 100000)
from generate_series(%(first)s::int, %(last)s::int) as number
cross join lateral format('tenant-%%s', lpad(number::text, 7, '0')) as key
"""

SEED_JOBS = """
insert into dispatch_staged_jobs (id, partition_id, staged_at, policy_name, partition_key,
  task_name, queue_name, args, context)
select
  nextval('procrastinate_jobs_id_seq'), dispatch_partition_id(%(policy)s, key), now(),
  %(policy)s, key, %(task)s, 'bench',
  jsonb_build_object('tenant', key, 'rate', 100000,
    'url', format('https://api.example.com/v1/orders/%%s/lines?page=1', number)),
  jsonb_build_object('tenant', key, 'rate', 100000)
from generate_series(1, %(jobs)s::int) as turn
cross join generate_series(%(first)s::int, %(last)s::int) as number
cross join lateral format('tenant-%%s', lpad(number::text, 7, '0')) as key
"""


def seed(
    conn: psycopg.Connection[Any],
    partitions: range,
    *,
    jobs: int,
    due: int | None = None,
    known: bool = False,
) -> None:
    """Write a backlog.

    Args:
        conn: In autocommit.
        partitions: Their numbers.
        jobs: Staged jobs in each.
        due: The partitions with a lower number are due, the others are throttled for a day.
            Default: all are due.
        known: The partitions are there already.
    """
    values = {
        "policy": POLICY.name,
        "task": TASK,
        "first": partitions.start,
        "last": partitions.stop - 1,
        "jobs": jobs,
        "due": partitions.stop if due is None else due,
    }
    if known:
        conn.execute(
            "update dispatch_partitions set pending_count = pending_count + %(jobs)s", values
        )
    else:
        conn.execute(SEED_PARTITIONS, values)
    conn.execute(SEED_JOBS, values)
    conn.execute("vacuum analyze dispatch_partitions, dispatch_staged_jobs")
