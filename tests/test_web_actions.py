"""Steering from the dashboard: what is done, what is written down, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import psycopg
import pytest
from starlette.exceptions import HTTPException
from starlette.requests import Request

from pydispatch.web import Target
from tests.support import wait_for
from tests.web_support import PREFIX, Browser, browsing, parse


def ada(request: Request, action: str, target: Target) -> str:
    return "ada"


@pytest.fixture
def scene(conn: psycopg.Connection) -> psycopg.Connection:
    """Five jobs of acme wait behind two in flight, one waits for tomorrow, two are dead."""
    script = """
        select dispatch_define_policy('calls', '{"partition_by": "tenant", "gates": [
            {"type": "concurrency", "max": 2}]}');
        select dispatch_stage('calls', 'call', '{"tenant": "acme"}') from generate_series(1, 7);
        select dispatch_stage('calls', 'call', '{"tenant": "acme"}',
          p_scheduled_at => now() + interval '1 day');
        select dispatch_tick();
        insert into dispatch_dead_jobs (id, partition_id, staged_at, died_at, priority, attempts,
          policy_name, partition_key, task_name, queue_name, args, context, error, queueing_lock)
        select n, dispatch_partition_id('calls', 'acme'), now(), now(), 0, 0, 'calls', 'acme',
          'call', 'q', '{}', '{}', 'bad', 'lock' || n
        from generate_series(1001, 1003) as n
    """
    for statement in script.split(";\n"):
        conn.execute(statement.encode())
    return conn


def one(conn: psycopg.Connection, statement: str, *arguments: Any) -> Any:
    row = conn.execute(statement.encode(), arguments).fetchone()
    assert row is not None
    return row[0] if len(row) == 1 else row


def partition(conn: psycopg.Connection, key: str = "acme") -> str:
    return str(one(conn, "select dispatch_partition_id('calls', %s)", key))


def entries(conn: psycopg.Connection) -> list[tuple[Any, ...]]:
    return conn.execute(
        """
        select actor, action, policy_name, partition_key, job_id, outcome ->> 'result'
        from dispatch_audit_log order by id
        """
    ).fetchall()


async def test_a_policy_is_paused_and_resumed(dsn, scene):
    async with browsing(dsn, authorize=ada) as browser:
        page = await browser.act("/actions/pause?policy=calls")
        assert page.id("flash").text.strip() == (
            "Done Policy calls: Paused. 6 jobs wait, 2 in flight. What is in flight runs on."
        )
        assert one(scene, "select paused from dispatch_policy_status")
        again = await browser.act("/actions/pause?policy=calls")
        assert "It was paused already" in again.id("flash").text
        page = await browser.act("/actions/resume?policy=calls")
        assert "Policy calls: Resumed" in page.id("flash").text
        assert not one(scene, "select paused from dispatch_policy_status")
        plain = await browser.get("/policy?name=calls")
        assert not plain.has("flash")
    assert entries(scene) == [
        ("ada", "pause", "calls", None, None, "done"),
        ("ada", "pause", "calls", None, None, "nothing"),
        ("ada", "resume", "calls", None, None, "done"),
    ]


async def test_a_partition_is_paused_and_its_resume_tells_of_the_policys_pause(dsn, scene):
    id = partition(scene)
    async with browsing(dsn, authorize=ada) as browser:
        page = await browser.act(f"/actions/pause?partition={id}")
        assert page.id("state")
        assert one(scene, "select partition_key from dispatch_pauses") == "acme"
        scene.execute("select dispatch_pause('calls')")
        page = await browser.act(f"/actions/resume?partition={id}")
    assert "The whole policy is paused" in page.id("flash").text
    assert [entry[3] for entry in entries(scene)] == ["acme", "acme"]


async def test_draining_says_what_is_left_and_why(dsn, scene):
    """Case: "drained 0, n remain" for ever, because what remains is scheduled for later."""
    path = f"/actions/drain?partition={partition(scene)}"
    async with browsing(dsn, authorize=ada) as browser:
        page = await browser.act(path, limit="3")
        assert "Admitted 3 jobs past the gates. Left: 2 are over the limit" in page.id("flash").text
        page = await browser.act("/actions/drain?policy=calls")
        assert "Admitted 2 jobs past the gates. Left: 1 are scheduled" in page.id("flash").text
        page = await browser.act(path)
        assert page.id("flash").text.startswith("Nothing to do", 1)
        assert "1 are scheduled" in page.id("flash").text
    assert one(scene, "select count(*) from procrastinate_jobs") == 7
    assert one(scene, "select outcome ->> 'admitted' from dispatch_audit_log limit 1") == "3"


async def test_force_admitting_takes_the_next_few(dsn, scene):
    async with browsing(dsn, authorize=ada) as browser:
        page = await browser.act(f"/actions/force-admit?partition={partition(scene)}", limit="2")
        assert "Admitted 2 jobs past the gates. 4 jobs wait, 4 in flight." in page.id("flash").text
        nobody = await browser.get("/actions/force-admit?policy=calls", status=400)
        assert "Nothing was chosen" in nobody.text
    assert one(scene, "select count(*) from procrastinate_jobs") == 4


async def test_a_waiting_job_is_cancelled_and_one_that_went_is_not(dsn, scene):
    waiting = one(scene, "select max(id) from dispatch_staged_jobs")
    gone = one(scene, "select min(job_id) from dispatch_inflight_jobs")
    async with browsing(dsn, authorize=ada) as browser:
        page = await browser.act(f"/actions/cancel?id={waiting}")
        assert "It will not run. 5 jobs of its partition still wait." in page.id("flash").text
        assert "cancelled" in page.all("h1")[0].text
        page = await browser.act(f"/actions/cancel?id={gone}")
        assert "it is queued" in page.id("flash").text
        assert "failed" in page.id("flash").attributes["class"]
    assert entries(scene) == [
        ("ada", "cancel", "calls", "acme", waiting, "done"),
        ("ada", "cancel", "calls", "acme", gone, "failed"),
    ]
    assert one(scene, "select status::text from procrastinate_jobs order by id limit 1") == "todo"


async def test_dead_jobs_are_requeued_and_discarded_each_by_itself(dsn, scene):
    scene.execute("select dispatch_stage('calls', 'call', p_queueing_lock => 'lock1002')")
    async with browsing(dsn, authorize=ada) as browser:
        dead = await browser.get("/dead?policy=calls")
        assert len(dead.id("choose").all("input", type="checkbox")) == 3
        page = await browser.act("/actions/requeue?id=1001&id=1002&id=77&of=calls")
        flash = page.id("flash").text
        assert "Requeued 1 job, 1 not:" in flash
        assert "Job 1002: Nothing was done. already enqueued" in flash
        assert "Not found: 77." in flash
        assert "2 dead jobs are left." in flash
        assert [row[1] for row in page.id("dead").cells()] == ["1003", "1002"]
        page = await browser.act("/actions/discard?id=1003&from=job")
        assert "Job 1003: Discarded" in page.id("flash").text
        assert "1 dead job is left." in page.id("flash").text
        assert "cancelled" in page.all("h1")[0].text
        await browser.get("/actions/discard?id=1003", status=404)
    assert entries(scene) == [
        ("ada", "requeue", "calls", "acme", 1001, "done"),
        ("ada", "requeue", "calls", "acme", 1002, "failed"),
        ("ada", "discard", "calls", "acme", 1003, "done"),
    ]
    assert one(scene, "select count(*) from dispatch_staged_jobs where id = 1001") == 1


@pytest.mark.parametrize("limit", ["0", "-1", "10001", "1e3", "", "9" * 30, "٣"])
async def test_a_count_out_of_bounds_does_nothing(dsn, scene, limit):
    async with browsing(dsn, authorize=ada) as browser:
        page = await browser.get("/actions/drain?policy=calls")
        response = await browser.send(page.id("confirm"), limit=limit)
    assert response.status_code == 400
    assert "from 1 to 10,000" in parse(response.text).id("problem").text
    assert one(scene, "select count(*) from procrastinate_jobs") == 2


async def test_more_jobs_than_a_page_holds_are_refused(dsn, scene):
    ids = "&".join(f"id={n}" for n in range(1, 102))
    async with browsing(dsn, authorize=ada) as browser:
        page = await browser.get(f"/actions/requeue?{ids}", status=400)
        assert "At most 100" in page.text
        page = await browser.get("/actions/requeue", status=400)
        assert "No job was chosen" in page.text


async def test_an_action_that_fails_is_undone_and_written_down(dsn, scene):
    scene.execute(
        """
        create or replace function dispatch_force(
          p_policy dispatch_policies, p_partition_id uuid, p_limit integer)
        returns integer language plpgsql as $$
        begin
          delete from dispatch_pauses;
          raise exception sqlstate 'PD009' using message = 'no <more>', hint = 'Wait.';
        end $$
        """
    )
    scene.execute("select dispatch_pause('calls', 'other')")
    async with browsing(dsn, authorize=ada) as browser:
        page = await browser.act(f"/actions/force-admit?partition={partition(scene)}")
    assert "Nothing was done. no <more>. Wait." in page.id("flash").text
    assert one(scene, "select count(*) from dispatch_pauses") == 1
    assert entries(scene) == [("ada", "force-admit", "calls", "acme", None, "failed")]
    assert one(scene, "select outcome ->> 'sqlstate' from dispatch_audit_log") == "PD009"


async def test_what_cannot_be_written_down_is_not_done(dsn, scene):
    """The entry and the action are one transaction."""
    scene.execute("alter table dispatch_audit_log add constraint no check (false) not valid")
    async with browsing(dsn, authorize=ada) as browser:
        page = await browser.get("/actions/pause?policy=calls")
        response = await browser.send(page.id("confirm"))
    assert response.status_code == 500
    assert not one(scene, "select paused from dispatch_policy_status")


# -- refused


async def refused(
    browser: Browser, conn: psycopg.Connection, response: Any, why: str, who: str
) -> None:
    assert response.status_code == 403
    assert why in parse(response.text).id("problem").text
    assert not one(conn, "select paused from dispatch_policy_status")
    actor, action, policy, key, job, result = entries(conn)[-1]
    assert (actor, action, policy, key, job) == (who, "pause", "calls", None, None)
    assert result == "refused"


async def test_without_authorize_there_are_no_actions(dsn, scene):
    id = partition(scene)
    async with browsing(dsn) as browser:
        for path in ("/policy?name=calls", f"/partitions/{id}", "/dead", "/jobs/1001"):
            page = await browser.get(path)
            assert not [each for each in page.walk() if "data-action" in each.attributes]
            assert len(page.all("form")) == 2  # the search and the theme
        page = await browser.get("/actions/pause?policy=calls", status=403)
        assert "Actions are off here" in page.text
        response = await browser.client.post(
            f"{PREFIX}/actions/pause", data={"policy": "calls"}, headers={"origin": "http://x"}
        )
        await refused(browser, scene, response, "Actions are off", "client 203.0.113.7")


@pytest.mark.parametrize("verdict", [False, None, "", 0, 1, {}])
async def test_whom_authorize_does_not_allow_does_nothing(dsn, scene, verdict):
    asked: list[Any] = []
    answers = iter([True])

    def authorize(request: Request, action: str, target: Target) -> Any:
        asked.append((action, target))
        return next(answers, verdict)

    async with browsing(dsn, authorize=authorize) as browser:
        page = await browser.get("/actions/pause?policy=calls")
        response = await browser.send(page.id("confirm"))
        await refused(
            browser, scene, response, "You may not pause policy calls", "client 203.0.113.7"
        )
        page = await browser.get("/actions/pause?policy=calls", status=403)
    assert set(asked[:2]) == {("pause", Target(policy="calls"))}


async def test_authorize_may_be_async_and_may_raise(dsn, scene):
    async def allows(request: Request, action: str, target: Target) -> bool:
        return True

    def breaks(request: Request, action: str, target: Target) -> bool:
        raise ZeroDivisionError

    def redirects(request: Request, action: str, target: Target) -> bool:
        raise HTTPException(401, "Log in", headers={"WWW-Authenticate": "Basic"})

    async with browsing(dsn, authorize=allows) as browser:
        page = await browser.get("/actions/pause?policy=calls")
        cookies = browser.client.cookies
        form = page.id("confirm")
    for authorize, status in (breaks, 403), (redirects, 401):
        async with browsing(dsn, authorize=authorize) as browser:
            browser.client.cookies = cookies
            response = await browser.send(form)
            assert response.status_code == status
    assert response.headers["www-authenticate"] == "Basic"
    assert not one(scene, "select paused from dispatch_policy_status")
    assert [entry[5] for entry in entries(scene)] == ["refused", "refused"]
    async with browsing(dsn, authorize=allows) as browser:
        await browser.act("/actions/pause?policy=calls")
    assert entries(scene)[-1][0] == "client 203.0.113.7"


async def test_authorize_is_asked_for_each_job_with_its_partition(dsn, scene):
    asked: list[Target] = []

    def authorize(request: Request, action: str, target: Target) -> str | None:
        asked.append(target)
        return None if target.job_id == 1002 else "ada"

    async with browsing(dsn, authorize=authorize) as browser:
        page = await browser.get("/actions/discard?id=1001&id=1003")
        form = page.id("confirm")
        response = await browser.send(form, id=["1001", "1002"])
    assert response.status_code == 403
    assert asked[-1] == Target("calls", "acme", 1002)
    assert one(scene, "select count(*) from dispatch_dead_jobs") == 3
    assert entries(scene)[-1][4:] == (1002, "refused")


@pytest.mark.parametrize(
    ("headers", "changes"),
    [
        ({"sec-fetch-site": "cross-site"}, {}),
        ({"sec-fetch-site": "same-site"}, {}),
        ({"sec-fetch-site": "none"}, {}),
        ({"sec-fetch-site": None, "origin": "http://evil.example"}, {}),
        ({"sec-fetch-site": None, "origin": "null"}, {}),
        ({"sec-fetch-site": None, "origin": "http://ops.example:81"}, {}),
        ({"sec-fetch-site": None, "origin": "http://[bad"}, {}),
        ({}, {"token": "0" * 64}),
        ({}, {"token": ""}),
        ({}, {"token": None}),
        ({}, {"token": "é" * 64}),
        ({"cookie": ""}, {}),
        ({"cookie": "dispatch_csrf=another"}, {}),
    ],
)
async def test_a_form_from_elsewhere_does_nothing(dsn, scene, headers, changes):
    async with browsing(dsn, authorize=ada) as browser:
        page = await browser.get("/actions/pause?policy=calls")
        if "cookie" in headers:
            browser.client.cookies.clear()
        sent = {"origin": "http://ops.example", "sec-fetch-site": "same-origin", **headers}
        fields = {
            "policy": "calls",
            "token": page.all("input", name="token")[0].attributes["value"],
        }
        fields.update(changes)
        response = await browser.client.post(
            f"{PREFIX}/actions/pause",
            data={name: value for name, value in fields.items() if value is not None},
            headers={name: value for name, value in sent.items() if value},
        )
        why = (
            "not sent from a page"
            if "token" not in changes and "cookie" not in headers
            else "too old"
        )
        await refused(browser, scene, response, why, "client 203.0.113.7")


async def test_an_old_browser_and_a_script_with_the_token_may(dsn, scene):
    for headers in ({"origin": "http://ops.example"}, {}):
        async with browsing(dsn, authorize=ada) as browser:
            page = await browser.get("/actions/pause?policy=calls")
            token = page.all("input", name="token")[0].attributes["value"]
            response = await browser.client.post(
                f"{PREFIX}/actions/pause", data={"policy": "calls", "token": token}, headers=headers
            )
        assert response.status_code == 303


async def test_a_get_does_nothing(dsn, scene):
    async with browsing(dsn, authorize=ada) as browser:
        for action in ("pause", "drain"):
            response = await browser.raw(f"/actions/{action}?policy=calls&limit=5&token=x")
            assert response.status_code == 200
    assert not one(scene, "select paused from dispatch_policy_status")
    assert entries(scene) == []


@pytest.mark.parametrize(
    ("body", "kind", "status"),
    [
        (b"policy=calls", "application/json", 415),
        (b"policy=" + b"x" * 70_000, "application/x-www-form-urlencoded", 413),
        (b"&".join([b"id=1"] * 501), "application/x-www-form-urlencoded", 400),
        (b"\xff=\xfe", "application/x-www-form-urlencoded", 400),
    ],
)
async def test_what_is_no_form_of_ours_is_refused(dsn, scene, body, kind, status):
    async with browsing(dsn, authorize=ada) as browser:
        response = await browser.client.post(
            f"{PREFIX}/actions/pause", content=body, headers={"content-type": kind}
        )
    assert response.status_code == status


async def test_a_refusal_holds_where_it_cannot_be_written_down(dsn, scene, caplog):
    scene.execute("drop table dispatch_audit_log cascade")
    async with browsing(dsn, authorize=lambda *_: False) as browser:
        response = await browser.client.post(
            f"{PREFIX}/actions/pause",
            data={"policy": "calls"},
            headers={"sec-fetch-site": "cross-site"},
        )
    assert response.status_code == 403
    assert "could not be written down" in caplog.text


async def test_the_audit_log_is_paged_and_shows_who_did_what(dsn, scene):
    scene.execute(
        """
        select dispatch_audit('ada <b>', 'pause', 'calls', 'acme', n, %s)
        from generate_series(1, 130) as n
        """,
        [json.dumps({"result": "done", "pending": 5, "why": "because"})],
    )
    async with browsing(dsn) as browser:
        page = await browser.get("/audit")
        assert len(page.id("audit").cells()) == 100
        row = page.id("audit").cells()[0]
        assert row[1:7] == ["ada <b>", "pause", "done", "calls", "acme", "130"]
        assert "pending 5" in row[7].replace("pending5", "pending 5")
        (following,) = page.all("a", rel="next")
        page = await browser.get(following.attributes["href"])
        assert [row[6] for row in page.id("audit").cells()] == [str(n) for n in range(30, 0, -1)]


async def test_an_action_waits_for_the_tick_that_holds_its_partition(dsn, scene, connect):
    """What another transaction holds is waited for, and counted only afterwards."""
    import asyncio

    holder = connect(autocommit=False)
    holder.execute("select from dispatch_partitions for update")
    async with browsing(dsn, authorize=ada) as browser:
        page = await browser.get(f"/actions/force-admit?partition={partition(scene)}")
        sending = asyncio.create_task(browser.send(page.id("confirm")))
        waits = "select count(*) from pg_stat_activity where wait_event_type = 'Lock'"
        await asyncio.to_thread(wait_for, lambda: one(scene, waits) == 1)
        holder.rollback()
        assert (await sending).status_code == 303
    assert one(scene, "select count(*) from procrastinate_jobs") == 3
