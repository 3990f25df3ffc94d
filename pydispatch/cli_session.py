"""The options that every command shares, and the application or database that they lead to."""

from __future__ import annotations

import asyncio
import importlib
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import procrastinate
import psycopg
import typer
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.types.datetime import TimestamptzLoader

from pydispatch.connect import READ_COMMITTED, READABLE, Source
from pydispatch.dispatch import Dispatch

__all__ = ["Session", "load_dispatch"]


@dataclass(frozen=True)
class Session:
    """Where a command works, and how it talks.

    Attributes:
        app: ``module:attribute`` (or a dotted path) of a procrastinate ``App`` or a ``Dispatch``.
        dsn: a libpq connection string or URL; stronger than the application's own.
        schema: put first into the search path of the connection.
        json: print JSON instead of tables.
    """

    app: str | None = None
    dsn: str | None = None
    schema: str | None = None
    json: bool = False

    @cached_property
    def dispatch(self) -> Dispatch | None:
        """The application's, or None when no application was named."""
        path = self.app or os.environ.get("PYDISPATCH_APP")
        return load_dispatch(path) if path else None

    @property
    def needed_dispatch(self) -> Dispatch:
        """The application's; it is a mistake not to name one."""
        if self.dispatch is None:
            raise typer.BadParameter("this command needs an application", param_hint="--app")
        return self.dispatch

    @property
    def conninfo(self) -> str | None:
        """Where to connect; None leaves it to the application."""
        if self.dsn is not None:
            conninfo = self.dsn
        elif self.dispatch is None:
            conninfo = os.environ.get("DATABASE_URL", "")
        elif self.schema is None:
            return None
        else:
            raise typer.BadParameter(
                "goes with --dsn; an application's connector names its own", param_hint="--schema"
            )
        # SQLAlchemy's way to name a driver in the URL, which libpq does not know.
        conninfo = re.sub(r"^postgres(ql)?\+\w+://", "postgresql://", conninfo)
        if self.schema is None:
            return conninfo
        path = psycopg.sql.Identifier(self.schema).as_string()
        before = conninfo_to_dict(conninfo).get("options") or os.environ.get("PGOPTIONS", "")
        escaped = re.sub(r"([\\\s])", r"\\\1", path)
        return make_conninfo(conninfo, options=f"{before} -c search_path={escaped}".strip())

    @contextmanager
    def connect(self) -> Iterator[psycopg.Connection[Any]]:
        """Open a connection in autocommit."""
        conninfo = self.conninfo
        connector = self.needed_dispatch.app.connector if conninfo is None else None
        try:
            source = Source(conninfo, connector)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--dsn") from error
        with psycopg.connect(**asyncio.run(source.options())) as connection:
            connection.adapters.register_loader("timestamptz", _TimestamptzLoader)
            connection.execute(f"{READABLE}; {READ_COMMITTED}")
            yield connection


class _TimestamptzLoader(TimestamptzLoader):
    """Leaves the times that Python has none for, such as infinity, as their text."""

    def load(self, data: Any) -> Any:
        try:
            return super().load(data)
        except psycopg.DataError:
            return bytes(data).decode()


def load_dispatch(path: str) -> Dispatch:
    """Import ``module:attribute`` and return the ``Dispatch`` there, or that of the ``App`` there.

    The current folder is searched first, as ``procrastinate --app`` does.
    """
    module_name, _, attributes = path.partition(":")
    if not attributes:
        module_name, _, attributes = path.rpartition(".")
    if not module_name or not attributes:
        raise typer.BadParameter(f"{path!r} is not like module:attribute", param_hint="--app")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found: Any = importlib.import_module(module_name)
        for attribute in attributes.split("."):
            found = getattr(found, attribute)
    except (ImportError, AttributeError) as error:
        raise typer.BadParameter(f"cannot import {path}: {error}", param_hint="--app") from error
    if isinstance(found, Dispatch):
        return found
    if not isinstance(found, procrastinate.App):
        raise typer.BadParameter(
            f"{path} is a {type(found).__name__}, not a Dispatch or a procrastinate App",
            param_hint="--app",
        )
    try:
        return Dispatch.of(found)
    except LookupError as error:
        raise typer.BadParameter(f"{path}: {error}", param_hint="--app") from error
