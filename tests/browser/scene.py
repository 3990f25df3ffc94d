"""A small installation in which each thing that a page shows is there at least once."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import psycopg

POLICIES = {
    "calls": {
        "partition_by": "tenant",
        "queue": "http",
        "gates": [
            {"type": "throttle", "rate": {"ctx": "rate", "default": 100}, "per": 3600},
            {"type": "concurrency", "max": 2, "full_backoff": 3600},
        ],
    },
    "searches": {
        "partition_by": "tenant",
        "gates": [{"type": "adaptive_concurrency", "initial_max": 2, "target_lag_ms": 500}],
    },
    "exports": {"partition_by": "tenant", "gates": [{"type": "concurrency", "max": 3}]},
}

# Jobs with the argument "poison" are refused when they are handed off, and so are set aside.
REFUSE_POISON = """
alter table procrastinate_jobs add constraint no_poison check (not args ? 'poison')
"""


@dataclasses.dataclass
class Scene:
    """A database in which some jobs run, and others do not, each for a reason of its own.

    In the policy ``calls``: ``acme`` has used up its rate of 1 an hour, ``globex`` has both of its
    slots in use (one job runs, one waits for a worker), ``initech`` is paused, ``hooli`` has jobs
    for tomorrow alone, ``umbrella`` had one that was refused. ``searches`` has learned a limit.
    ``exports`` is paused as a whole.
    """

    conn: psycopg.Connection

    def play(self) -> Scene:
        """Make it."""
        for name, definition in POLICIES.items():
            self.conn.execute(
                "select dispatch_define_policy(%s, %s)", [name, json.dumps(definition)]
            )
            self.conn.execute("select dispatch_map_task(%s, %s)", [f"{name}.run", name])
        self.conn.execute(REFUSE_POISON)
        self.stage("calls", "acme", 5, context={"rate": 1})
        self.stage("calls", "globex", 6)
        self.stage("calls", "initech", 3)
        self.stage("calls", "hooli", 2, scheduled_at="2100-01-01T00:00:00Z")
        self.stage("calls", "umbrella", 1, args={"poison": 1})
        self.stage("searches", "acme", 6)
        self.stage("exports", "acme", 2)
        self.conn.execute("select dispatch_pause('calls', 'initech'), dispatch_pause('exports')")
        self.tick()
        self.run_one("globex")
        self.finish_one("searches")
        self.tick()
        self.conn.execute("select dispatch_sweep()")
        return self

    def stage(
        self,
        policy: str,
        key: str,
        jobs: int = 1,
        *,
        args: dict[str, Any] | None = None,
        context: dict[str, Any] | None = None,
        **options: Any,
    ) -> list[int]:
        """Stage jobs of a tenant and return their ids."""
        job = {
            "task_name": f"{policy}.run",
            "args": {"tenant": key, **(args or {})},
            "context": {"tenant": key, **(context or {})},
            **options,
        }
        rows = self.conn.execute(
            "select dispatch_stage_many(%s, %s)", [policy, json.dumps([job] * jobs)]
        ).fetchall()
        return [row[0] for row in rows]

    def tick(self) -> None:
        """Tick once."""
        self.conn.execute("select count(*) from dispatch_tick()")

    def run_one(self, key: str) -> None:
        """Let a worker begin with a job of a tenant, in ``calls``."""
        (job_id,) = self.one(
            "select min(job_id) from dispatch_inflight_jobs"
            " where policy_name = 'calls' and partition_key = %s",
            key,
        )
        (worker,) = self.one("insert into procrastinate_workers default values returning id")
        self.conn.execute(
            "update procrastinate_jobs set status = 'doing', worker_id = %s where id = %s",
            [worker, job_id],
        )

    def finish_one(self, policy: str) -> None:
        """Let a worker run a job of a policy from begin to end."""
        (job_id,) = self.one(
            "select min(job_id) from dispatch_inflight_jobs where policy_name = %s", policy
        )
        self.conn.execute("update procrastinate_jobs set status = 'doing' where id = %s", [job_id])
        self.conn.execute("select procrastinate_finish_job_v1(%s, 'succeeded', false)", [job_id])

    def one(self, query: str, *values: Any) -> Any:
        """Return the one row of a query."""
        row = self.conn.execute(query.encode(), values or None).fetchone()
        assert row is not None, query
        return row

    def partition(self, policy: str, key: str) -> str:
        """Return the path of a partition's page."""
        (uuid,) = self.one("select dispatch_partition_id(%s, %s)", policy, key)
        return f"/partitions/{uuid}"

    def job(self, state: str) -> str:
        """Return the path of the page of a job that is there, such as ``queued``."""
        query = {
            "staged": "select min(id) from dispatch_staged_jobs where policy_name = 'calls'",
            "running": """
                select job_id from dispatch_inflight where state = 'running'
            """,
            "queued": "select min(job_id) from dispatch_inflight where state = 'queued'",
            "finished": """
                select a.job_id from dispatch_admissions as a
                join procrastinate_jobs as j on j.id = a.job_id where j.status = 'succeeded'
            """,
            "dead": "select min(id) from dispatch_dead_jobs",
        }[state]
        return f"/jobs/{self.one(query)[0]}"

    def paths(self) -> list[str]:
        """Return the paths of all pages."""
        return [
            "/",
            "/search?q=acme",
            "/hints",
            "/policies",
            *(f"/policy?name={name}" for name in POLICIES),
            "/partitions",
            "/partitions?policy=calls&sort=key&q=e&pending=1",
            *(
                self.partition("calls", key)
                for key in ("acme", "globex", "initech", "hooli", "umbrella")
            ),
            self.partition("searches", "acme"),
            *map(self.job, ("staged", "running", "queued", "finished", "dead")),
            "/dead",
            "/audit",
            "/actions/pause?policy=calls",
            f"/actions/force-admit?partition={self.partition('calls', 'acme').rpartition('/')[2]}",
            f"/actions/cancel?id={self.job('staged').rpartition('/')[2]}",
        ]
