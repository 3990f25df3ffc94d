"""Commands for whoever looks after a running installation. Each is one SQL function."""

from __future__ import annotations

from typing import Annotated

import typer

from pydispatch import errors
from pydispatch.cli_command import command, query, show
from pydispatch.cli_output import print_json, print_line
from pydispatch.cli_session import Session

__all__: list[str] = []

_Id = Annotated[int, typer.Argument(metavar="ID", help="The id that defer returned.")]


@command("Operating")
def cancel(session: Session, job_id: _Id) -> None:
    """Cancel a job that is staged."""
    (row,) = query(session, "select dispatch_cancel(%(id)s) as cancelled", id=job_id)
    if not row["cancelled"]:
        raise errors.UnknownJob(
            f"no job with id {job_id} is staged", hint="It is unknown, was admitted or has ended."
        )
    if session.json:
        print_json({"cancelled": job_id})
    else:
        print_line(f"cancelled job {job_id}")


@command("Operating")
def sweep(session: Session) -> None:
    """Free the slots of lost jobs and remove what is old, once; run does it now and then."""
    show(session, query(session, "select * from dispatch_sweep()"), empty="nothing to do")


@command("Operating")
def settings(
    session: Session,
    name: Annotated[str | None, typer.Argument(help="This setting only.")] = None,
    value: Annotated[
        str | None, typer.Argument(help='Give it this value; "default" takes it back.')
    ] = None,
) -> None:
    """Show the settings, or change one."""
    if value is not None:
        query(
            session,
            "select dispatch_set(%(name)s, nullif(%(value)s, 'default')::numeric)",
            name=name,
            value=value,
        )
    rows = query(
        session,
        """
        select name, dispatch_setting(name) as value, default_value, minimum, maximum, meaning
        from dispatch_setting_spec()
        where %(name)s::text is null or name = %(name)s
        order by name
        """,
        name=name,
    )
    if name is not None and not rows:
        query(session, "select dispatch_setting(%(name)s)", name=name)  # says what is wrong
    show(session, rows, empty="there are no settings")
