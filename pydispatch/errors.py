"""One exception for each SQLSTATE of class ``PD`` that the database raises.

An error is recognised by its SQLSTATE alone, never by its text: texts are for people, and may
change. (What is missing in the database is told by its name, which is no text.) The names follow
procrastinate's, which carry no ``Error`` suffix.
"""

# ruff: noqa: N818

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import procrastinate.exceptions
import psycopg

__all__ = [
    "AlreadyEnqueued",
    "BacklogFull",
    "DispatchError",
    "HandoffNotSettled",
    "InvalidDefinition",
    "InvalidJob",
    "InvalidSetting",
    "MigrationRefused",
    "NotMigrated",
    "PolicyNotEmpty",
    "ProcrastinateMissing",
    "UnknownJob",
    "UnknownPolicy",
    "translate",
    "translated",
]


class DispatchError(Exception):
    """The base of every error of pydispatch.

    ``sqlstate`` is the database's code for it, ``message`` says what is wrong, ``detail`` (or None)
    names the offending value and ``hint`` (or None) what to do about it.
    """

    sqlstate: str = "PD000"

    def __init__(
        self,
        message: str,
        *,
        detail: str | None = None,
        hint: str | None = None,
        sqlstate: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.detail = detail
        self.hint = hint
        if sqlstate is not None:
            self.sqlstate = sqlstate

    def __str__(self) -> str:
        lines = [self.message]
        if self.detail:
            lines.append(f"DETAIL:  {self.detail}")
        if self.hint:
            lines.append(f"HINT:  {self.hint}")
        return "\n".join(lines)


class UnknownPolicy(DispatchError):
    """No policy has this name."""

    sqlstate = "PD001"


class InvalidDefinition(DispatchError):
    """A policy's definition was refused; the message names the path of the offending value."""

    sqlstate = "PD002"


class InvalidJob(DispatchError):
    """A job cannot be staged as it was given; in a batch the message names its position."""

    sqlstate = "PD003"


class AlreadyEnqueued(DispatchError, procrastinate.exceptions.AlreadyEnqueued):
    """A job with the same queueing lock already waits, staged or queued."""

    sqlstate = "PD004"


class PolicyNotEmpty(DispatchError):
    """The policy (or the installation) still holds staged jobs."""

    sqlstate = "PD005"


class UnknownJob(DispatchError):
    """No job has this id."""

    sqlstate = "PD006"


class BacklogFull(DispatchError):
    """The policy takes no more jobs for now."""

    sqlstate = "PD007"


class HandoffNotSettled(DispatchError):
    """Admitted jobs were not settled, or not each of them once: the transaction cannot commit."""

    sqlstate = "PD008"


class InvalidSetting(DispatchError):
    """A setting is unknown or its value is out of range."""

    sqlstate = "PD009"


class ProcrastinateMissing(DispatchError):
    """procrastinate's tables are not in the schema, or they are too old."""

    sqlstate = "PD010"


class MigrationRefused(DispatchError):
    """The schema cannot be brought to this version; nothing was changed."""

    sqlstate = "PD011"


class NotMigrated(DispatchError):
    """A function or table of ours is not there, or not as this version knows it."""

    sqlstate = "42883"


_BY_SQLSTATE = {error.sqlstate: error for error in DispatchError.__subclasses__()}

_MISSING = ("42883", "42P01", "42703", "42704")  # a function, table, column, type
_OURS = re.compile(r"\bdispatch_\w")


def translated(error: BaseException) -> DispatchError | None:
    """Our exception for a database error, or None when the error is none of ours.

    Takes an error of psycopg (or of another driver with a libpq-like ``diag``), or one of
    procrastinate whose cause is such an error.
    """
    if isinstance(error, procrastinate.exceptions.ConnectorException) and error.__cause__:
        error = error.__cause__
    error = getattr(error, "orig", None) or error  # the driver's, inside SQLAlchemy's
    diag: Any = getattr(error, "diag", None)
    sqlstate = getattr(diag, "sqlstate", None)
    if sqlstate in _MISSING and _OURS.search(diag.message_primary or ""):
        return NotMigrated(
            f"the schema is not at this version of pydispatch: {diag.message_primary}",
            hint="Run `pydispatch migrate`. If it was, let the search path name the schema.",
            sqlstate=sqlstate,
        )
    if not isinstance(sqlstate, str) or not sqlstate.startswith("PD"):
        return None
    return _BY_SQLSTATE.get(sqlstate, DispatchError)(
        diag.message_primary or "",
        detail=diag.message_detail or None,
        hint=diag.message_hint or None,
        sqlstate=sqlstate,
    )


@contextmanager
def translate() -> Iterator[None]:
    """Raise our own exception in place of a database error that carries one of our SQLSTATEs.

    Every other error passes unchanged. The database error is kept as ``__cause__``.
    """
    try:
        yield
    except (psycopg.Error, procrastinate.exceptions.ConnectorException) as error:
        ours = translated(error)
        if ours is None:
            raise
        raise ours from error
