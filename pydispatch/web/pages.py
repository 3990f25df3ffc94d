"""The pages that show: each reads in one read-only transaction, and renders."""

from __future__ import annotations

import uuid
from datetime import datetime, timedelta

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from pydispatch.web import asked, queries, shown
from pydispatch.web.advice import advice
from pydispatch.web.asked import clean, known_policy
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
        now = await reader.database_time()
        rows = await queries.policies.statuses(reader)
        hints, more_hints = await queries.operation.hints(reader)
        throughput = await queries.history.admissions(reader, now)
        pending, _ = await queries.history.backlog(reader, now)
        capacity = await queries.policies.capacity(reader)
        workers = await queries.operation.workers(reader, now)
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
        hints=hints,
        more_hints=more_hints,
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
        now = await reader.database_time()
        if name is not None:
            await known_policy(reader, name)
        found, more = await queries.operation.hints(reader, policy=name, limit=500)
    return site.page(request, "hints", now=now, policy=name, hints=found, more_hints=more)


async def search(request: Request) -> Response:
    """Lead to the job, the partition or the policy that is meant, or list what may be."""
    site = site_of(request)
    urls = Urls(request)
    text = request.query_params.get("q", "")
    async with site.database.read() as reader:
        now = await reader.database_time()
        job = None
        if (id := asked.to_id(text)) is not None:
            job = await queries.jobs.find(reader, id)
        exact = await _searched(reader, text)
        policies = [text] if await queries.policies.find(reader, clean(text)) else []
        alike: list[Row] = []
        more = None
        if not exact and text:
            alike, more = await queries.partitions.page(reader, search=clean(text), limit=25)
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
    found = [] if "\0" in text else await queries.partitions.of_key(reader, text)
    if found:
        return found
    try:
        one = await queries.partitions.find(reader, str(uuid.UUID(text.strip())))
    except ValueError:
        return []
    if one is None:
        return []
    counts = one.status or {"pending_count": None, "in_flight_count": None}
    return [{**counts, "policy_name": one.policy, "partition_key": one.key, "id": one.id}]


async def policies(request: Request) -> Response:
    """All policies beside each other."""
    site = site_of(request)
    async with site.database.read() as reader:
        now = await reader.database_time()
        rows = await queries.policies.statuses(reader)
        capacity = await queries.policies.capacity(reader)
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
        now = await reader.database_time()
        definition = await known_policy(reader, name)
        status = (await queries.policies.statuses(reader, name))[0]
        hints, more_hints = await queries.operation.hints(reader, policy=name)
        throughput = await queries.history.admissions(reader, now, name)
        pending, lag = await queries.history.backlog(reader, now, name)
        denials = await queries.history.denials(reader, now, name)
        capacity = await queries.policies.capacity(reader, name)
        top, more = await queries.partitions.page(reader, policy=name, limit=10)
        tasks = await queries.policies.tasks(reader, name)
    gates = definition["gates"]
    return site.page(
        request,
        "policy",
        now=now,
        name=name,
        policy=definition,
        status=status,
        capacity=capacity.get(name),
        hints=hints,
        more_hints=more_hints,
        throughput=throughput,
        pending=pending,
        lag=lag,
        adapts=any(gate["type"] == "adaptive_concurrency" for gate in gates),
        denials=denials,
        top=top,
        more=more is not None,
        gates=shown.gates(gates),
        tasks=tasks,
    )


async def partitions(request: Request) -> Response:
    """Partitions, to search, to sort and to page through."""
    site = site_of(request)
    query = request.query_params
    name = query.get("policy") or None
    sort = query.get("sort") or "pending"
    search = clean(query.get("q", ""))
    only_pending = query.get("pending") == "1"
    cursor = clean(query.get("cursor", "")) or None
    if sort not in queries.partitions.SORTS:
        sort = "pending"
    async with site.database.read() as reader:
        now = await reader.database_time()
        if name is not None:
            await known_policy(reader, name)
        names, held = await queries.policies.names(reader)
        rows, after = await queries.partitions.page(
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
        sorts=queries.partitions.SORTS,
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
    cursor = clean(request.query_params.get("cursor", "")) or None
    async with site.database.read() as reader:
        now = await reader.database_time()
        found = await queries.partitions.find(reader, id)
        if found is None:
            raise HTTPException(
                404,
                "There is no partition of this id. Idle partitions are forgotten after a while, "
                "and come back with their next job.",
            )
        definition = await known_policy(reader, found.policy)
        waiting, after = await queries.partitions.waiting(reader, found.policy, found.key, cursor)
        first = waiting
        if cursor:
            first, _ = await queries.partitions.waiting(reader, found.policy, found.key, limit=1)
        next_id = first[0]["id"] if first else None
        explanation = await queries.jobs.explain(reader, next_id) if next_id is not None else []
        in_flight, more_in_flight = await queries.partitions.in_flight(reader, id)
        adaptive = await queries.partitions.adaptive(reader, id)
        caps, lags = await queries.history.adaptive(reader, now, id)
        fairness = await queries.partitions.fairness(reader, now, found.policy, id)
        hints, _ = await queries.operation.hints(
            reader, policy=found.policy, partition_key=found.key
        )
        dead = await queries.jobs.dead_of_partition(reader, found.policy, found.key)
    queued = _lingering(in_flight, now)
    return site.page(
        request,
        "partition",
        now=now,
        partition=found,
        status=found.status,
        policy=definition,
        next_id=next_id,
        explanation=explanation,
        advice=advice(explanation, definition["gates"], none_runs=_all_linger(in_flight, now)),
        gates=shown.gates(definition["gates"]),
        waiting=waiting,
        after=after,
        first=cursor is None,
        in_flight=in_flight,
        queued=queued,
        dead=dead,
        more_in_flight=more_in_flight,
        adaptive=adaptive,
        caps=caps,
        lags=lags,
        fairness=fairness,
        hints=hints,
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


def _all_linger(in_flight: list[Row], now: datetime) -> bool:
    """Does no worker take the jobs that hold slots?"""
    return bool(in_flight) and len(_lingering(in_flight, now)) == len(in_flight)


async def job(request: Request) -> Response:
    """One job: where it is, what it waits for, how it came there."""
    site = site_of(request)
    id = asked.to_id(request.path_params["id"])
    if id is None:
        raise HTTPException(404, "A job's id is a number.")
    async with site.database.read() as reader:
        now = await reader.database_time()
        found = await queries.jobs.find(reader, id)
        if found is None:
            raise HTTPException(
                404,
                f"There is no job {id}. It was never deferred, its row was deleted, or it ended "
                "longer ago than admissions are kept.",
            )
        explanation = await queries.jobs.explain(reader, id)
        state, partition_id = found["state"], found["partition_id"]
        followed = await queries.policies.find(reader, found["policy_name"] or "")
        dead = await queries.jobs.find_dead(reader, found["id"]) if state == "dead" else None
        stalled = (
            await queries.jobs.stalled(reader, found["job_id"]) if state == "running" else None
        )
        payload = await queries.jobs.payload(reader, found["id"]) if site.show_payloads else None
        in_flight: list[Row] = []
        if state == "staged" and partition_id is not None:
            in_flight, _ = await queries.partitions.in_flight(reader, partition_id)
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
            none_runs=_all_linger(in_flight, now),
        ),
    )


def _lifecycle(job: Row, dead: Row | None) -> list[tuple[str, datetime | None, str]]:
    """The stations of a job's life: what, when, and whether it was, is or may be."""
    order = ["staged", "queued", "running", "finished"]
    state, admitted, finished = job["state"], job["admitted_at"], job["finished_at"]
    stations = [("staged", job["staged_at"])]
    if state == "dead":
        stations += [("set aside", dead["died_at"] if dead else None)]
        at = 1
    elif state == "cancelled":
        stations += [("admitted", admitted)] if admitted else []
        stations += [("cancelled", finished)]
        at = len(stations) - 1
    else:
        at = order.index(state) if state in order else 0
        stations += [("admitted", admitted if at >= 1 else None), ("running", None)]
        stations += [("finished", finished if at == 3 else None)]
    return [
        (what, when, "past" if place < at else "now" if place == at else "later")
        for place, (what, when) in enumerate(stations)
    ]


async def dead(request: Request) -> Response:
    """Jobs that could not be handed off."""
    site = site_of(request)
    name = request.query_params.get("policy") or None
    begin = asked.position(request.query_params.get("cursor"))
    async with site.database.read() as reader:
        now = await reader.database_time()
        rows, after = await queries.jobs.dead(reader, policy=name and clean(name), begin=begin)
    return site.page(
        request,
        "dead",
        now=now,
        name=name,
        jobs=rows,
        after=asked.cursor(after) if after else None,
        first=begin is None,
    )


async def audit(request: Request) -> Response:
    """What was done by hand, and by whom."""
    site = site_of(request)
    name = request.query_params.get("policy") or None
    before = asked.to_id(request.query_params.get("before", ""))
    async with site.database.read() as reader:
        now = await reader.database_time()
        rows, after = await queries.operation.audit(
            reader, policy=name and clean(name), before=before
        )
    return site.page(
        request, "audit", now=now, name=name, entries=rows, after=after, first=before is None
    )
