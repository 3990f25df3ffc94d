"""The command ``pydispatch``.

Exit status: 0 all went well; 1 the operation failed, and standard error says why; 2 the command
was not understood.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from dataclasses import asdict
from enum import Enum
from io import TextIOWrapper
from typing import Annotated

import typer

from pydispatch import (
    cli_look,  # noqa: F401  # registers its commands
    cli_operate,  # noqa: F401
    cli_simulate,  # noqa: F401
)
from pydispatch import migrate as migrations
from pydispatch.cli_command import app, command, query, show
from pydispatch.cli_output import print_json, print_line, print_rows
from pydispatch.cli_session import Session
from pydispatch.cli_web import web
from pydispatch.driver import Driver
from pydispatch.handoff import Handoff

__all__ = ["app", "main"]

_PolicyOption = Annotated[str | None, typer.Option(help="This policy only. Default: all.")]
_Shard = Annotated[str | None, typer.Option(help="Partitions of this shard only. Default: all.")]


class LogLevel(str, Enum):
    """How much ``run`` tells on standard error."""

    debug = "debug"
    info = "info"
    warning = "warning"
    error = "error"


# -- setting up


@command()
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


@command()
def uninstall(
    session: Session,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Also while jobs are staged or dead. They are lost.")
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


@command()
def sync(session: Session) -> None:
    """Write the policies that the application declares, and show which tasks follow them."""
    dispatch = session.needed_dispatch
    with session.connect() as connection:
        dispatch.sync(connection)
    rows = query(
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
    show(session, rows, empty="the application declares no policy")


# -- ticking


@command()
def tick(session: Session, policy: _PolicyOption = None, shard: _Shard = None) -> None:
    """Admit what is due, once, and say what was done."""
    handoff = Handoff(session.dispatch)
    with session.connect() as connection:
        results = handoff.run(connection, handoff.ticks(policy, shard))
    show(session, [asdict(result) for result in results], empty="no policy to tick")


@command()
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
    log_level: Annotated[
        LogLevel, typer.Option(case_sensitive=False, help="How much it tells on standard error.")
    ] = LogLevel.info,
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


command()(web)


# -- trying


@command()
def demo(session: Session) -> None:
    """Watch policies at work on a private Postgres (needs the extra "embedded")."""
    from pydispatch.demo import main as play

    raise typer.Exit(play(as_json=session.json))


def main() -> None:
    """Run the command line."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # None where it is closed
            stream.reconfigure(errors="backslashreplace")
    app(prog_name="pydispatch")
