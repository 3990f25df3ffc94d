"""The columns of a job as procrastinate writes them: by what psycopg makes of any value.

procrastinate sends a job as one composite value, in which each field is text. So a lock may be a
number, a UUID, a date or a member of an enumeration, and jobs with and without a policy exclude
each other only where both write the same text. In a call of a function or in JSON psycopg would
send such values with types of their own.
"""

from __future__ import annotations

from typing import Any

import psycopg
from procrastinate.jobs import Job
from psycopg.adapt import PyFormat, Transformer

from pydispatch import errors

__all__ = ["columns"]


def columns(job: Job) -> dict[str, Any]:
    """Return a job's columns other than its arguments and its schedule, as text and integer.

    Raises:
        InvalidJob: psycopg knows no text for a value, or it is no integer where one is needed.
    """
    return {
        "task_name": _text(job, "task_name", job.task_name),
        "queue_name": _text(job, "queue", job.queue),
        "priority": _integer(job, "priority", job.priority),
        "lock": _text(job, "lock", job.lock),
        "queueing_lock": _text(job, "queueing_lock", job.queueing_lock),
    }


def _text(job: Job, name: str, value: Any) -> str | None:
    if value is None or type(value) is str:
        return value
    if isinstance(value, (bytes, bytearray, memoryview)):
        return f"\\x{bytes(value).hex()}"  # psycopg asks the connection for this form
    try:
        dumped = Transformer().get_dumper(value, PyFormat.TEXT).dump(value)
        return None if dumped is None else bytes(dumped).decode()
    except (psycopg.Error, UnicodeError) as error:
        raise _invalid(job, name, value, "has no text form", error) from error


def _integer(job: Job, name: str, value: Any) -> int | None:
    if value is None or type(value) is int:
        return value
    try:
        return int(_text(job, name, value) or "")
    except ValueError as error:
        raise _invalid(job, name, value, "is no integer", error) from error


def _invalid(job: Job, name: str, value: Any, fault: str, error: Exception) -> errors.InvalidJob:
    return errors.InvalidJob(
        f"{name} of a job of task {job.task_name!r} {fault}: {value!r}", detail=str(error)
    )
