"""One tick, in which the application looks at the jobs before procrastinate gets them.

The database decides (``dispatch_admit``); the application turns back the jobs that it could not
run, for it does not know the task or cannot read the arguments; and the database hands the others
over and notes what became of each (``dispatch_settle``), all in one transaction and on one
connection. A lost connection is no policy's fault and ends the tick, and with it the transaction.

The logic is written once, as generators that yield the statements to run and are sent their
outcome; ``Handoff.run`` and ``Handoff.run_async`` do the running.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import psycopg
from procrastinate import PsycopgConnector, SyncPsycopgConnector, exceptions
from procrastinate.connector import BaseConnector
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

ADMIT: LiteralString = """
select handoff_id, id, task_name, args::text as args, to_jsonb(tick)::text as tick
from dispatch_admit(%(policy)s, %(shard)s)
"""

SETTLE: LiteralString = """
select to_jsonb(settled)::text as tick
from dispatch_settle(%(handoff_id)s, %(ids)s::bigint[], %(errors)s::text[]) as settled
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

NOBODYS_FAULT: LiteralString = """
select bool_and(coalesce(dispatch_is_nobodys_fault(sqlstate), false)) as is_nobodys
from unnest(%(sqlstates)s::text[]) as sqlstate
"""

ERROR_LENGTH = 2000  # characters kept of the reason why a job was turned back


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
class Attempt:
    """Steps whose error is not to end the tick; the outcome is their result, or the error."""

    steps: Steps[TickResult]


Steps: TypeAlias = Generator[Query | Attempt, Any, T]


class Handoff:
    """Ticks, in anybody's connection and transaction.

    Args:
        dispatch: The application that looks at the jobs. None: nobody does, ``dispatch_tick()``.
    """

    def __init__(self, dispatch: Dispatch | None) -> None:
        self._dispatch = dispatch
        _, self._loads = json_functions(dispatch.app.connector if dispatch else None)
        # Both only ever use the connection that they are given.
        self._connector = SyncPsycopgConnector()
        self._async_connector = PsycopgConnector()

    # -- what to do

    def ticks(self, policy: str | None, shard: str | None) -> Steps[list[TickResult]]:
        """Tick one policy, or each that is ours; one result a policy.

        Of several policies, one that fails stops no other: it is logged, and counted as
        ``tick_error`` among its denied reasons. When all fail and it is not theirs (rights that
        are missing, for example), that is raised.
        """
        if self._dispatch is None:
            rows = yield Query(TICK, {"policy": policy, "shard": shard})
            return [_result(row) for row in rows]
        if policy is not None:
            return [(yield from self._tick(policy, shard))]
        results = []
        failures: list[Exception] = []
        for row in (yield Query(POLICIES, self.ours())):
            name = row["policy_name"]
            outcome = yield Attempt(self._tick(name, shard))
            if isinstance(outcome, Exception):
                failures.append(outcome)
                logger.error(
                    "Tick of policy %s failed",
                    name,
                    exc_info=outcome,
                    extra={"action": "tick_failed", "policy": name},
                )
                outcome = TickResult(name, 0, 0, 0, 0, 0, {"tick_error": 1}, 0.0)
            results.append(outcome)
        if failures and len(failures) == len(results):
            sqlstates = [getattr(_cause(failure), "sqlstate", None) for failure in failures]
            (answer,) = yield Query(NOBODYS_FAULT, {"sqlstates": sqlstates})
            if answer["is_nobodys"]:
                raise failures[0]
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
        turned_back: dict[int, str] = {}
        for row in rows:
            try:
                self._look(row["task_name"], row["args"])
            except Exception as error:
                turned_back[row["id"]] = _text(error)
        (settled,) = yield Query(
            SETTLE,
            {
                "handoff_id": rows[0]["handoff_id"],
                "ids": list(turned_back),
                "errors": list(turned_back.values()),
            },
        )
        return _result(settled)

    def _look(self, task_name: str, args: str) -> None:
        """See whether the application's workers could run a job.

        Raises:
            TaskNotFound: No task has this name or alias.
            Exception: Whatever the application's json_loads raises.
        """
        if self._dispatch is None or not self._dispatch.knows(task_name):
            raise exceptions.TaskNotFound(f"unknown task {task_name!r}")
        self._loads(args)

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
        outcome: Any = None
        while True:
            try:
                step = steps.send(outcome)
            except StopIteration as stop:
                return stop.value  # type: ignore[no-any-return]
            if isinstance(step, Query):
                with errors.translate():
                    outcome = self._connector.execute_query_all_with_connection(
                        connection, step.query, **step.arguments
                    )
                continue
            try:
                with connection.transaction():
                    outcome = self._run(connection, step.steps)
            except Exception as error:
                outcome = _survived(error, connection)

    async def _run_async(self, connection: AsyncConnection, steps: Steps[T]) -> T:
        outcome: Any = None
        while True:
            try:
                step = steps.send(outcome)
            except StopIteration as stop:
                return stop.value  # type: ignore[no-any-return]
            if isinstance(step, Query):
                with errors.translate():
                    outcome = await self._async_connector.execute_query_all_async_with_connection(
                        connection, step.query, **step.arguments
                    )
                continue
            try:
                async with connection.transaction():
                    outcome = await self._run_async(connection, step.steps)
            except Exception as error:
                outcome = _survived(error, connection)


def _survived(error: Exception, connection: Connection | AsyncConnection) -> Exception:
    """Return an error that the connection has survived, or raise it."""
    status = connection.info.transaction_status
    if connection.closed or status in (TransactionStatus.INERROR, TransactionStatus.UNKNOWN):
        raise error
    return error


def _cause(error: Exception) -> BaseException:
    """Return the driver's error inside one of procrastinate's."""
    wrapped = isinstance(error, exceptions.ConnectorException)
    return (error.__cause__ if wrapped else None) or error


def _text(error: BaseException) -> str:
    """Return an error as text that the database can keep."""
    return f"{type(error).__name__}: {error}".replace("\0", "")[:ERROR_LENGTH]


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
