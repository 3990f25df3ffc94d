"""What procrastinate asks of its tables, asked of all jobs: those that wait in a policy too.

procrastinate's job manager sends its statements through a connector. ``AllJobs`` stands before
that connector and puts other statements in the place of some of them. So each method of the
manager, and whatever is built on them (procrastinate's shell, its Django admin's actions), keeps
its arguments, its results and its errors, and knows of every job under the one id that it has.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from procrastinate.connector import BaseConnector
from procrastinate.sql import queries

from pydispatch import errors

__all__ = ["AllJobs"]

STATEMENTS = {
    queries["get_job_status"]: """
        select status
        from dispatch_job_status(%(job_id)s) as known (status)
        where status is not null
    """,
    queries["cancel_job"]: """
        select case when dispatch_cancel_job(%(job_id)s, %(abort)s, %(delete_job)s)
          then %(job_id)s::bigint end as id
    """,
    queries["retry_job"]: """
        select dispatch_retry_job(
          %(job_id)s, %(retry_at)s, %(new_priority)s, %(new_queue_name)s, %(new_lock)s)
    """,
    # The view has the columns of the table, and the jobs that are not in it.
    **{
        queries[name]: queries[name].replace("FROM procrastinate_jobs", "FROM dispatch_jobs")
        for name in ("list_jobs", "list_queues", "list_tasks", "list_locks")
    },
}
"""By procrastinate's statement, the one in its place."""


class AllJobs:
    """A connector that asks ``STATEMENTS``, and is otherwise the one it is made of.

    Args:
        connector: procrastinate's.
    """

    def __init__(self, connector: BaseConnector) -> None:
        self._connector = connector

    def get_sync_connector(self) -> AllJobs:
        """Do the same before the synchronous connector."""
        return AllJobs(self._connector.get_sync_connector())

    def __getattr__(self, name: str) -> Any:
        member = getattr(self._connector, name)
        if not name.startswith("execute_query"):
            return member
        return (_asking_async if "_async" in name else _asking)(member)


def _asking(execute: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(execute)
    def ask(*connection: Any, query: str, **arguments: Any) -> Any:
        with errors.translate():
            return execute(*connection, query=STATEMENTS.get(query, query), **arguments)

    return ask


def _asking_async(execute: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(execute)
    async def ask(*connection: Any, query: str, **arguments: Any) -> Any:
        with errors.translate():
            return await execute(*connection, query=STATEMENTS.get(query, query), **arguments)

    return ask
