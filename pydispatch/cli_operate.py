"""Commands for whoever looks after a running installation. Each is one SQL function."""

from __future__ import annotations

from typing import Annotated

import typer

from pydispatch import errors
from pydispatch.cli_command import BIGINT, JobId, app, command, query, show
from pydispatch.cli_output import print_json, print_line
from pydispatch.cli_session import Session

__all__ = ["dead"]

_PANEL = "Operating"

_Policy = Annotated[str, typer.Argument(metavar="POLICY")]
_Key = Annotated[str, typer.Argument(metavar="KEY", help="A partition.")]
_OptionalKey = Annotated[
    str | None, typer.Argument(metavar="KEY", help="A partition. Default: the whole policy.")
]
_Ids = Annotated[
    list[int], typer.Argument(metavar="ID...", max=BIGINT, help="What defer returned.")
]

dead = typer.Typer(no_args_is_help=True)
app.add_typer(dead, name="dead", rich_help_panel=_PANEL, help="Jobs that could not be handed off.")


def _done(session: Session, **what: object) -> None:
    """Report an action that has no rows to show."""
    if session.json:
        print_json(what)
    else:
        print_line(
            ", ".join(f"{name} {value}" for name, value in what.items() if value is not None)
        )


@command(panel=_PANEL)
def pause(session: Session, policy: _Policy, key: _OptionalKey = None) -> None:
    """Hold a policy or a partition, also one that is not there yet."""
    query(session, "select dispatch_pause(%(policy)s, %(key)s)", policy=policy, key=key)
    _done(session, paused=policy, partition=key)


@command(panel=_PANEL)
def resume(session: Session, policy: _Policy, key: _OptionalKey = None) -> None:
    """Lift a pause."""
    query(session, "select dispatch_resume(%(policy)s, %(key)s)", policy=policy, key=key)
    _done(session, resumed=policy, partition=key)


@command("force-admit", panel=_PANEL)
def force_admit(
    session: Session,
    policy: _Policy,
    key: _Key,
    limit: Annotated[int, typer.Option(max=10_000, help="How many jobs.")] = 1,
) -> None:
    """Admit the next jobs of a partition past its gates; they count in flight."""
    (row,) = query(
        session,
        "select dispatch_force_admit(%(policy)s, %(key)s, %(limit)s) as admitted",
        policy=policy,
        key=key,
        limit=limit,
    )
    _done(session, **row)


@command(panel=_PANEL)
def drain(
    session: Session,
    policy: _Policy,
    key: _OptionalKey = None,
    limit: Annotated[int, typer.Option(max=100_000, help="How many jobs at most.")] = 10_000,
) -> None:
    """Admit all that is due past the gates, and say what is left and why."""
    rows = query(
        session,
        "select * from dispatch_drain(%(policy)s, %(key)s, %(limit)s)",
        policy=policy,
        key=key,
        limit=limit,
    )
    show(session, rows, empty="")


@command(panel=_PANEL)
def job(session: Session, job_id: JobId) -> None:
    """Show where a job is."""
    show(session, query(session, "select * from dispatch_job(%(id)s)", id=job_id), empty="")


@command(panel=_PANEL)
def cancel(session: Session, job_id: JobId) -> None:
    """Cancel a job that is staged."""
    (row,) = query(session, "select dispatch_cancel(%(id)s) as cancelled", id=job_id)
    if not row["cancelled"]:
        raise errors.UnknownJob(
            f"no job with id {job_id} is staged", hint="It is unknown, was admitted or has ended."
        )
    _done(session, cancelled=job_id)


@command("list", group=dead)
def dead_list(
    session: Session,
    policy: Annotated[str | None, typer.Option(help="Of this policy only.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=BIGINT, help="How many at most.")] = 100,
) -> None:
    """Show them with their errors, the oldest first."""
    rows = query(
        session,
        """
        select id, policy_name, partition_key, task_name, args, attempts, died_at, error
        from dispatch_dead_jobs
        where %(policy)s::text is null or policy_name = %(policy)s
        order by died_at, id
        limit %(limit)s
        """,
        policy=policy,
        limit=limit,
    )
    show(session, rows, empty="no job is dead")


@command("requeue", group=dead)
def dead_requeue(session: Session, job_ids: _Ids) -> None:
    """Stage them again, all or none."""
    query(session, "select dispatch_requeue_dead(id) from unnest(%(ids)s) as id", ids=job_ids)
    _done(session, requeued=job_ids)


@command("discard", group=dead)
def dead_discard(session: Session, job_ids: _Ids) -> None:
    """Remove them for good, all or none."""
    query(session, "select dispatch_discard_dead(id) from unnest(%(ids)s) as id", ids=job_ids)
    _done(session, discarded=job_ids)


@command(panel=_PANEL)
def sweep(session: Session) -> None:
    """Free the slots of lost jobs and remove what is old, once; run does it now and then."""
    show(session, query(session, "select * from dispatch_sweep()"), empty="nothing to do")


@command(panel=_PANEL)
def settings(
    session: Session,
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="This setting only.")] = None,
    value: Annotated[
        str | None,
        typer.Argument(metavar="VALUE", help='Give it this value; "default" takes it back.'),
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
