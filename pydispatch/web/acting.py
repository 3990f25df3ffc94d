"""The two requests of an action: a page that asks, and a POST that does it and writes it down.

An action, the audit entry that tells of it, and nothing else are one transaction. When the action
fails its savepoint is rolled back, and the entry that tells of the failure commits. A refusal is
an entry too, where the dashboard's role may write one.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence

import psycopg
from psycopg.types.json import Jsonb
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from pydispatch.errors import DispatchError, translated
from pydispatch.web import security, subjects
from pydispatch.web.actions import ACTIONS, Action, Outcome, dead_left, jobs, remains
from pydispatch.web.asked import Fields, clean, first, form_of, to_id
from pydispatch.web.database import Reader, UnreachableError
from pydispatch.web.security import Target
from pydispatch.web.site import Flash, Site, Urls, site_of
from pydispatch.web.subjects import Subject, page_about

__all__ = ["act", "confirm"]

logger = logging.getLogger(__name__)

OFF = (
    "Actions are off here. They need an authorize callback of the application that mounts the "
    "dashboard, or pydispatch web --allow-actions."
)


async def confirm(request: Request) -> Response:
    """Ask before an action."""
    site = site_of(request)
    action = _action(request)
    if not site.acts:
        raise HTTPException(403, OFF)
    asked = {name: request.query_params.getlist(name) for name in request.query_params}
    async with site.database.read() as reader:
        now = await reader.database_time()
        chosen, _ = await subjects.find(reader, action, asked)
        left = None
        if chosen[0].target.job_id is None:
            left, _ = await remains(reader, chosen[0].target)
    for subject in chosen:
        if not await security.allowed(site.authorize, request, action.name, subject.target):
            raise _forbidden(action, subject)
    name = security.csrf_cookie(request)
    secret = request.cookies.get(name) or security.new_secret()
    response = site.page(
        request,
        "confirm",
        now=now,
        action=action,
        subjects=chosen,
        remains=left,
        token=security.csrf_token(secret),
        back=page_about(Urls(request), action, chosen[0], asked),
        hidden=[
            (field, value)
            for field in ("policy", "partition", "id", "of", "from")
            for value in asked.get(field, [])
        ],
    )
    path = {"path": "/"} if name.startswith("__Host-") else {}
    site.set_cookie(request, response, name, secret, **path)
    return response


async def act(request: Request) -> Response:
    """Do it, if it is allowed, and say on the next page what was done and what remains."""
    site = site_of(request)
    action = _action(request)
    form = await form_of(request)
    refusal = _refusal(site, request, form)
    if refusal is not None:
        await _note_refusal(site, request, action, form, refusal)
        raise HTTPException(403, refusal)
    async with site.database.read() as reader:
        chosen, missing = await subjects.find(reader, action, form)
    actors = [await _actor(site, request, action, subject) for subject in chosen]
    outcomes, left = await _do(site, action, chosen, actors, _limit(action, form))
    flash = _flash(action, chosen, outcomes, missing, left)
    return site.redirect(request, page_about(Urls(request), action, chosen[0], form), flash)


# -- whether it may be done


def _action(request: Request) -> Action:
    try:
        return ACTIONS[request.path_params["action"]]
    except KeyError:
        raise HTTPException(404, "There is no such action.") from None


def _refusal(site: Site, request: Request, form: Fields) -> str | None:
    """Why nobody may do what a form asks for, whoever that is."""
    if not site.acts:
        return OFF
    foreign = security.foreign_origin(request.headers)
    if foreign is not None:
        return f"This was not sent from a page of the dashboard, but from {foreign[:200]}."
    secret = request.cookies.get(security.csrf_cookie(request))
    if not security.token_matches(secret, first(form, "token")):
        return "The form is too old, or cookies are off. Go back, load the page again and retry."
    return None


async def _actor(site: Site, request: Request, action: Action, subject: Subject) -> str:
    """The name of who does it.

    Raises:
        HTTPException: 403, they may not; or what ``authorize`` raised. Either is written down.
    """
    actor = None
    try:
        actor = await security.allowed(site.authorize, request, action.name, subject.target)
        if actor is None:
            raise _forbidden(action, subject)
        return actor
    finally:
        if actor is None:
            await _audit_refused(site, request, action, subject.target, "not authorized")


def _forbidden(action: Action, subject: Subject) -> HTTPException:
    return HTTPException(403, f"You may not {action.verb.lower()} {subject.text}.")


def _limit(action: Action, form: Fields) -> int:
    """How many jobs at most.

    Raises:
        HTTPException: 400, it is no number within the action's bounds.
    """
    if action.limit is None:
        return 0
    _, most = action.limit
    limit = to_id(first(form, "limit"))
    if limit is None or not 1 <= limit <= most:
        raise HTTPException(400, f"The limit has to be a number from 1 to {most:,}.")
    return limit


# -- doing it


async def _do(
    site: Site, action: Action, chosen: list[Subject], actors: list[str], limit: int
) -> tuple[list[Outcome], str | None]:
    """Do an action to each of its subjects, with an audit entry each, in one transaction.

    Of dead jobs, also say how many are left.
    """
    outcomes = []
    async with site.database.write() as writer:
        for subject, actor in zip(chosen, actors, strict=True):
            outcome = await _attempt(writer, action, subject.target, limit)
            await _audit(writer, actor, action, subject.target, outcome)
            outcomes.append(outcome)
        left = None
        if "dead job" in action.of:
            left = await dead_left(writer, {subject.target.policy for subject in chosen})
    return outcomes, left


async def _attempt(writer: Reader, action: Action, target: Target, limit: int) -> Outcome:
    """Do it in a savepoint; what the database refuses is an outcome like any other.

    Raises:
        UnreachableError: The database was lost: nothing was done.
    """
    try:
        async with writer.savepoint():
            return await action.do(writer, target, limit)
    except psycopg.Error as error:
        if writer.is_lost:
            raise
        ours = translated(error) or DispatchError(
            error.diag.message_primary or str(error),
            detail=error.diag.message_detail,
            sqlstate=error.sqlstate or "",
        )
        said = " ".join(
            f"{part.rstrip('.')}." for part in (ours.message, ours.detail, ours.hint) if part
        )
        return Outcome(
            "failed",
            f"Nothing was done. {said}",
            {"error": ours.message[:500], "sqlstate": ours.sqlstate},
        )


def _flash(
    action: Action,
    chosen: Sequence[Subject],
    outcomes: Sequence[Outcome],
    missing: Sequence[int],
    left: str | None,
) -> Flash:
    """What the next page says; of several subjects, how many and the first that were not done."""
    if len(chosen) == 1:
        text = chosen[0].text
        lines = [f"{text[0].upper()}{text[1:]}: {outcomes[0].text}"]
    else:
        others = [
            f"Job {subject.target.job_id}: {outcome.text}"
            for subject, outcome in zip(chosen, outcomes, strict=True)
            if outcome.level != "done"
        ]
        end = f", {len(others)} not:" if others else "."
        lines = [f"{action.past} {jobs(len(chosen) - len(others))}{end}", *others[:3]]
        if len(others) > 3:
            lines.append(f"… and {len(others) - 3} more; the audit log has all of them.")
    if missing:
        lines.append(f"Not found: {', '.join(map(str, missing[:10]))}.")
    if left is not None:
        lines.append(left)
    levels = {outcome.level for outcome in outcomes}
    level = next((each for each in ("failed", "nothing") if each in levels), "done")
    return Flash(level, tuple(lines))


# -- the audit log


async def _audit(
    writer: Reader, actor: str, action: Action, target: Target, outcome: Outcome
) -> None:
    await writer.row(
        """
        select dispatch_audit(%(actor)s, %(action)s, %(policy)s, %(partition_key)s,
          %(job_id)s::bigint, %(outcome)s)
        """,
        actor=clean(actor) or "unknown",
        action=action.name,
        outcome=Jsonb({"result": outcome.level, **outcome.noted}),
        **vars(target),
    )


async def _note_refusal(
    site: Site, request: Request, action: Action, form: Fields, why: str
) -> None:
    """Write down that an action was refused before anybody was asked, as well as that goes."""
    target = Target()
    with contextlib.suppress(HTTPException, UnreachableError, psycopg.Error):
        async with site.database.read() as reader:
            chosen, _ = await subjects.find(reader, action, form)
            target = chosen[0].target
    await _audit_refused(site, request, action, target, why)


async def _audit_refused(
    site: Site, request: Request, action: Action, target: Target, why: str
) -> None:
    """Write down a refusal; a database that does not take it changes nothing about that."""
    outcome = Outcome("refused", why, {"why": why})
    try:
        async with site.database.write() as writer:
            await _audit(writer, security.client_name(request), action, target, outcome)
    except (UnreachableError, psycopg.Error) as error:
        logger.warning(
            "A refused action could not be written down: %s",
            error,
            extra={"action": "audit_failed"},
        )
