"""The command ``pydispatch``.

Exit status: 0 all went well; 1 the operation failed, and standard error says why; 2 the command
was not understood.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.metadata
import inspect
import logging
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from enum import Enum
from typing import Annotated, Any, NoReturn, TypeVar

import psycopg
import typer
from procrastinate.exceptions import ConnectorException
from psycopg.rows import dict_row

from pydispatch import errors
from pydispatch import migrate as migrations
from pydispatch.cli_output import print_error, print_json, print_line, print_rows
from pydispatch.cli_session import Session
from pydispatch.driver import Driver
from pydispatch.handoff import Handoff

__all__ = ["app", "main"]

Function = TypeVar("Function", bound=Callable[..., None])

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)

_WHERE = "Where to work"

# What every command takes, before its name or after it.
_SHARED: dict[str, Any] = {
    "app": Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:NAME",
            rich_help_panel=_WHERE,
            help="A procrastinate App with a Dispatch, or the Dispatch itself. "
            "Default: PYDISPATCH_APP, else none: the database does all of the work.",
        ),
    ],
    "dsn": Annotated[
        str | None,
        typer.Option(
            metavar="CONNINFO",
            rich_help_panel=_WHERE,
            help="Where to connect. Default: where the app does; without an app, DATABASE_URL, "
            "else libpq's variables (PGHOST, ...).",
        ),
    ],
    "schema": Annotated[
        str | None,
        typer.Option(
            rich_help_panel=_WHERE, help="The schema. Default: the first of the search path."
        ),
    ],
    "json": Annotated[bool, typer.Option("--json", help="Print JSON.")],
}

_Policy = Annotated[str, typer.Argument(help="Name of the policy.")]
_PolicyOption = Annotated[str | None, typer.Option(help="This policy only. Default: all.")]
_Shard = Annotated[str | None, typer.Option(help="Partitions of this shard only. Default: all.")]


class LogLevel(str, Enum):
    """How much ``run`` tells on standard error."""

    debug = "debug"
    info = "info"
    warning = "warning"
    error = "error"


# -- making functions commands


def command(function: Function) -> Function:
    """Make a function a command that also takes the shared options, as its ``session``.

    Errors of the database end it with status 1 and no traceback.
    """
    _, *own = inspect.signature(function, eval_str=True).parameters.values()

    def run(context: typer.Context, **values: Any) -> None:
        given = {name: values.pop(name) for name in _SHARED}
        session = replace(
            context.find_object(Session) or Session(),
            **{name: value for name, value in given.items() if value},
        )
        try:
            function(session, **values)
        except (psycopg.Error, errors.DispatchError, ConnectorException) as error:
            _fail(session, error)

    run.__doc__ = function.__doc__
    app.command(function.__name__)(_taking_shared(run, *own))
    return function


def _taking_shared(function: Callable[..., None], *own: inspect.Parameter) -> Callable[..., None]:
    """Tell typer that a function takes a context, parameters of its own and the shared ones."""
    parameters = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in (
            inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context),
            *own,
            *(
                inspect.Parameter(
                    name,
                    inspect.Parameter.KEYWORD_ONLY,
                    annotation=annotation,
                    default=False if name == "json" else None,
                )
                for name, annotation in _SHARED.items()
            ),
        )
    ]
    function.__annotations__ = {each.name: each.annotation for each in parameters}
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return function


def _fail(session: Session, error: BaseException) -> NoReturn:
    """Say what went wrong and end with status 1."""
    error = errors.translated(error) or error
    if isinstance(error, ConnectorException) and error.__cause__ is not None:
        error = error.__cause__
    message, detail, hint, sqlstate = str(error).strip(), None, None, None
    if isinstance(error, errors.DispatchError):
        message, detail, hint, sqlstate = error.message, error.detail, error.hint, error.sqlstate
    elif isinstance(error, psycopg.Error) and error.diag.message_primary:
        diag = error.diag
        message, detail, hint, sqlstate = (
            error.diag.message_primary,
            diag.message_detail,
            diag.message_hint,
            diag.sqlstate,
        )
        if isinstance(error, (psycopg.errors.UndefinedTable, psycopg.errors.UndefinedFunction)):
            hint = 'Is this the right schema? If it is, "pydispatch migrate" brings it up to date.'
    print_error(message, detail=detail, hint=hint, sqlstate=sqlstate, as_json=session.json)
    raise typer.Exit(1)


def _show(session: Session, rows: list[dict[str, Any]], *, empty: str) -> None:
    """Print rows as the session wants them."""
    if session.json:
        print_json(rows)
    else:
        print_rows(rows, empty=empty)


def _query(session: Session, query: str, **arguments: Any) -> list[dict[str, Any]]:
    """Run one statement and return its rows."""
    with session.connect() as connection, connection.cursor(row_factory=dict_row) as cursor:
        return cursor.execute(query.encode(), arguments).fetchall()


# -- setting up


@command
def migrate(
    session: Session,
    print_: Annotated[
        bool, typer.Option("--print", help="Print it as one SQL script, and connect to nothing.")
    ] = False,
    with_procrastinate: Annotated[
        bool,
        typer.Option("--with-procrastinate", help="Also make procrastinate's tables, if absent."),
    ] = False,
) -> None:
    """Bring the schema to this version of pydispatch, and say what was applied."""
    if print_:
        sys.stdout.write(
            migrations.script(schema=session.schema, with_procrastinate=with_procrastinate)
        )
        return
    with session.connect() as connection:
        applied = migrations.migrate(connection, with_procrastinate=with_procrastinate)
    if session.json:
        print_json({"applied": applied})
    elif not applied:
        print_line("up to date")
    else:
        print_rows([{"applied": name} for name in applied], empty="")


@command
def uninstall(
    session: Session,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Also while jobs are staged. They are lost.")
    ] = False,
) -> None:
    """Drop everything that migrate made, and leave procrastinate as it was."""
    with session.connect() as connection:
        if not yes:
            cursor = connection.execute("select current_database(), current_schema()")
            database, schema = cursor.fetchone() or (None, None)
            typer.confirm(
                f"Remove pydispatch and its data from database {database}, schema {schema}?",
                abort=True,
                err=True,
            )
        dropped = migrations.uninstall(connection, force=force)
    if session.json:
        print_json({"dropped": dropped})
    else:
        print_rows([{"dropped": name} for name in dropped], empty="nothing to drop")


@command
def sync(session: Session) -> None:
    """Write the policies that the application declares, and show which tasks follow them."""
    dispatch = session.needed_dispatch
    with session.connect() as connection:
        dispatch.sync(connection)
    rows = _query(
        session,
        """
        select p.policy_name, array_remove(array_agg(t.task_name order by t.task_name), null) tasks
        from dispatch_policies p
        left join dispatch_tasks t on t.policy_name = p.policy_name
        where p.policy_name = any (%(names)s)
        group by p.policy_name
        order by p.policy_name
        """,
        names=dispatch.policy_names(),
    )
    _show(session, rows, empty="the application declares no policy")


# -- ticking


@command
def tick(session: Session, policy: _PolicyOption = None, shard: _Shard = None) -> None:
    """Admit what is due, once, and say what was done."""
    handoff = Handoff(session.dispatch)
    with session.connect() as connection:
        results = handoff.run(connection, handoff.ticks(policy, shard))
    _show(session, [asdict(result) for result in results], empty="no policy to tick")


@command
def run(
    session: Session,
    policy: Annotated[
        list[str] | None,
        typer.Option(help="This policy only; may be repeated. Default: the application's, or all."),
    ] = None,
    shard: _Shard = None,
    no_sync: Annotated[
        bool, typer.Option("--no-sync", help="Do not write the application's policies first.")
    ] = False,
    log_level: Annotated[LogLevel, typer.Option(case_sensitive=False)] = LogLevel.info,
) -> None:
    """Admit whenever something is due, until SIGTERM or SIGINT."""
    logging.basicConfig(
        level=log_level.value.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    driver = Driver(
        session.dispatch,
        conninfo=session.conninfo,
        policies=policy or None,
        shard=shard,
        sync=not no_sync,
    )
    asyncio.run(driver.run())


# -- looking


@command
def status(session: Session, policy: _PolicyOption = None) -> None:
    """Show each policy: partitions, jobs waiting and in flight, what was admitted."""
    rows = _query(
        session,
        """
        select * from dispatch_policy_status
        where %(policy)s::text is null or policy_name = %(policy)s
        order by policy_name
        """,
        policy=policy,
    )
    if policy is not None and not rows:
        raise errors.UnknownPolicy(f"unknown policy {policy!r}")
    _show(session, rows, empty="no policy is defined")


@command
def demo(session: Session) -> None:
    """Watch policies at work on a private Postgres (needs the extra "embedded")."""
    raise typer.Exit(importlib.import_module("pydispatch.demo").main() or 0)


# -- the whole


def _shared(context: typer.Context, version: bool, **values: Any) -> None:
    if version:
        print(importlib.metadata.version("dispatch-policy"))
        raise typer.Exit
    context.obj = Session(**values)


_shared.__doc__ = "Per-partition admission control for procrastinate, inside Postgres."
app.callback()(
    _taking_shared(
        _shared,
        inspect.Parameter(
            "version",
            inspect.Parameter.KEYWORD_ONLY,
            annotation=Annotated[bool, typer.Option("--version", help="Print the version.")],
            default=False,
        ),
    )
)


def main() -> None:
    """Run the command line."""
    app(prog_name="pydispatch")
