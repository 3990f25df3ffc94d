"""What all commands of ``pydispatch`` have in common: options, output, errors, exit status."""

from __future__ import annotations

import importlib.metadata
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any, NoReturn, TypeVar

import psycopg
import typer
from procrastinate.exceptions import ConnectorException
from psycopg.rows import dict_row

from pydispatch import errors
from pydispatch.cli_output import print_error, print_json, print_rows
from pydispatch.cli_session import Session

__all__ = ["BIGINT", "JobId", "app", "command", "query", "show"]

Function = TypeVar("Function", bound=Callable[..., None])

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)

BIGINT = 2**63 - 1
JobId = Annotated[int, typer.Argument(metavar="ID", max=BIGINT, help="What defer returned.")]

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


def command(
    name: str | None = None, *, group: typer.Typer = app, panel: str | None = None
) -> Callable[[Function], Function]:
    """Make a function a command that also takes the shared options, as its ``session``.

    Errors of the database end it with status 1 and no traceback. The name is the function's
    unless given; the help lists it in a panel.
    """

    def register(function: Function) -> Function:
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
            except UnicodeEncodeError as error:
                if error.encoding != "utf-8":
                    raise
                # An argument of other bytes, which Python keeps as halves of characters.
                raise typer.BadParameter(f"{error.object!r} is not UTF-8") from error

        run.__doc__ = function.__doc__
        add = group.command(name or function.__name__, rich_help_panel=panel)
        add(_taking_shared(run, *own))
        return function

    return register


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
    if isinstance(error, ConnectorException) and error.__cause__ is not None:
        error = error.__cause__
    ours = errors.translated(error) or error
    if isinstance(ours, psycopg.Error) and ours.diag.message_primary:
        hint = ours.diag.message_hint
        if isinstance(ours, (psycopg.errors.UndefinedTable, psycopg.errors.UndefinedFunction)):
            hint = 'Is this the right schema? If it is, "pydispatch migrate" brings it up to date.'
        ours = errors.DispatchError(
            ours.diag.message_primary,
            detail=ours.diag.message_detail,
            hint=hint,
            sqlstate=ours.sqlstate,
        )
    elif not isinstance(ours, errors.DispatchError):
        ours = errors.DispatchError(str(ours).strip(), sqlstate="")
    print_error(ours, as_json=session.json)
    raise typer.Exit(1)


def show(session: Session, rows: list[dict[str, Any]], *, empty: str) -> None:
    """Print rows as the session wants them."""
    if session.json:
        print_json(rows)
    else:
        print_rows(rows, empty=empty)


def query(session: Session, statement: str, **arguments: Any) -> list[dict[str, Any]]:
    """Run one statement and return its rows."""
    with session.connect() as connection, connection.cursor(row_factory=dict_row) as cursor:
        return cursor.execute(statement.encode(), arguments).fetchall()


def _print_version(wanted: bool) -> None:
    if wanted:
        print(importlib.metadata.version("dispatch-policy"))
        raise typer.Exit


def _remember(context: typer.Context, version: bool, **values: Any) -> None:
    context.obj = Session(**values)


_remember.__doc__ = "Per-partition admission control for procrastinate, inside Postgres."
app.callback(
    epilog="Exit status: 0 it went well; 1 it failed, and standard error says why; 2 bad usage."
)(
    _taking_shared(
        _remember,
        inspect.Parameter(
            "version",
            inspect.Parameter.KEYWORD_ONLY,
            annotation=Annotated[
                bool,
                typer.Option(
                    "--version", help="Print the version.", callback=_print_version, is_eager=True
                ),
            ],
            default=False,
        ),
    )
)
