"""``Dispatch``: policies for the tasks of a procrastinate application."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import difflib
import inspect
import json
import logging
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any, Literal, TypeAlias, TypeVar, overload

import psycopg
from procrastinate import App
from procrastinate.jobs import Job
from procrastinate.manager import JobManager
from procrastinate.tasks import Task
from procrastinate.testing import InMemoryConnector
from typing_extensions import LiteralString, Unpack

from pydispatch import errors
from pydispatch.driver import Driver, DriverOptions
from pydispatch.handoff import Handoff, Query, TickResult
from pydispatch.manager import DispatchJobManager, Route
from pydispatch.policy import UNSET, Fairness, Gate, Policy, Unset
from pydispatch.version import version_steps

__all__ = ["ContextFunction", "Dispatch"]

logger = logging.getLogger(__name__)

AnyTask: TypeAlias = Task[Any, Any, Any]
TaskT = TypeVar("TaskT", bound=AnyTask)

ContextFunction: TypeAlias = Callable[..., dict[str, Any]]
"""Takes a job's arguments as keywords, returns what the policy reads: its keys and its limits."""

# One statement, so that all are written or none. Keys of jsonb come in a fixed order, so two
# applications that do this at once do not deadlock.
SYNC: LiteralString = """
select dispatch_define_policy(policy.key, policy.value)::text as done
from jsonb_each(%(policies)s::jsonb) as policy
union all
select dispatch_map_task(task.key, task.value)::text
from jsonb_each_text(%(tasks)s::jsonb) as task
"""

_bypassed: ContextVar[frozenset[Dispatch]] = ContextVar("pydispatch_bypassed", default=frozenset())


@dataclasses.dataclass(frozen=True)
class Binding:
    """A task follows a policy."""

    policy: str
    context: ContextFunction | None


class Dispatch:
    """Gives tasks of an application policies, and stages their jobs.

    From then on every way of deferring such a task stages its job: it waits in the database
    until its policy admits it. Tasks without a policy are untouched.

    Args:
        app: The application. Its job manager is replaced.

    Raises:
        ValueError: The application has a ``Dispatch`` or a job manager of another class already.
    """

    def __init__(self, app: App) -> None:
        if type(app.job_manager) is not JobManager:
            raise ValueError(
                f"the application's job manager is a {type(app.job_manager).__name__} already; "
                "use Dispatch.of(app) for the one it has"
            )
        self.app = app
        self._policies: dict[str, Policy] = {}
        self._contexts: dict[str, ContextFunction] = {}
        self._bindings: dict[AnyTask, Binding] = {}
        self._named_bindings: dict[str, Binding] = {}
        self._redirect(app.job_manager)

    def _redirect(self, former: JobManager) -> None:
        """Take the place of the application's manager.

        What ``task.configure()`` returned before has kept that one: it passes jobs on.
        """
        manager = DispatchJobManager(self)
        for name in ("batch_defer_jobs", "batch_defer_jobs_async", "defer_periodic_job"):
            setattr(former, name, getattr(manager, name))
        self.app.job_manager = manager

    @classmethod
    def of(cls, app: App) -> Dispatch:
        """Return the ``Dispatch`` of an application.

        Raises:
            LookupError: It has none.
        """
        manager = app.job_manager
        if not isinstance(manager, DispatchJobManager):
            raise LookupError("the application has no Dispatch; make one with Dispatch(app)")
        return manager.dispatch

    # -- declaring

    def policy(
        self,
        policy: str | Policy,
        *,
        context: ContextFunction | None = None,
        partition_by: str | Sequence[str] | None = None,
        shard_by: str | Sequence[str] | None = None,
        queue: str | None = None,
        gates: Sequence[Gate] | None = None,
        fairness: Fairness | None = None,
        partition_batch_size: int | None = None,
        admission_batch_size: int | None = None,
        tick_admission_budget: int | None = None,
        max_queued: int | Unset | None = UNSET,
        max_pending: int | None = None,
        retry_strategy: Literal["restage", "bypass"] | None = None,
        stalled: Literal["leave", "retry"] | None = None,
    ) -> PolicyDecorator:
        """Let a task follow a policy; a decorator that goes above ``@app.task``.

        With a name and nothing about the policy it refers to one that is declared elsewhere, in
        Python or in SQL. Also takes the name of a task that lives in another program::

            dispatch.policy("endpoints")("worker.tasks.fetch_endpoint")

        Args:
            policy: Its name, or a ``Policy``.
            context: Called at each defer with the job's arguments as keywords; returns what the
                policy reads. Default: that of the policy's declaration, else the arguments
                themselves. What it raises makes the defer fail with ``InvalidJob``.
            partition_by: See ``Policy``, also for all that follow.
            shard_by: See ``Policy``.
            queue: See ``Policy``.
            gates: See ``Policy``.
            fairness: See ``Policy``.
            partition_batch_size: See ``Policy``.
            admission_batch_size: See ``Policy``.
            tick_admission_budget: See ``Policy``.
            max_queued: See ``Policy``.
            max_pending: See ``Policy``.
            retry_strategy: See ``Policy``.
            stalled: See ``Policy``.

        Raises:
            ValueError: The policy was declared before, and differently.
            TypeError: An argument is of a wrong type.
        """
        options: dict[str, Any] = {
            "partition_by": partition_by,
            "shard_by": shard_by,
            "queue": queue,
            "gates": gates,
            "fairness": fairness,
            "partition_batch_size": partition_batch_size,
            "admission_batch_size": admission_batch_size,
            "tick_admission_budget": tick_admission_budget,
            "max_pending": max_pending,
            "retry_strategy": retry_strategy,
            "stalled": stalled,
        }
        options = {name: value for name, value in options.items() if value is not None}
        if max_queued is not UNSET:
            options["max_queued"] = max_queued
        if isinstance(policy, Policy):
            if options:
                raise TypeError(f"a Policy is complete; it takes no {', '.join(options)} here")
            self._declare(policy, context)
        elif options:
            policy = Policy(policy, **options)
            self._declare(policy, context)
        return PolicyDecorator(self, policy.name if isinstance(policy, Policy) else policy, context)

    def _declare(self, policy: Policy, context: ContextFunction | None) -> None:
        declared = self._policies.setdefault(policy.name, policy)
        if declared.definition() != policy.definition():
            raise ValueError(f"policy {policy.name!r} is declared twice, in different ways")
        if context is not None:
            self._contexts.setdefault(policy.name, context)

    def _bind(self, task: AnyTask | str, binding: Binding) -> None:
        bound: Binding
        if isinstance(task, str):
            bound, name = self._named_bindings.setdefault(task, binding), task
        else:
            bound, name = self._bindings.setdefault(task, binding), task.name
        if bound != binding:
            raise ValueError(f"task {name!r} follows the policy {bound.policy!r} already")

    @contextlib.contextmanager
    def bypass(self) -> Iterator[None]:
        """Send what is deferred inside the ``with`` block straight to procrastinate's queue.

        Holds for the current thread or asyncio task, and what it starts.
        """
        token = _bypassed.set(_bypassed.get() | {self})
        try:
            yield
        finally:
            _bypassed.reset(token)

    # -- asked by the job manager and the hand-off

    def route(self, job: Job) -> Route | None:
        """Return where a job is to be staged, or None when it is procrastinate's alone.

        Raises:
            InvalidJob: The task's ``context`` function raised or returned something else than
                a dict.
        """
        if not self._bindings and not self._named_bindings:
            return None
        binding = self._binding(job.task_name)
        if binding is None or self in _bypassed.get():
            return None
        context = binding.context or self._contexts.get(binding.policy)
        if context is None:
            return Route(binding.policy)
        return Route(binding.policy, _call_context(context, binding.policy, job))

    def _binding(self, task_name: str) -> Binding | None:
        task = self.app.tasks.get(task_name)
        bound = None if task is None else self._bindings.get(task)
        return bound or self._named_bindings.get(task_name)

    def knows(self, task_name: str) -> bool:
        """Tell whether a task with this name or alias can be handed off."""
        self._import_tasks()
        return task_name in self.app.tasks or task_name in self._named_bindings

    def task_names(self) -> list[str]:
        """Return the names and aliases of all tasks that can be handed off."""
        self._import_tasks()
        return [*self.app.tasks, *self._named_bindings]

    def policy_names(self) -> list[str]:
        """Return the names of the policies that are declared or followed here."""
        self._import_tasks()
        followed = {binding.policy for binding in self._bindings.values()}
        named = {binding.policy for binding in self._named_bindings.values()}
        return sorted(followed | named | set(self._policies))

    def _import_tasks(self) -> None:
        """Import what the application's ``import_paths`` name, once."""
        self.app.perform_import_paths()  # type: ignore[no-untyped-call]

    # -- the database

    def sync(self, connection: Any | None = None) -> None:
        """Write the declared policies, and which tasks follow which, all or nothing.

        Does nothing with procrastinate's ``InMemoryConnector``: there is no database. Warns where
        the schema is not at the version of this code.

        Args:
            connection: One that the application's connector takes, such as psycopg's
                ``Connection``, to do it in the caller's transaction. Default: one of the
                application's, which must be open.

        Raises:
            InvalidDefinition: A policy was refused.
            UnknownPolicy: A task follows a policy that is declared nowhere.
        """
        connector = self.app.connector.get_sync_connector()
        if isinstance(connector, InMemoryConnector):
            return
        execute = connector.execute_query_all
        if connection is not None:
            execute = partial(connector.execute_query_all_with_connection, connection)
        steps, rows = self._checked_sync_steps(), None
        with errors.translate(), contextlib.suppress(StopIteration):
            while True:
                step = steps.send(rows)
                rows = execute(step.query, **step.arguments)

    async def sync_async(self, connection: Any | None = None) -> None:
        """Do the same as ``sync``."""
        connector = self.app.connector
        if isinstance(connector, InMemoryConnector):
            return
        execute = connector.execute_query_all_async
        if connection is not None:
            execute = partial(connector.execute_query_all_async_with_connection, connection)
        steps, rows = self._checked_sync_steps(), None
        with errors.translate(), contextlib.suppress(StopIteration):
            while True:
                step = steps.send(rows)
                rows = await execute(step.query, **step.arguments)

    def _checked_sync_steps(self) -> Generator[Query, Any, None]:
        yield from version_steps()
        yield from self.sync_steps()

    def sync_steps(self, only: Collection[str] | None = None) -> Generator[Query, Any, None]:
        """Yield the statement that writes the policies, or the named ones of them."""
        self._import_tasks()
        for task in self._bindings.keys() - set(self.app.tasks.values()):
            logger.warning(
                "Task %s has a policy but is not in the application: its jobs are not staged",
                task.name,
                extra={"action": "task_not_added", "task": task.name},
            )
        self._warn_of_misspelt_names()
        policies = {
            name: policy.definition()
            for name, policy in self._policies.items()
            if only is None or name in only
        }
        bound = {name: self._binding(name) for name in self.task_names()}
        tasks = {
            name: binding.policy
            for name, binding in bound.items()
            if binding is not None and (only is None or binding.policy in only)
        }
        yield Query(SYNC, {"policies": json.dumps(policies), "tasks": json.dumps(tasks)})

    def _warn_of_misspelt_names(self) -> None:
        """Warn of a task that lives elsewhere by its name, which is nearly that of one here."""
        here = [name for name, task in self.app.tasks.items() if task not in self._bindings]
        for name in self._named_bindings.keys() - self.app.tasks.keys():
            for meant in difflib.get_close_matches(name, here, n=1, cutoff=0.75):
                logger.warning(
                    "No task here is named %s, which has a policy: if %s is meant, its jobs are"
                    " not staged",
                    name,
                    meant,
                    extra={"action": "task_unknown", "task": name, "similar": meant},
                )

    def tick(
        self,
        connection: psycopg.Connection[Any],
        policy: str | None = None,
        shard: str | None = None,
    ) -> list[TickResult]:
        """Tick once, in the caller's connection and transaction.

        Nothing is committed unless the connection is in autocommit and in no transaction: then
        the tick is a transaction of its own. After an error the transaction has to be rolled
        back.

        Args:
            connection: One of psycopg.
            policy: Default: every policy but those that only other applications have tasks for.
            shard: Tick only the partitions of this shard. Default: all.

        Returns:
            One result for each policy.

        Raises:
            UnknownPolicy: There is no such policy.
            procrastinate.exceptions.ConnectorException: The connection was lost, for example.
        """
        handoff = Handoff(self)
        return handoff.run(connection, handoff.ticks(policy, shard))

    async def tick_async(
        self,
        connection: psycopg.AsyncConnection[Any],
        policy: str | None = None,
        shard: str | None = None,
    ) -> list[TickResult]:
        """Do the same as ``tick``."""
        handoff = Handoff(self)
        return await handoff.run_async(connection, handoff.ticks(policy, shard))

    def run(self, **options: Unpack[DriverOptions]) -> None:
        """Tick until SIGTERM or SIGINT; see ``Driver`` for the options."""
        asyncio.run(self.run_async(**options))

    async def run_async(self, **options: Unpack[DriverOptions]) -> None:
        """Do the same as ``run``, in a running event loop.

        Make a ``Driver`` to stop it from the program.
        """
        await Driver(self, **options).run()


class PolicyDecorator:
    """What ``Dispatch.policy`` returns: call it with a task, or with a task's name."""

    def __init__(self, dispatch: Dispatch, policy: str, context: ContextFunction | None) -> None:
        self._dispatch = dispatch
        self._binding = Binding(policy, context)

    @overload
    def __call__(self, task: TaskT) -> TaskT: ...
    @overload
    def __call__(self, task: str) -> str: ...
    def __call__(self, task: Any) -> Any:
        """Let the task follow the policy, and return it.

        Raises:
            TypeError: It is not a task.
            ValueError: It follows another policy already.
        """
        if not isinstance(task, (Task, str)):
            raise TypeError(f"{task!r} is not a task: a policy goes above @app.task")
        self._dispatch._bind(task, self._binding)
        return task


def _call_context(function: ContextFunction, policy: str, job: Job) -> dict[str, Any]:
    """Call a ``context`` function with a job's arguments.

    Raises:
        InvalidJob: It raised, or returned something else than a dict.
    """
    place = f"the context of policy {policy!r} for a job of task {job.task_name!r}"
    try:
        context: Any = function(**job.task_kwargs)
    except Exception as error:
        raise errors.InvalidJob(
            f"{place} raised {type(error).__name__}: {error}",
            hint="The function given as context= is called with the job's arguments.",
        ) from error
    if isinstance(context, dict):
        return context
    if inspect.iscoroutine(context):
        context.close()
    raise errors.InvalidJob(f"{place} is not a dict but {type(context).__name__}")
