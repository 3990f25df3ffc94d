"""What an action is about, as a request names it, and the page that shows it."""

from __future__ import annotations

import dataclasses
import uuid

from starlette.exceptions import HTTPException

from pydispatch.web import queries, shown
from pydispatch.web.actions import MOST_JOBS, Action
from pydispatch.web.asked import Fields, first, known_policy, to_id
from pydispatch.web.database import Reader
from pydispatch.web.security import Target
from pydispatch.web.site import Urls

__all__ = ["Subject", "find", "page_about"]


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
        policy = f"policy {shown.plain(shown.shortened(target.policy or '', 80))}"
        if target.partition_key is None:
            return policy
        key = shown.plain(shown.shortened(target.partition_key, 80)) or "(empty)"
        return f"partition {key} of {policy}"


async def find(reader: Reader, action: Action, fields: Fields) -> tuple[list[Subject], list[int]]:
    """What an action is about, and the ids among it that are not there any more.

    Raises:
        HTTPException: 404 or 400, it is about nothing, or nothing that this can be done to.
    """
    kind = action.of[0]
    if kind in ("job", "dead job"):
        return await _jobs(reader, kind, fields.get("id", []))
    if (id := first(fields, "partition")) and "partition" in action.of:
        return [await _partition(reader, id)], []
    if (name := first(fields, "policy")) and "policy" in action.of:
        found = await known_policy(reader, name)
        return [Subject(Target(policy=found["policy_name"]))], []
    raise HTTPException(400, f"{action.verb} what? Nothing was chosen.")


async def _partition(reader: Reader, text: str) -> Subject:
    try:
        id = str(uuid.UUID(text))
    except ValueError:
        raise HTTPException(400, "A partition is named by its id.") from None
    found = await queries.partitions.find(reader, id)
    if found is None:
        raise HTTPException(404, "There is no partition of this id any more.")
    return Subject(Target(policy=found.policy, partition_key=found.key), id)


async def _jobs(reader: Reader, kind: str, texts: list[str]) -> tuple[list[Subject], list[int]]:
    ids = list(dict.fromkeys(id for id in map(to_id, texts) if id is not None))
    if not ids:
        raise HTTPException(400, "No job was chosen. Tick one, then choose what to do with it.")
    if len(ids) > MOST_JOBS:
        raise HTTPException(400, f"At most {MOST_JOBS} jobs at a time.")
    look_up = queries.jobs.find if kind == "job" else queries.jobs.find_dead
    subjects: list[Subject] = []
    missing: list[int] = []
    for id in ids:
        found = await look_up(reader, id)
        if found is None:
            missing.append(id)
        else:
            subjects.append(Subject(Target(found["policy_name"], found["partition_key"], id)))
    if not subjects:
        raise HTTPException(404, f"There is no such {kind} any more.")
    return subjects, missing


def page_about(urls: Urls, action: Action, subject: Subject, fields: Fields) -> str:
    """The page to come back to: the list that was chosen from, or the subject's own."""
    if "dead job" in action.of and first(fields, "from") != "job":
        return urls("/dead", policy=first(fields, "of") or None)
    if subject.target.job_id is not None:
        return urls.job(subject.target.job_id)
    if subject.partition_id is not None:
        return urls.partition(subject.partition_id)
    return urls.policy(subject.target.policy or "")
