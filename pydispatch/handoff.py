"""One tick: what the database admits is handed to procrastinate on the same connection.

The database decides (``dispatch_admit``), procrastinate's own ``batch_defer_jobs`` takes the jobs,
and the database notes what became of each (``dispatch_settle``), all in one transaction. It
guards the promise that one bad job harms no other: a batch that procrastinate refuses is split
until the bad job is alone. A lost connection is no job's fault and ends the tick, and with it
the transaction.

The logic is written once, as generators that yield the statements to run and are sent their
outcome; ``Handoff.run`` and ``Handoff.run_async`` do the running.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

import psycopg
from procrastinate import PsycopgConnector, SyncPsycopgConnector, exceptions
from procrastinate.connector import BaseConnector
from procrastinate.jobs import Job
from procrastinate.manager import JobManager
from psycopg.pq import TransactionStatus
from typing_extensions import LiteralString

from pydispatch import errors

if TYPE_CHECKING:
    from pydispatch.dispatch import Dispatch

__all__ = ["Handoff", "Steps", "TickResult"]

logger = logging.getLogger(__name__)

T = TypeVar("T")
Connection: TypeAlias = psycopg.Connection[Any]
AsyncConnection: TypeAlias = psycopg.AsyncConnection[Any]

# Results are read as JSON text, so that the application's own json_loads sees only its own data.
# The lock timeout is for the hand-off alone: it must not wait long for somebody's open
# transaction that holds the same queueing lock. Settling puts the caller's back.

ADMIT: LiteralString = """
select
  handoff_id, id, task_name, queue_name, priority, lock, queueing_lock, scheduled_at,
  args::text as args,
  to_jsonb(tick)::text as tick,
  case when ordinality = 1 then current_setting('lock_timeout') end as lock_timeout,
  case when ordinality = 1 and id is not null then set_config('lock_timeout', '100ms', true) end
from dispatch_admit(%(policy)s, %(shard)s) with ordinality
"""

SETTLE: LiteralString = """
select
  to_jsonb(settled)::text as tick,
  set_config('lock_timeout', %(lock_timeout)s, true)
from dispatch_settle(
  %(handoff_id)s, %(ids)s::bigint[], %(job_ids)s::bigint[], %(errors)s::text[]
) as settled
"""

TICK: LiteralString = """
select to_jsonb(ticked)::text as tick from dispatch_tick(%(policy)s, %(shard)s) as ticked
"""

# A policy whose tasks were all declared by other applications is theirs: this one does not know
# its tasks and would set their jobs aside. A policy that no application declared is everybody's.
OURS: LiteralString = """
(%(only)s::text[] is null or p.policy_name = any (%(only)s::text[]))
  and (
    %(tasks)s::text[] is null
    or p.policy_name = any (%(policies)s::text[])
    or not exists (select from dispatch_tasks as t where t.policy_name = p.policy_name)
    or exists (
      select from dispatch_tasks as t
      where t.policy_name = p.policy_name
        and t.task_name = any (%(tasks)s::text[])
    )
  )
"""

POLICIES: LiteralString = (
    "select p.policy_name from dispatch_policies as p where " + OURS + " order by p.policy_name"
)

ERROR_LENGTH = 2000  # characters kept of the reason why a job was set aside

# SQLSTATEs and classes of them that say nothing of a job: connection, serialization, resources,
# shutdown, system, rights. dispatch_is_nobodys_fault() in the database names the same.
NOBODYS_FAULT = ("08", "40", "53", "57", "58", "F0", "XX", "25006", "42501")
LOCK_NOT_AVAILABLE = "55P03"


@dataclasses.dataclass(frozen=True)
class TickResult:
    """What one tick did for one policy."""

    policy_name: str
    partitions_seen: int
    """Partitions that were due and not in another tick's hands."""
    partitions_admitted: int
    """Those that had at least one job admitted."""
    partitions_denied: int
    """Those that a gate, the budget or a pause denied."""
    jobs_admitted: int
    """Jobs handed to procrastinate."""
    handoff_failures: int
    """Jobs set aside in ``dispatch_dead_jobs``."""
    denied_reasons: dict[str, int]
    """Denied partitions by reason."""
    duration_ms: float
    """Milliseconds."""


@dataclasses.dataclass(frozen=True)
class Query:
    """A statement to run; its outcome is its rows."""

    query: LiteralString
    arguments: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Defer:
    """Jobs to give to procrastinate, all or none; the outcome is the jobs, or a ``Verdict``."""

    jobs: list[Job]


@dataclasses.dataclass(frozen=True)
class Attempt:
    """Steps whose error is not to end the tick; the outcome is their result, or the error."""

    steps: Steps[TickResult]


Steps: TypeAlias = Generator[Query | Defer | Attempt, Any, T]


class Verdict(NamedTuple):
    """What became of one admitted job.

    A job id: it is queued. An error: it is set aside. Neither: its queueing lock is held by
    another job, and it waits its turn.
    """

    job_id: int | None = None
    error: str | None = None


class Handoff:
    """Ticks, in anybody's connection and transaction.

    Args:
        dispatch: The application that hands the jobs off. None: the database does all of it,
            ``dispatch_tick()``.
    """

    def __init__(self, dispatch: Dispatch | None) -> None:
        self._dispatch = dispatch
        connector = dispatch.app.connector if dispatch else None
        self._dumps, self._loads = json_functions(connector)
        # Both only ever use the connection that they are given.
        self._manager = JobManager(SyncPsycopgConnector(json_dumps=self._dumps))
        self._async_manager = JobManager(PsycopgConnector(json_dumps=self._dumps))

    # -- what to do

    def ticks(self, policy: str | None, shard: str | None) -> Steps[list[TickResult]]:
        """Tick one policy, or each that is ours; one result a policy.

        Of several policies, one that fails stops no other: it is logged, and counted as
        ``tick_error`` among its denied reasons.
        """
        if self._dispatch is None:
            rows = yield Query(TICK, {"policy": policy, "shard": shard})
            return [_result(row) for row in rows]
        if policy is not None:
            return [(yield from self._tick(policy, shard))]
        results = []
        for row in (yield Query(POLICIES, self.ours())):
            name = row["policy_name"]
            outcome = yield Attempt(self._tick(name, shard))
            if isinstance(outcome, Exception):
                logger.error(
                    "Tick of policy %s failed",
                    name,
                    exc_info=outcome,
                    extra={"action": "tick_failed", "policy": name},
                )
                outcome = TickResult(name, 0, 0, 0, 0, 0, {"tick_error": 1}, 0.0)
            results.append(outcome)
        return results

    def ours(self, only: Sequence[str] | None = None) -> dict[str, Any]:
        """Return the arguments of ``OURS``: the named policies, or all that are ours to tick."""
        if only is not None:
            return {"only": list(only), "policies": None, "tasks": None}
        if self._dispatch is None:
            return {"only": None, "policies": None, "tasks": None}
        return {
            "only": None,
            "policies": self._dispatch.policy_names(),
            "tasks": self._dispatch.task_names(),
        }

    def _tick(self, policy: str, shard: str | None) -> Steps[TickResult]:
        rows = yield Query(ADMIT, {"policy": policy, "shard": shard})
        if rows[0]["id"] is None:
            return _result(rows[0])
        verdicts: dict[int, Verdict] = {}
        batch: list[tuple[int, Job]] = []
        for row in rows:
            try:
                batch.append((row["id"], self._job(row)))
            except Exception as error:
                verdicts[row["id"]] = Verdict(error=_text(error))
        if batch:
            yield from _hand_off(batch, verdicts)
        (settled,) = yield Query(
            SETTLE,
            {
                "lock_timeout": rows[0]["lock_timeout"],
                "handoff_id": rows[0]["handoff_id"],
                "ids": list(verdicts),
                "job_ids": [verdict.job_id for verdict in verdicts.values()],
                "errors": [verdict.error for verdict in verdicts.values()],
            },
        )
        return _result(settled)

    def _job(self, row: dict[str, Any]) -> Job:
        """Return an admitted row as procrastinate's job.

        Raises:
            TaskNotFound: No task has this name or alias.
            Exception: Whatever the application's json_loads raises.
        """
        if self._dispatch is None or not self._dispatch.knows(row["task_name"]):
            raise exceptions.TaskNotFound(f"unknown task {row['task_name']!r}")
        return Job(
            queue=row["queue_name"],
            priority=row["priority"],
            lock=row["lock"],
            queueing_lock=row["queueing_lock"],
            task_name=row["task_name"],
            task_kwargs=self._loads(row["args"]),
            scheduled_at=row["scheduled_at"],
        )

    # -- doing it

    def run(self, connection: Connection, steps: Steps[T]) -> T:
        """Run steps in the connection's transaction, or in one of their own in autocommit."""
        with _transaction(connection):
            return self._run(connection, steps)

    async def run_async(self, connection: AsyncConnection, steps: Steps[T]) -> T:
        """Do the same as ``run``."""
        async with _transaction(connection):
            return await self._run_async(connection, steps)

    def _run(self, connection: Connection, steps: Steps[T]) -> T:
        connector = self._manager.connector
        outcome: Any = None
        while True:
            try:
                step = steps.send(outcome)
            except StopIteration as stop:
                return stop.value  # type: ignore[no-any-return]
            try:
                if isinstance(step, Query):
                    with errors.translate():
                        outcome = connector.execute_query_all_with_connection(
                            connection, step.query, **step.arguments
                        )
                    continue
                with connection.transaction():
                    if isinstance(step, Defer):
                        outcome = self._manager.batch_defer_jobs(step.jobs, connection)
                    else:
                        outcome = self._run(connection, step.steps)
            except Exception as error:
                outcome = self._outcome(error, connection, step)

    async def _run_async(self, connection: AsyncConnection, steps: Steps[T]) -> T:
        connector = self._async_manager.connector
        outcome: Any = None
        while True:
            try:
                step = steps.send(outcome)
            except StopIteration as stop:
                return stop.value  # type: ignore[no-any-return]
            try:
                if isinstance(step, Query):
                    with errors.translate():
                        outcome = await connector.execute_query_all_async_with_connection(
                            connection, step.query, **step.arguments
                        )
                    continue
                async with connection.transaction():
                    if isinstance(step, Defer):
                        outcome = await self._async_manager.batch_defer_jobs_async(
                            step.jobs, connection
                        )
                    else:
                        outcome = await self._run_async(connection, step.steps)
            except Exception as error:
                outcome = self._outcome(error, connection, step)

    def _outcome(
        self,
        error: Exception,
        connection: Connection | AsyncConnection,
        step: Query | Defer | Attempt,
    ) -> Verdict | Exception:
        """Say what an error means for a step, or raise it where it ends the tick."""
        if isinstance(step, Query) or _is_nobodys_fault(error, connection):
            raise error
        return self._verdict(error, step.jobs) if isinstance(step, Defer) else error

    def _verdict(self, error: Exception, jobs: list[Job]) -> Verdict:
        """Say what an error means for the job that it met, or raise it when it is not the job's.

        Of several jobs it says no more than that not all of them can be handed off.
        """
        cause = _cause(error)
        held = (LOCK_NOT_AVAILABLE, errors.AlreadyEnqueued.sqlstate)
        if isinstance(error, exceptions.AlreadyEnqueued) or _sqlstate(cause) in held:
            return Verdict()
        # Without a database in it, it is the job's only if its arguments cannot be written.
        if not isinstance(error, exceptions.ConnectorException) and not self._unwritable(jobs):
            raise error
        return Verdict(error=_text(cause))

    def _unwritable(self, jobs: list[Job]) -> bool:
        """Tell whether the arguments of one of these jobs cannot be written as JSON."""
        for job in jobs:
            try:
                (self._dumps or json.dumps)(job.task_kwargs)
            except Exception:
                return True
        return False


def _hand_off(
    batch: list[tuple[int, Job]], verdicts: dict[int, Verdict]
) -> Generator[Defer, Any, None]:
    """Give a batch to procrastinate, in halves if it refuses, and note what became of each job."""
    outcome: list[Job] | Verdict = yield Defer([job for _, job in batch])
    if not isinstance(outcome, Verdict):
        for (staged_id, _), job in zip(batch, outcome, strict=True):
            verdicts[staged_id] = Verdict(job_id=job.id)
    elif len(batch) == 1:
        verdicts[batch[0][0]] = outcome
    else:
        middle = len(batch) // 2
        yield from _hand_off(batch[:middle], verdicts)
        yield from _hand_off(batch[middle:], verdicts)


def _cause(error: Exception) -> BaseException:
    """Return the driver's error inside one of procrastinate's."""
    wrapped = isinstance(error, exceptions.ConnectorException)
    return (error.__cause__ if wrapped else None) or error


def _sqlstate(error: BaseException) -> str | None:
    return getattr(error, "sqlstate", None)


def _is_nobodys_fault(error: Exception, connection: Connection | AsyncConnection) -> bool:
    """Tell whether an error is about the connection or the server, so that nothing else can go."""
    cause = _cause(error)
    sqlstate = _sqlstate(cause)
    if connection.closed or isinstance(cause, psycopg.InterfaceError):
        return True
    if sqlstate is None:
        return isinstance(cause, psycopg.OperationalError)
    if isinstance(cause, psycopg.Error) and cause.diag.context is None and sqlstate[:2] == "42":
        return True  # the statement itself does not fit the schema: no trigger has seen a job yet
    return sqlstate.startswith(NOBODYS_FAULT)


def _text(error: BaseException) -> str:
    """Return an error as text that the database can keep."""
    diag = getattr(error, "diag", None)
    if diag is not None and diag.sqlstate:
        text = f"{diag.message_primary} (SQLSTATE {diag.sqlstate})"
    else:
        text = f"{type(error).__name__}: {error}"
    return text.replace("\0", "")[:ERROR_LENGTH]


def _result(row: dict[str, Any]) -> TickResult:
    values = json.loads(row["tick"])
    return TickResult(
        **{field.name: values[field.name] for field in dataclasses.fields(TickResult)}
    )


def json_functions(
    connector: BaseConnector | None,
) -> tuple[Callable[..., Any] | None, Callable[[str], Any]]:
    """Return the application's json_dumps (or None) and json_loads.

    psycopg gives json_loads bytes, other drivers give text: whatever it is used to.
    """
    dumps, loads = (
        getattr(connector, f"_{name}", None) or getattr(connector, name, None)
        for name in ("json_dumps", "json_loads")
    )
    if loads is None:
        return dumps, json.loads
    if isinstance(connector, (PsycopgConnector, SyncPsycopgConnector)):
        return dumps, lambda text: loads(text.encode())
    return dumps, loads


def _transaction(connection: Any) -> Any:
    """Begin a transaction in autocommit; otherwise the transaction is the caller's."""
    if connection.autocommit and connection.info.transaction_status == TransactionStatus.IDLE:
        return connection.transaction()
    return contextlib.nullcontext()
