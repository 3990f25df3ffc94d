"""What changes something: asked for on a page of its own, done by a POST, always written down.

An action, the audit entry that tells of it, and nothing else are one transaction. When the action
fails its savepoint is rolled back, and the entry that tells of the failure commits. A refusal is
an entry too, where the dashboard's role may write one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import uuid
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import parse_qs

import psycopg
from psycopg.types.json import Jsonb
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from pydispatch.errors import DispatchError, translated
from pydispatch.web import queries, security, shown
from pydispatch.web.database import Reader, UnreachableError
from pydispatch.web.security import Target
from pydispatch.web.site import Flash, Site, Urls, site_of

__all__ = ["ACTIONS", "Action", "act", "confirm", "read_form"]

logger = logging.getLogger(__name__)

MOST_JOBS = 100
"""Dead jobs that one POST requeues or discards at most: a page of them."""

LONGEST_FORM = 65_536
"""Bytes of a form."""


@dataclasses.dataclass(frozen=True)
class Subject:
    """What one action is about, with what leads to its page."""

    target: Target
    partition_id: str | None = None

    @property
    def text(self) -> str:
        """It in words, for a flash or a log."""
        target = self.target
        if target.job_id is not None:
            return f"job {target.job_id}"
        policy = shown.plain(shown.shortened(target.policy or "", 80))
        if target.partition_key is None:
            return f"policy {policy}"
        key = shown.plain(shown.shortened(target.partition_key, 80)) or "(empty)"
        return f"partition {key} of policy {policy}"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What an action came to.

    Attributes:
        level: As a flash has it: ``done``, ``nothing``, ``failed``.
        text: The sentences for who did it.
        noted: For the audit log.
    """

    level: str
    text: str
    noted: dict[str, Any]


Do = Callable[[Reader, Target, int], Awaitable[Outcome]]


@dataclasses.dataclass(frozen=True)
class Action:
    """Something that can be done.

    Attributes:
        name: In addresses, for ``authorize`` and in the audit log.
        verb: On its button.
        of: What it may be about: ``policy``, ``partition``, ``jobs``.
        what: What will happen, in a sentence or two.
        do: Does it to one target, with a limit.
        limit: What the limit is before it is changed, and its most; None where there is none.
        harsh: Can it not be taken back?
    """

    name: str
    verb: str
    of: tuple[str, ...]
    what: str
    do: Do
    limit: tuple[int, int] | None = None
    harsh: bool = False


def _jobs(count: int) -> str:
    return f"{count:,} job" if count == 1 else f"{count:,} jobs"


async def _remains(reader: Reader, target: Target) -> tuple[str, dict[str, Any]]:
    """How many jobs wait and how many hold slots, in words and as numbers."""
    row = await reader.row(
        """
        select coalesce(sum(greatest(pending_count, 0)), 0)::bigint as pending,
          coalesce(sum(in_flight_count), 0)::bigint as in_flight
        from dispatch_partitions
        where policy_name = %(policy)s
          and (%(key)s::text is null or id = dispatch_partition_id(%(policy)s, %(key)s))
        """,
        policy=target.policy,
        key=target.partition_key,
    )
    assert row is not None
    verb = "waits" if row["pending"] == 1 else "wait"
    return f"{_jobs(row['pending'])} {verb}, {row['in_flight']:,} in flight.", row


async def _pause(reader: Reader, target: Target, limit: int) -> Outcome:
    before = await _is_paused(reader, target)
    await reader.row(
        "select dispatch_pause(%(policy)s, %(key)s)", policy=target.policy, key=target.partition_key
    )
    text, numbers = await _remains(reader, target)
    if before:
        return Outcome("nothing", f"It was paused already. {text}", {"was_paused": True, **numbers})
    return Outcome("done", f"Paused. {text} What is in flight runs on.", numbers)


async def _resume(reader: Reader, target: Target, limit: int) -> Outcome:
    before = await _is_paused(reader, target)
    await reader.row(
        "select dispatch_resume(%(policy)s, %(key)s)",
        policy=target.policy,
        key=target.partition_key,
    )
    text, numbers = await _remains(reader, target)
    if not before:
        said = "It was not paused; the next tick asks its gates anew."
        return Outcome("nothing", f"{said} {text}", {"was_paused": False, **numbers})
    held = target.partition_key is not None and await _is_paused(
        reader, Target(policy=target.policy)
    )
    if held:
        text += " The whole policy is paused, so nothing is admitted yet."
    return Outcome("done", f"Resumed. {text}", {"policy_is_paused": held, **numbers})


async def _is_paused(reader: Reader, target: Target) -> bool:
    return bool(
        await reader.value(
            """
            select exists (select from dispatch_pauses
              where id = dispatch_partition_id(%(policy)s, %(key)s::text))
            """,
            policy=target.policy,
            key=target.partition_key,
        )
    )


async def _drain(reader: Reader, target: Target, limit: int) -> Outcome:
    row = await reader.row(
        "select * from dispatch_drain(%(policy)s, %(key)s, %(limit)s::int)",
        policy=target.policy,
        key=target.partition_key,
        limit=limit,
    )
    assert row is not None
    admitted, ready, later = row["admitted"], row["ready"] or 0, row["later"] or 0
    left = "Nothing is left." if not ready and not later else f"Left: {row['why']}."
    return Outcome(
        "done" if admitted else "nothing",
        f"Admitted {_jobs(admitted)} past the gates. {left}",
        {"limit": limit, "admitted": admitted, "ready": ready, "later": later},
    )


async def _force_admit(reader: Reader, target: Target, limit: int) -> Outcome:
    admitted = await reader.value(
        "select dispatch_force_admit(%(policy)s, %(key)s, %(limit)s::int)",
        policy=target.policy,
        key=target.partition_key,
        limit=limit,
    )
    text, numbers = await _remains(reader, target)
    said = f"Admitted {_jobs(admitted)} past the gates."
    if not admitted:
        said = "Nothing was admitted: no job that is due waits here."
    return Outcome(
        "done" if admitted else "nothing",
        f"{said} {text}",
        {"limit": limit, "admitted": admitted, **numbers},
    )


async def _cancel(reader: Reader, target: Target, limit: int) -> Outcome:
    done = await reader.value("select dispatch_cancel(%(id)s::bigint)", id=target.job_id)
    if done:
        left = await reader.value(
            """
            select count(*) from (
              select from dispatch_staged_jobs
              where partition_id = dispatch_partition_id(%(policy)s, %(key)s)
              limit 1001
            ) as waiting
            """,
            policy=target.policy,
            key=target.partition_key,
        )
        some = "More than 1,000 jobs" if left > 1000 else _jobs(left)
        verb = "waits" if left == 1 else "wait"
        return Outcome(
            "done", f"It will not run. {some} of its partition still {verb}.", {"waiting": left}
        )
    found = await queries.job(reader, target.job_id or 0)
    state = found["state"] if found else "unknown"
    return Outcome(
        "failed",
        f"Nothing was cancelled: it is {state}, and only a staged job can be cancelled here.",
        {"error": f"the job is {state}"},
    )


async def _requeue(reader: Reader, target: Target, limit: int) -> Outcome:
    await reader.row("select dispatch_requeue_dead(%(id)s::bigint)", id=target.job_id)
    return Outcome("done", "Requeued: it waits in its policy again.", {})


async def _discard(reader: Reader, target: Target, limit: int) -> Outcome:
    await reader.row("select dispatch_discard_dead(%(id)s::bigint)", id=target.job_id)
    return Outcome("done", "Discarded. It counts as cancelled now.", {})


ACTIONS = {
    action.name: action
    for action in (
        Action(
            "pause",
            "Pause",
            ("policy", "partition"),
            "No job is admitted until it is resumed. Jobs can still be deferred, and what is in "
            "flight runs on.",
            _pause,
        ),
        Action(
            "resume",
            "Resume",
            ("policy", "partition"),
            "The pause is lifted, and the next tick asks the gates. Of a partition that is not "
            "paused, the limits are looked up anew.",
            _resume,
        ),
        Action(
            "drain",
            "Drain",
            ("policy", "partition"),
            "Everything that is due is admitted at once, past gates and pauses, up to the limit. "
            "Caps and rates are exceeded; the gates make up for it later.",
            _drain,
            limit=(1000, 10_000),
            harsh=True,
        ),
        Action(
            "force-admit",
            "Force-admit",
            ("partition",),
            "The next jobs that are due are admitted at once, past gates and pauses. They count in "
            "flight and are paid for in tokens.",
            _force_admit,
            limit=(1, 1000),
            harsh=True,
        ),
        Action(
            "cancel",
            "Cancel job",
            ("jobs",),
            "A job that is still staged is removed and will never run. One that was admitted "
            "meanwhile is left as it is.",
            _cancel,
            harsh=True,
        ),
        Action(
            "requeue",
            "Requeue",
            ("jobs",),
            "The dead jobs wait in their policies again, each under its id. What made them fail "
            "will do so again unless it was mended.",
            _requeue,
        ),
        Action(
            "discard",
            "Discard",
            ("jobs",),
            "The dead jobs are removed for good, with their arguments. They count as cancelled.",
            _discard,
            harsh=True,
        ),
    )
}
"""What can be done, by name."""


# -- the two requests


async def confirm(request: Request) -> Response:
    """Ask before an action."""
    site = site_of(request)
    action = _action(request)
    if not site.acts:
        raise HTTPException(403, "Actions are off here. " + HOW_ON)
    asked = {name: request.query_params.getlist(name) for name in request.query_params}
    async with site.database.read() as reader:
        now = await queries.database_time(reader)
        subjects, _ = await _subjects(reader, action, asked)
        remains = None
        if subjects[0].target.job_id is None:
            remains, _ = await _remains(reader, subjects[0].target)
    for subject in subjects:
        if not await security.allowed(site.authorize, request, action.name, subject.target):
            raise HTTPException(403, f"You may not {_lower(action)} {subject.text}.")
    name = security.csrf_cookie(request)
    secret = request.cookies.get(name) or security.new_secret()
    response = site.page(
        request,
        "confirm",
        now=now,
        action=action,
        subjects=subjects,
        remains=remains,
        token=security.csrf_token(secret),
        back=_page_about(Urls(request), action, subjects, asked),
        hidden=[
            (field, value)
            for field in ("policy", "partition", "id", "of", "from")
            for value in asked.get(field, [])
        ],
    )
    response.set_cookie(
        name,
        secret,
        path="/" if name.startswith("__Host-") else f"{Urls(request).base}/",
        httponly=True,
        samesite="strict",
        secure=request.url.scheme == "https",
    )
    return response


HOW_ON = (
    "They need an authorize callback of the application that mounts the dashboard, or "
    "pydispatch web --allow-actions."
)


async def act(request: Request) -> Response:
    """Do it, if it is allowed, and say on the next page what was done and what remains."""
    site = site_of(request)
    action = _action(request)
    form = await read_form(request)
    refusal = None
    if not site.acts:
        refusal = "Actions are off here. " + HOW_ON
    elif (foreign := security.foreign_origin(request.headers)) is not None:
        refusal = f"This was not sent from a page of the dashboard, but from {foreign[:200]}."
    elif not security.token_matches(
        request.cookies.get(security.csrf_cookie(request)), form.get("token", [""])[0]
    ):
        refusal = "The form is too old, or cookies are off. Go back, load the page again and retry."
    if refusal is not None:
        await _note_refusal(site, request, action, form, refusal)
        raise HTTPException(403, refusal)

    async with site.database.read() as reader:
        subjects, missing = await _subjects(reader, action, form)
    actors: list[tuple[Subject, str]] = []
    for subject in subjects:
        actor = None
        try:
            actor = await security.allowed(site.authorize, request, action.name, subject.target)
        finally:
            if actor is None:
                await _audit_refused(site, request, action, subject.target, "not authorized")
        if actor is None:
            raise HTTPException(403, f"You may not {_lower(action)} {subject.text}.")
        actors.append((subject, actor))
    limit = _limit(action, form)
    flash = await _do(site, action, actors, missing, limit)
    return site.redirect(request, _page_about(Urls(request), action, subjects, form), flash)


async def _do(
    site: Site, action: Action, actors: list[tuple[Subject, str]], missing: list[int], limit: int
) -> Flash:
    """Do an action to each of its subjects, with an audit entry each, in one transaction."""
    lines: list[str] = []
    levels: list[str] = []
    left = None
    async with site.database.write() as writer:
        for subject, actor in actors:
            outcome = await _attempt(writer, action, subject.target, limit)
            levels.append(outcome.level)
            if len(actors) == 1:
                text = subject.text
                lines.append(f"{text[0].upper()}{text[1:]}: {outcome.text}")
            elif outcome.level != "done":
                lines.append(f"Job {subject.target.job_id}: {outcome.text}")
            await _audit(writer, actor, action, subject.target, outcome)
        if action.name in ("requeue", "discard"):
            left = await _dead_left(writer, {subject.target.policy for subject, _ in actors})
    if len(actors) > 1:
        done = levels.count("done")
        past = {"requeue": "Requeued", "discard": "Discarded", "cancel": "Cancelled"}[action.name]
        others = len(actors) - done
        lines.insert(0, f"{past} {_jobs(done)}" + (f", {others} not:" if others else "."))
        if len(lines) > 4:
            lines[4:] = [f"… and {len(lines) - 4} more; the audit log has all of them."]
    if missing:
        lines.append(f"Not found: {', '.join(map(str, missing[:10]))}.")
    if left is not None:
        lines.append(left)
    level = next((each for each in ("failed", "nothing") if each in levels), "done")
    return Flash(level, tuple(lines))


async def _dead_left(writer: Reader, policies: set[str | None]) -> str:
    """How many dead jobs their policies still have, in a sentence."""
    left = await writer.value(
        """
        select count(*) from (
          select from dispatch_dead_jobs where policy_name = any (%(policies)s) limit 10001
        ) as dead
        """,
        policies=sorted(policy for policy in policies if policy is not None),
    )
    if left > 10_000:
        return "More than 10,000 dead jobs are left."
    return f"{left:,} dead {'job is' if left == 1 else 'jobs are'} left."


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


async def _audit(
    writer: Reader, actor: str, action: Action, target: Target, outcome: Outcome
) -> None:
    await writer.row(
        """
        select dispatch_audit(%(actor)s, %(action)s, %(policy)s, %(key)s, %(job_id)s::bigint,
          %(outcome)s)
        """,
        actor=_storable(actor),
        action=action.name,
        policy=target.policy,
        key=target.partition_key,
        job_id=target.job_id,
        outcome=Jsonb({"result": outcome.level, **outcome.noted}),
    )


async def _note_refusal(
    site: Site, request: Request, action: Action, form: dict[str, list[str]], why: str
) -> None:
    """Write down that an action was refused before anybody was asked, as well as that goes."""
    target = Target()
    with contextlib.suppress(HTTPException, UnreachableError, psycopg.Error):
        async with site.database.read() as reader:
            subjects, _ = await _subjects(reader, action, form)
            target = subjects[0].target
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


# -- what was sent


async def read_form(request: Request) -> dict[str, list[str]]:
    """The fields of a form, each with its values.

    Raises:
        HTTPException: 413, it is longer than any of ours; 415, it is none; 400, it is broken.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/x-www-form-urlencoded":
        raise HTTPException(415, "Only forms are taken.")
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > LONGEST_FORM:
            raise HTTPException(413, "The form is too long.")
    try:
        return parse_qs(body.decode(), keep_blank_values=True, max_num_fields=500)
    except ValueError:
        raise HTTPException(400, "The form cannot be read.") from None


def _action(request: Request) -> Action:
    try:
        return ACTIONS[request.path_params["action"]]
    except KeyError:
        raise HTTPException(404, "There is no such action.") from None


async def _subjects(
    reader: Reader, action: Action, asked: dict[str, list[str]]
) -> tuple[list[Subject], list[int]]:
    """What an action is about, and the ids among it that are not there any more.

    Raises:
        HTTPException: 404 or 400, it is about nothing, or nothing that this can be done to.
    """
    policy, partition = asked.get("policy", [""])[0], asked.get("partition", [""])[0]
    if "jobs" in action.of:
        return await _job_subjects(reader, action, asked.get("id", []))
    if partition and "partition" in action.of:
        try:
            id = str(uuid.UUID(partition))
        except ValueError:
            raise HTTPException(400, "A partition is named by its id.") from None
        found = await queries.find_partition(reader, id)
        if found is None:
            raise HTTPException(404, "There is no partition of this id any more.")
        return [Subject(Target(policy=found.policy, partition_key=found.key), id)], []
    if policy and "policy" in action.of:
        if "\0" in policy or not await queries.policy_exists(reader, policy):
            raise HTTPException(
                404, f"There is no policy “{shown.plain(shown.shortened(policy, 130))}”."
            )
        return [Subject(Target(policy=policy))], []
    raise HTTPException(400, f"{action.verb} what? Nothing was chosen.")


async def _job_subjects(
    reader: Reader, action: Action, texts: list[str]
) -> tuple[list[Subject], list[int]]:
    ids = list(dict.fromkeys(id for id in map(queries.to_id, texts) if id is not None))
    if not ids:
        raise HTTPException(400, "No job was chosen. Tick one, then choose what to do with it.")
    if len(ids) > MOST_JOBS:
        raise HTTPException(400, f"At most {MOST_JOBS} jobs at a time.")
    subjects: list[Subject] = []
    missing: list[int] = []
    for id in ids:
        found = (
            await queries.job(reader, id)
            if action.name == "cancel"
            else await queries.dead_job(reader, id)
        )
        if found is None:
            missing.append(id)
            continue
        target = Target(found["policy_name"], found["partition_key"], id)
        subjects.append(Subject(target))
    if not subjects:
        what = "job" if action.name == "cancel" else "dead job"
        raise HTTPException(404, f"There is no such {what} any more.")
    return subjects, missing


def _limit(action: Action, form: dict[str, list[str]]) -> int:
    """How many jobs at most.

    Raises:
        HTTPException: 400, it is no number within the action's bounds.
    """
    if action.limit is None:
        return 0
    text = form.get("limit", [""])[0].strip()
    most = action.limit[1]
    limit = queries.to_id(text)
    if limit is None or not 1 <= limit <= most:
        raise HTTPException(400, f"The limit has to be a number from 1 to {most:,}.")
    return limit


def _page_about(
    urls: Urls, action: Action, subjects: list[Subject], asked: dict[str, list[str]]
) -> str:
    """The page that an action is about."""
    if action.name in ("requeue", "discard") and asked.get("from", [""])[0] != "job":
        return urls("/dead", policy=asked.get("of", [None])[0] or None)
    subject = subjects[0]
    if subject.target.job_id is not None:
        return urls.job(subject.target.job_id)
    if subject.partition_id is not None:
        return urls.partition(subject.partition_id)
    return urls.policy(subject.target.policy or "")


def _lower(action: Action) -> str:
    return action.verb.lower()


def _storable(text: str) -> str:
    return text.replace("\0", "�") or "unknown"
