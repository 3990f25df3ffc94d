"""The job manager that stages the jobs of tasks with a policy instead of queueing them.

procrastinate sends every way of deferring through ``app.job_manager``, so this one place
redirects them all. A defer stays one statement: it costs one round trip and is all or nothing,
in the caller's transaction where there is one, also for a batch that mixes several policies
with tasks that have none.

The ids that it returns come from procrastinate's own sequence, and its methods that take an id
take them before and after the job was admitted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import inspect
import json
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

import psycopg
import psycopg.sql
from procrastinate import exceptions, types
from procrastinate.connector import BaseConnector
from procrastinate.jobs import Job, Status
from procrastinate.manager import QUEUEING_LOCK_CONSTRAINT, JobManager
from procrastinate.sql import queries
from procrastinate.testing import InMemoryConnector
from typing_extensions import LiteralString

from pydispatch import errors
from pydispatch.columns import columns
from pydispatch.handoff import json_functions
from pydispatch.runs import DOING, Ending, Runs
from pydispatch.statements import AllJobs

if TYPE_CHECKING:
    from pydispatch.dispatch import Dispatch

logger = logging.getLogger(__name__)

# Arguments are handed to the connector as they are, so that it writes them with the application's
# own json_dumps as it does for procrastinate.

STAGE: LiteralString = """
select dispatch_stage(
  p_policy => %(policy)s,
  p_task_name => %(task_name)s,
  p_args => %(args)s,
  p_context => %(context)s::jsonb,
  p_queue_name => %(queue_name)s,
  p_priority => %(priority)s::integer,
  p_lock => %(lock)s,
  p_queueing_lock => %(queueing_lock)s,
  p_scheduled_at => %(scheduled_at)s
) as id
"""

STAGE_MANY: LiteralString = """
select {part} as part, staged.position, staged.id
from dispatch_stage_many(%(policy_{part})s, %(batch_{part})s::jsonb -> 'jobs')
  with ordinality as staged (id, position)
"""

QUEUE_MANY: LiteralString = """
select {part} as part, queued.position, queued.id
from unnest(
  procrastinate_defer_jobs_v1(%(jobs_{part})s::procrastinate_job_to_defer_v1[])
) with ordinality as queued (id, position)
"""

STAGE_PERIODIC: LiteralString = """
select dispatch_stage_periodic(
  %(policy)s,
  %(job)s::jsonb || jsonb_build_object('args', %(args)s::jsonb),
  %(periodic_id)s,
  %(defer_timestamp)s
) as id
"""

END_STAGED: LiteralString = (
    "select dispatch_end_staged(%(job_id)s, %(status)s, %(delete_job)s) as ended"
)

TAKES_CONNECTION = "connection" in inspect.signature(JobManager.get_job_status).parameters

NOT_FOUND = "P0001"
"""The SQLSTATE of what procrastinate's functions raise themselves."""

NO_RIGHT = "42501"
"""The SQLSTATE of what the role may not do."""


@dataclasses.dataclass(frozen=True)
class Route:
    """Where a job is staged. Without a context, its arguments are the context."""

    policy: str
    context: Mapping[str, Any] | None = None


@dataclasses.dataclass(frozen=True)
class Plan:
    """One statement that takes all jobs of a batch; ``order`` is their order in its rows."""

    query: LiteralString
    arguments: dict[str, Any]
    jobs: list[Job]
    order: list[int]

    def finish(self, rows: list[dict[str, Any]]) -> list[Job]:
        """Give each job the id in its row."""
        ids = dict(zip(self.order, (row["id"] for row in rows), strict=True))
        return [
            job.evolve(id=ids[place], status=Status.TODO.value)
            for place, job in enumerate(self.jobs)
        ]


class DispatchJobManager(JobManager):
    """Stages jobs of tasks with a policy, and leaves all others to procrastinate.

    With procrastinate's ``InMemoryConnector`` there is no database that could stage: every job
    goes straight to its queue, as without policies.
    """

    def __init__(self, dispatch: Dispatch) -> None:
        super().__init__(dispatch.app.connector)
        self.dispatch = dispatch
        self._json_dumps, _ = json_functions(dispatch.app.connector)
        self._runs = Runs()

    def batch_defer_jobs(self, jobs: list[Job], connection: Any | None = None) -> list[Job]:
        """Stage or queue jobs, all or none; see procrastinate.

        Raises:
            AlreadyEnqueued: A queueing lock is held by a job that is staged or queued.
            DispatchError: A job or its policy was refused.
        """
        plan = self._plan(jobs)
        if plan is None:
            return super().batch_defer_jobs(jobs=jobs, connection=connection)
        with _raising(jobs):
            rows = self._rows(connection, plan.query, plan.arguments)
        return plan.finish(rows)

    async def batch_defer_jobs_async(
        self, jobs: list[Job], connection: Any | None = None
    ) -> list[Job]:
        """Do the same as ``batch_defer_jobs``."""
        plan = self._plan(jobs)
        if plan is None:
            return await super().batch_defer_jobs_async(jobs=jobs, connection=connection)
        with _raising(jobs):
            rows = await self._rows_async(connection, plan.query, plan.arguments)
        return plan.finish(rows)

    async def defer_periodic_job(
        self, job: Job, periodic_id: str, defer_timestamp: int
    ) -> int | None:
        """Stage or queue a periodic job, unless another worker did for the same timestamp.

        A job that is refused, also for a right or a migration that is missing, is logged as an
        error and None returned: an exception would stop the worker, and with it all other tasks.

        Raises:
            AlreadyEnqueued: A queueing lock is held by a job that is staged or queued.
        """
        try:
            route = self._route(job)
        except errors.DispatchError as error:
            _log_refused(job, periodic_id, defer_timestamp, error)
            return None
        if route is None:
            return await super().defer_periodic_job(
                job=job, periodic_id=periodic_id, defer_timestamp=defer_timestamp
            )
        try:
            if job.task_kwargs.get("timestamp") != defer_timestamp:
                raise exceptions.InvalidTimestamp
            with _raising([job]):
                (row,) = await self._rows_async(
                    None,
                    STAGE_PERIODIC,
                    {
                        "policy": route.policy,
                        "job": _json(_envelope(job.evolve(scheduled_at=None), route), job),
                        "args": job.task_kwargs,
                        "periodic_id": periodic_id,
                        "defer_timestamp": defer_timestamp,
                    },
                )
        except errors.AlreadyEnqueued:
            raise
        except (errors.DispatchError, exceptions.ConnectorException) as error:
            if _is_lost(error):
                raise
            _log_refused(job, periodic_id, defer_timestamp, error)
            return None
        return cast("int | None", row["id"])

    async def finish_job_by_id_async(self, job_id: int, status: Status, delete_job: bool) -> None:
        """Note how a job ended; one that is staged or queued is not run then.

        Raises:
            procrastinate.exceptions.ConnectorException: No job with this id waits or runs.
        """
        arguments = {"status": status.value, "delete_job": delete_job}
        async with self._saying(job_id, "finish_job", arguments):
            try:
                await super().finish_job_by_id_async(job_id, status, delete_job)
            except exceptions.ConnectorException as error:
                # A worker's jobs are all procrastinate's, so it is asked first.
                if not _is_not_found(error):
                    raise
                (row,) = await self._rows_async(None, END_STAGED, {"job_id": job_id, **arguments})
                if not row["ended"]:
                    raise

    async def retry_job_by_id_async(
        self,
        job_id: int,
        retry_at: datetime.datetime,
        priority: int | None = None,
        queue: str | None = None,
        lock: str | None = None,
    ) -> None:
        """Let a job run again; see procrastinate."""
        arguments = {
            "retry_at": retry_at,
            "new_priority": priority,
            "new_queue_name": queue,
            "new_lock": lock,
        }
        async with self._saying(job_id, "retry_job", arguments):
            await super().retry_job_by_id_async(job_id, retry_at, priority, queue, lock)

    # -- what the workers of this process run

    async def fetch_job(self, queues: Iterable[str] | None, worker_id: int) -> Job | None:
        """Take a job from the queue, and remember that the worker runs it."""
        if self._in_memory:
            return await super().fetch_job(queues, worker_id)
        with self._runs.fetching(worker_id):
            job = await super().fetch_job(queues, worker_id)
            if job is not None:
                self._runs.begin(job, worker_id)
        return job

    async def update_heartbeat(self, worker_id: int) -> None:
        """Note that a worker is alive, and say the ends again that the database does not have."""
        await super().update_heartbeat(worker_id)
        if not self._in_memory:
            await self._say_missing_ends(worker_id)

    async def unregister_worker(self, worker_id: int) -> None:
        """Note that a worker has ended, after the ends that the database may not have."""
        if self._runs.is_in_doubt(worker_id):
            await self._say_missing_ends(worker_id)
        await super().unregister_worker(worker_id)
        self._runs.forget(worker_id)

    @contextlib.asynccontextmanager
    async def _saying(
        self, job_id: int, statement: str, arguments: dict[str, Any]
    ) -> AsyncIterator[None]:
        """Remember an end that is said inside, if it is that of a worker here.

        Where saying it fails it is said again, at once and at each heartbeat, and no error is
        raised: a worker would do nothing about it.
        """
        ending = self._runs.end(job_id, statement, arguments)
        try:
            yield
        except exceptions.ConnectorException as error:
            if ending is None:
                raise
            if _is_not_found(error):
                self._runs.refused(ending)
                if not ending.again:
                    raise
            else:
                _log_unwritten(ending, error)
                await self._say_again(ending)
        else:
            if ending is not None:
                self._runs.written(ending)

    async def _say_missing_ends(self, worker_id: int) -> None:
        question = self._runs.question(worker_id)
        try:
            rows = await self._rows_async(None, DOING, question.arguments)
        except exceptions.ConnectorException as error:
            logger.warning(
                "Jobs of worker %s could not be compared: %s",
                worker_id,
                error.__cause__ or error,
                extra={"action": "runs_not_compared", "worker_id": worker_id},
            )
            return
        doing = [(row["id"], row["attempts"]) for row in rows]
        for ending in self._runs.to_say_again(question, doing):
            await self._say_again(ending)

    async def _say_again(self, ending: Ending) -> None:
        """Say an end, if its run has not ended."""
        ending.again = True
        try:
            rows = await self._rows_async(None, ending.query, ending.arguments)
        except exceptions.ConnectorException as error:
            _log_unwritten(ending, error)
            return
        if rows:
            self._runs.written(ending)
            logger.warning(
                "The end of job %s was lost and is written now",
                ending.run.job_id,
                extra={"action": "end_written_again", "job_id": ending.run.job_id},
            )

    # procrastinate 3.9 takes no connection in these, and has none to pass on in memory.

    def get_job_status(self, job_id: int, connection: Any | None = None) -> Status:
        """Return a job's status, also in the transaction of a connection of the caller's.

        Raises:
            procrastinate.exceptions.NoResult: There is no job with this id.
        """
        if connection is None or self._in_memory:
            return super().get_job_status(job_id, **_given(connection))
        return _status(self._rows(connection, queries["get_job_status"], {"job_id": job_id}))

    async def get_job_status_async(self, job_id: int, connection: Any | None = None) -> Status:
        """Do the same as ``get_job_status``."""
        if connection is None or self._in_memory:
            return await super().get_job_status_async(job_id, **_given(connection))
        arguments = {"job_id": job_id}
        return _status(await self._rows_async(connection, queries["get_job_status"], arguments))

    def cancel_job_by_id(
        self,
        job_id: int,
        abort: bool = False,
        delete_job: bool = False,
        connection: Any | None = None,
    ) -> bool:
        """Cancel a job, also in the transaction of a connection of the caller's."""
        if connection is None or self._in_memory:
            return super().cancel_job_by_id(job_id, abort, delete_job, **_given(connection))
        arguments = {"job_id": job_id, "abort": abort, "delete_job": delete_job}
        (row,) = self._rows(connection, queries["cancel_job"], arguments)
        return row["id"] is not None

    async def cancel_job_by_id_async(
        self,
        job_id: int,
        abort: bool = False,
        delete_job: bool = False,
        connection: Any | None = None,
    ) -> bool:
        """Do the same as ``cancel_job_by_id``."""
        if connection is None or self._in_memory:
            return await super().cancel_job_by_id_async(
                job_id, abort, delete_job, **_given(connection)
            )
        arguments = {"job_id": job_id, "abort": abort, "delete_job": delete_job}
        (row,) = await self._rows_async(connection, queries["cancel_job"], arguments)
        return row["id"] is not None

    @property
    def connector(self) -> BaseConnector:
        """The application's connector, which asks about all jobs: see ``AllJobs``."""
        return self._all_jobs

    @connector.setter
    def connector(self, connector: BaseConnector) -> None:
        self._in_memory = isinstance(connector, InMemoryConnector)
        self._all_jobs = connector if self._in_memory else cast("BaseConnector", AllJobs(connector))

    def _route(self, job: Job) -> Route | None:
        return None if self._in_memory else self.dispatch.route(job)

    def _plan(self, jobs: list[Job]) -> Plan | None:
        """Return the statement that takes these jobs, or None when none of them has a policy."""
        routes = [self._route(job) for job in jobs]
        if not any(routes):
            return None
        if len(jobs) == 1 and routes[0]:
            return Plan(STAGE, _stage_arguments(jobs[0], routes[0]), jobs, order=[0])
        places: dict[str | None, list[int]] = {}
        for place, route in enumerate(routes):
            places.setdefault(route.policy if route else None, []).append(place)
        parts: list[LiteralString] = []
        arguments: dict[str, Any] = {}
        for part, (policy, members) in enumerate(places.items()):
            batch = [jobs[place] for place in members]
            number: LiteralString = str(part)  # only digits
            if policy is None:
                parts.append(QUEUE_MANY.format(part=number))
                arguments[f"jobs_{part}"] = [_queue_row(job) for job in batch]
                continue
            parts.append(STAGE_MANY.format(part=number))
            arguments[f"policy_{part}"] = policy
            batch_routes = [cast(Route, routes[place]) for place in members]
            arguments[f"batch_{part}"] = _batch(batch, batch_routes, self._json_dumps)
        query = " union all ".join(parts) + " order by part, position"
        order = [place for members in places.values() for place in members]
        return Plan(query, arguments, jobs, order)

    def _rows(
        self, connection: Any | None, query: LiteralString, arguments: dict[str, Any]
    ) -> list[dict[str, Any]]:
        connector = self.connector.get_sync_connector()
        if connection is None:
            return connector.execute_query_all(query=query, **arguments)
        return connector.execute_query_all_with_connection(connection, query=query, **arguments)

    async def _rows_async(
        self, connection: Any | None, query: LiteralString, arguments: dict[str, Any]
    ) -> list[dict[str, Any]]:
        if connection is None:
            return await self.connector.execute_query_all_async(query=query, **arguments)
        return await self.connector.execute_query_all_async_with_connection(
            connection, query=query, **arguments
        )


def _is_not_found(error: exceptions.ConnectorException) -> bool:
    return getattr(error.__cause__, "sqlstate", None) == NOT_FOUND


def _is_lost(error: Exception) -> bool:
    """Tell whether it is the connection that failed, which procrastinate's worker ends for."""
    return isinstance(error.__cause__, (psycopg.OperationalError, psycopg.InterfaceError))


def _log_refused(job: Job, periodic_id: str, defer_timestamp: int, error: Exception) -> None:
    advice = ""
    if getattr(error.__cause__, "sqlstate", None) == NO_RIGHT:
        advice = (
            "; grant the worker's role what an enqueuer needs, see Rights in the operations page"
        )
    logger.error(
        "Periodic job %s cannot be staged for timestamp %s: %s%s",
        job.call_string,
        defer_timestamp,
        error if isinstance(error, errors.DispatchError) else error.__cause__ or error,
        advice,
        exc_info=error,
        extra={
            "action": "periodic_job_refused",
            "job": job.log_context(),
            "periodic_id": periodic_id,
            "defer_timestamp": defer_timestamp,
        },
    )


def _log_unwritten(ending: Ending, error: exceptions.ConnectorException) -> None:
    logger.warning(
        "The end of job %s could not be written and is said again: %s",
        ending.run.job_id,
        error.__cause__ or error,
        extra={"action": "end_not_written", "job_id": ending.run.job_id},
    )


@contextlib.contextmanager
def _raising(jobs: list[Job]) -> Iterator[None]:
    """Raise our own errors, and for a held queueing lock ours as if procrastinate had raised it.

    The cause is then procrastinate's, which tells the constraint and the lock.
    """
    try:
        with errors.translate():
            yield
    except errors.AlreadyEnqueued as error:
        violation = exceptions.UniqueViolation(
            constraint_name=QUEUEING_LOCK_CONSTRAINT, queueing_lock=_held_lock(jobs, error)
        )
        violation.__cause__ = error.__cause__
        raise error from violation
    except exceptions.UniqueViolation as error:
        if error.constraint_name != QUEUEING_LOCK_CONSTRAINT:
            raise
        raise errors.AlreadyEnqueued(
            "there is already a job in the queue with the same queueing lock",
            detail=error.queueing_lock,
        ) from error


def _held_lock(jobs: list[Job], error: errors.AlreadyEnqueued) -> str | None:
    """Return the queueing lock of these jobs that is held; of several, the one that is named."""
    locks = {columns(job)["queueing_lock"] for job in jobs} - {None}
    if len(locks) == 1:
        return cast("str", locks.pop())
    named = [lock for lock in locks if psycopg.sql.quote(lock[:200]) in error.message]
    return max(named, key=len, default=None)


def _stage_arguments(job: Job, route: Route) -> dict[str, Any]:
    return {
        **columns(job),
        "policy": route.policy,
        "args": job.task_kwargs,
        "context": None if route.context is None else _json(route.context, job),
        "scheduled_at": job.scheduled_at,
    }


def _envelope(job: Job, route: Route) -> dict[str, Any]:
    """Return a job as ``dispatch_stage_many`` takes it, without its arguments."""
    envelope = {
        **columns(job),
        "scheduled_at": _utc(job.scheduled_at),
        "context": route.context,
    }
    return {key: value for key, value in envelope.items() if value is not None}


def _utc(moment: datetime.datetime | None) -> str | None:
    return None if moment is None else moment.astimezone(datetime.timezone.utc).isoformat()


def _batch(
    jobs: list[Job], routes: list[Route], json_dumps: Callable[..., str | bytes] | None
) -> dict[str, Any] | str:
    """Return jobs as ``dispatch_stage_many`` takes them, below the key ``jobs``.

    The driver writes it as JSON, unless the application has a json_dumps: that one gets the
    arguments of each job and nothing else.
    """
    envelopes = [_envelope(job, route) for job, route in zip(jobs, routes, strict=True)]
    for job, route in zip(jobs, routes, strict=True):
        if route.context is not None:
            _json(route.context, job)  # for the error that names the job
    if json_dumps is None:
        return {
            "jobs": [
                {**envelope, "args": job.task_kwargs}
                for envelope, job in zip(envelopes, jobs, strict=True)
            ]
        }
    texts = []
    for envelope, job in zip(envelopes, jobs, strict=True):
        args = json_dumps(job.task_kwargs)
        text = args.decode() if isinstance(args, bytes) else args
        texts.append(f'{json.dumps(envelope)[:-1]}, "args": {text}}}')
    return f'{{"jobs": [{", ".join(texts)}]}}'


def _json(value: Mapping[str, Any], job: Job) -> str:
    """Return plain JSON.

    Raises:
        InvalidJob: The context is not JSON: nothing else in it could not be.
    """
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise errors.InvalidJob(
            f"the context of a job of task {job.task_name!r} is not JSON: {error}",
            hint="A context holds strings, numbers, booleans, None, lists and dicts of these.",
        ) from error


def _queue_row(job: Job) -> types.JobToDefer:
    return types.JobToDefer(
        queue_name=job.queue,
        task_name=job.task_name,
        priority=job.priority,
        lock=job.lock,
        queueing_lock=job.queueing_lock,
        args=job.task_kwargs,
        scheduled_at=job.scheduled_at,
    )


def _given(connection: Any | None) -> dict[str, Any]:
    """Return the argument that procrastinate's own method is to have of a connection."""
    return {"connection": connection} if TAKES_CONNECTION else {}


def _status(rows: list[dict[str, Any]]) -> Status:
    if not rows:
        raise exceptions.NoResult
    return Status(rows[0]["status"])
