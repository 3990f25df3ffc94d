"""The pages that show: each reads in one read-only transaction, and renders."""

from __future__ import annotations

import base64
import binascii
import json
import uuid
from datetime import datetime, timedelta
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from pydispatch.web import queries, shown
from pydispatch.web.advice import advice
from pydispatch.web.database import Reader, Row
from pydispatch.web.site import Urls, site_of

__all__ = [
    "audit",
    "dead",
    "hints",
    "job",
    "overview",
    "partition",
    "partitions",
    "policies",
    "policy",
    "search",
]


LINGERING = timedelta(seconds=10)
"""A job that was queued for longer might wait for workers that are not there."""


async def overview(request: Request) -> Response:
    """What an operator sees first: what to do, then how much there is of everything."""
    site = site_of(request)
    async with site.database.read() as reader:
        now = await queries.database_time(reader)
        rows = await queries.policies(reader)
        found = await queries.hints(reader, limit=queries.HINTS + 1)
        throughput = await queries.admissions_chart(reader, now)
        pending, _ = await queries.history_charts(reader, now)
        capacity = await queries.capacity(reader)
        workers = await queries.workers(reader, now)
    return site.page(
        request,
        "overview",
        now=now,
        policies=rows[:50],
        more_policies=max(len(rows) - 50, 0),
        totals=_totals(rows),
        capacity=capacity,
        slots=_slots(capacity),
        workers=workers,
        hints=found[: queries.HINTS],
        more_hints=len(found) > queries.HINTS,
        throughput=throughput,
        pending=pending,
    )


def _totals(rows: list[Row]) -> Row:
    """The sums over policies, and the longest waits."""
    names = (
        "partitions",
        "pending",
        "waiting",
        "in_flight",
        "queued",
        "running",
        "due",
        "blocked",
        "dead",
        "admitted_last_minute",
    )
    totals: Row = {name: sum(row[name] for row in rows) for name in names}
    totals["oldest_wait"] = max(
        (row["oldest_wait"] for row in rows if row["oldest_wait"] is not None), default=None
    )
    totals["oldest_queued_at"] = min(
        (row["oldest_queued_at"] for row in rows if row["oldest_queued_at"] is not None),
        default=None,
    )
    return totals


def _slots(capacity: dict[str, Row]) -> Row:
    """Slots over the policies whose caps are known."""
    names = ("in_flight", "slots", "partitions", "full_partitions")
    return {name: sum(row[name] for row in capacity.values()) for name in names}


async def hints(request: Request) -> Response:
    """All hints, as far as a page has room for them."""
    site = site_of(request)
    name = request.query_params.get("policy")
    async with site.database.read() as reader:
        now = await queries.database_time(reader)
        if name is not None:
            await _known(reader, name)
        found = await queries.hints(reader, policy=name, limit=501)
    return site.page(
        request, "hints", now=now, policy=name, hints=found[:500], more_hints=len(found) > 500
    )


async def search(request: Request) -> Response:
    """Lead to the job, the partition or the policy that is meant, or list what may be."""
    site = site_of(request)
    urls = Urls(request)
    text = request.query_params.get("q", "")
    async with site.database.read() as reader:
        now = await queries.database_time(reader)
        job = None
        if (id := queries.to_id(text)) is not None:
            job = await queries.job(reader, id)
        exact = await _searched(reader, text)
        policies = [text] if await queries.policy_exists(reader, _clean(text)) else []
        alike: list[Row] = []
        more = None
        if not exact and text:
            alike, more = await queries.partitions_page(reader, search=_clean(text), limit=25)
    places = [
        *([urls.job(id)] if job else []),
        *(urls.partition(row["id"]) for row in exact or alike),
        *(urls.policy(name) for name in policies),
    ]
    if len(places) == 1:
        return site.redirect(request, places[0])
    return site.page(
        request,
        "search",
        now=now,
        text=text,
        job=job,
        exact=exact,
        policies=policies,
        alike=alike,
        more=more is not None,
    )


async def _searched(reader: Reader, text: str) -> list[Row]:
    """The partitions of exactly this key, or of this id."""
    found = [] if "\0" in text else await queries.find_partitions(reader, text)
    if not found:
        try:
            meant = uuid.UUID(text.strip())
        except ValueError:
            return []
        one = await queries.find_partition(reader, str(meant))
        if one is not None:
            counts = one.status or {"pending_count": None, "in_flight_count": None}
            found = [
                {
                    "policy_name": one.policy,
                    "partition_key": one.key,
                    "id": one.id,
                    "pending_count": counts["pending_count"],
                    "in_flight_count": counts["in_flight_count"],
                }
            ]
    return found


def _clean(text: str) -> str:
    """A text as PostgreSQL can hold it: it has no zero characters, and so nothing with one."""
    return text.replace("\0", "�")


async def policies(request: Request) -> Response:
    """All policies beside each other."""
    site = site_of(request)
    async with site.database.read() as reader:
        now = await queries.database_time(reader)
        rows = await queries.policies(reader)
        capacity = await queries.capacity(reader)
    return site.page(
        request,
        "policies",
        now=now,
        policies=rows[:500],
        more_policies=max(len(rows) - 500, 0),
        capacity=capacity,
    )


async def policy(request: Request) -> Response:
    """One policy: what it does now and did in the last hour, and what it says."""
    site = site_of(request)
    name = request.query_params.get("name", "")
    async with site.database.read() as reader:
        now = await queries.database_time(reader)
        definition = await _known(reader, name)
        status = (await queries.policies(reader, name))[0]
        found = await queries.hints(reader, policy=name, limit=queries.HINTS + 1)
        throughput = await queries.admissions_chart(reader, now, name)
        pending, lag = await queries.history_charts(reader, now, name)
        denials = await queries.denials(reader, now, name)
        capacity = await queries.capacity(reader, name)
        top, more = await queries.partitions_page(reader, policy=name, limit=10)
        tasks = await queries.tasks(reader, name)
    gates = definition["gates"]
    return site.page(
        request,
        "policy",
        now=now,
        name=name,
        policy=definition,
        status=status,
        capacity=capacity.get(name),
        hints=found[: queries.HINTS],
        more_hints=len(found) > queries.HINTS,
        throughput=throughput,
        pending=pending,
        lag=lag,
        adapts=any(gate["type"] == "adaptive_concurrency" for gate in gates),
        denials=denials,
        top=top,
        more=more is not None,
        gates=queries.gate_texts(gates),
        tasks=tasks,
    )


async def _known(reader: Reader, name: str) -> Row:
    """A policy's definition.

    Raises:
        HTTPException: 404, there is no such policy.
    """
    found = await queries.policy(reader, _clean(name))
    if found is None:
        raise HTTPException(404, f"There is no policy “{shown.plain(shown.shortened(name, 130))}”.")
    return found


async def partitions(request: Request) -> Response:
    """Partitions, to search, to sort and to page through."""
    site = site_of(request)
    asked = request.query_params
    name = asked.get("policy") or None
    sort = asked.get("sort") or "pending"
    search = _clean(asked.get("q", ""))
    only_pending = asked.get("pending") == "1"
    cursor = _clean(asked["cursor"]) if asked.get("cursor") else None
    if sort not in queries.SORTS:
        sort = "pending"
    async with site.database.read() as reader:
        now = await queries.database_time(reader)
        if name is not None:
            await _known(reader, name)
        names, held = await queries.names(reader)
        rows, after = await queries.partitions_page(
            reader,
            policy=name,
            sort=sort,
            cursor=cursor,
            search=search,
            only_pending=only_pending,
        )
    filters = {
        "policy": name,
        "sort": sort,
        "q": search or None,
        "pending": "1" if only_pending else None,
    }
    return site.page(
        request,
        "partitions",
        now=now,
        names=names,
        held=held,
        name=name,
        sort=sort,
        sorts=queries.SORTS,
        search=search,
        only_pending=only_pending,
        partitions=rows,
        filters=filters,
        after=after,
        first=cursor is None,
    )


async def partition(request: Request) -> Response:
    """One partition: why its jobs do not run, and everything behind that."""
    site = site_of(request)
    id = str(request.path_params["id"])
    cursor = request.query_params.get("cursor")
    async with site.database.read() as reader:
        now = await queries.database_time(reader)
        found = await queries.find_partition(reader, id)
        if found is None:
            raise HTTPException(
                404,
                "There is no partition of this id. Idle partitions are forgotten after a while, "
                "and come back with their next job.",
            )
        definition = await _known(reader, found.policy)
        waiting, after = await queries.waiting_page(
            reader, found.policy, found.key, _clean(cursor) if cursor else None
        )
        next_id = (
            waiting[0]["id"]
            if waiting and not cursor
            else await _first_waiting(reader, found.policy, found.key)
        )
        explanation = await queries.explain(reader, next_id) if next_id is not None else []
        in_flight = await queries.in_flight(reader, id, limit=21)
        adaptive = await queries.adaptive(reader, id)
        caps, lags = await queries.adaptive_charts(reader, now, id)
        fairness = await queries.fairness(reader, now, found.policy, id)
        found_hints = await queries.hints(reader, policy=found.policy, partition_key=found.key)
        dead = await queries.dead_of_partition(reader, found.policy, found.key)
    queued = _lingering(in_flight[:20], now)
    return site.page(
        request,
        "partition",
        now=now,
        partition=found,
        status=found.status,
        policy=definition,
        next_id=next_id,
        explanation=explanation,
        advice=advice(
            explanation,
            definition["gates"],
            none_runs=bool(queued) and len(queued) == len(in_flight[:20]),
        ),
        gates=queries.gate_texts(definition["gates"]),
        waiting=waiting,
        after=after,
        first=not cursor,
        in_flight=in_flight[:20],
        queued=queued,
        dead=dead,
        more_in_flight=len(in_flight) > 20,
        adaptive=adaptive,
        caps=caps,
        lags=lags,
        fairness=fairness,
        hints=found_hints,
        more_hints=False,
        context=shown.as_json(found.status["context"])
        if site.show_payloads and found.status
        else None,
    )


def _lingering(in_flight: list[Row], now: datetime) -> list[Row]:
    """Those that were admitted a while ago and no worker has taken."""
    return [
        row
        for row in in_flight
        if row["state"] == "queued" and row["admitted_at"] < now - LINGERING
    ]


async def _first_waiting(reader: Reader, policy: str, key: str) -> int | None:
    rows, _ = await queries.waiting_page(reader, policy, key, limit=1)
    return rows[0]["id"] if rows else None


async def job(request: Request) -> Response:
    """One job: where it is, what it waits for, how it came there."""
    site = site_of(request)
    id = queries.to_id(request.path_params["id"])
    if id is None:
        raise HTTPException(404, "A job's id is a number.")
    async with site.database.read() as reader:
        now = await queries.database_time(reader)
        found = await queries.job(reader, id)
        if found is None:
            raise HTTPException(
                404,
                f"There is no job {id}. It was never deferred, its row was deleted, or it ended "
                "longer ago than admissions are kept.",
            )
        explanation = await queries.explain(reader, id)
        followed = await queries.policy(reader, found["policy_name"] or "")
        dead = await queries.dead_job(reader, found["id"]) if found["state"] == "dead" else None
        stalled = (
            await queries.stalled(reader, found["job_id"]) if found["state"] == "running" else None
        )
        payload = await queries.payload(reader, found["id"]) if site.show_payloads else None
        partition_id = None
        if found["policy_name"] is not None and found["partition_key"] is not None:
            partition_id = await reader.value(
                "select dispatch_partition_id(%(policy)s, %(key)s)",
                policy=found["policy_name"],
                key=found["partition_key"],
            )
        in_flight = (
            await queries.in_flight(reader, partition_id, limit=20)
            if found["state"] == "staged" and partition_id is not None
            else []
        )
    return site.page(
        request,
        "job",
        now=now,
        id=id,
        job=found,
        partition_id=partition_id,
        explanation=explanation,
        dead=dead,
        stalled=stalled,
        payload=payload,
        lifecycle=_lifecycle(found, dead),
        advice=advice(
            explanation,
            followed["gates"] if followed else [],
            none_runs=bool(in_flight) and len(_lingering(in_flight, now)) == len(in_flight),
        ),
    )


def _lifecycle(job: Row, dead: Row | None) -> list[tuple[str, datetime | None, str]]:
    """The stations of a job's life: what, when, and whether it was, is or may be."""
    state = job["state"]
    order = ["staged", "queued", "running", "finished"]
    stations: list[tuple[str, datetime | None, str]] = [("staged", job["staged_at"], "past")]
    if state == "dead":
        return [*stations, ("set aside", dead["died_at"] if dead else None, "now")]
    if state == "cancelled":
        return [
            *stations,
            *([("admitted", job["admitted_at"], "past")] if job["admitted_at"] else []),
            ("cancelled", job["finished_at"], "now"),
        ]
    at = order.index(state) if state in order else 0
    return [
        ("staged", job["staged_at"], "now" if at == 0 else "past"),
        ("admitted", job["admitted_at"] if at >= 1 else None, _kind(at, 1)),
        ("running", None, _kind(at, 2)),
        ("finished", job["finished_at"] if at == 3 else None, _kind(at, 3)),
    ]


def _kind(at: int, place: int) -> str:
    return "past" if at > place else "now" if at == place else "later"


async def dead(request: Request) -> Response:
    """Jobs that could not be handed off."""
    site = site_of(request)
    name = request.query_params.get("policy") or None
    cursor = _cursor(request.query_params.get("cursor"))
    async with site.database.read() as reader:
        now = await queries.database_time(reader)
        rows, after = await queries.dead_page(
            reader, policy=None if name is None else _clean(name), cursor=cursor
        )
    return site.page(
        request,
        "dead",
        now=now,
        name=name,
        jobs=rows,
        after=_to_cursor(after) if after else None,
        first=cursor is None,
    )


def _to_cursor(position: tuple[datetime, int]) -> str:
    text = json.dumps([position[0].isoformat(), position[1]])
    return base64.urlsafe_b64encode(text.encode()).decode()


def _cursor(text: str | None) -> tuple[datetime, int] | None:
    """Where a page begins; anything that is no cursor of ours means the first page."""
    try:
        value: Any = json.loads(base64.urlsafe_b64decode(text or ""))
        moment, id = datetime.fromisoformat(value[0]), value[1]
        if moment.tzinfo is None or not isinstance(id, int) or abs(id) > queries.BIGINT:
            return None
    except (ValueError, TypeError, KeyError, IndexError, binascii.Error):
        return None
    return moment, id


async def audit(request: Request) -> Response:
    """What was done by hand, and by whom."""
    site = site_of(request)
    name = request.query_params.get("policy") or None
    before = queries.to_id(request.query_params.get("before", ""))
    async with site.database.read() as reader:
        now = await queries.database_time(reader)
        rows, after = await queries.audit_page(
            reader,
            policy=None if name is None else _clean(name),
            before=before,
        )
    return site.page(
        request, "audit", now=now, name=name, entries=rows, after=after, first=before is None
    )
