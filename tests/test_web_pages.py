"""The dashboard's pages, without JavaScript, below a prefix, against a real database."""

from __future__ import annotations

import json
import re
from typing import Any
from urllib.parse import quote, urlencode

import psycopg
import pytest
from procrastinate import App, PsycopgConnector, SyncPsycopgConnector
from procrastinate.testing import InMemoryConnector

from pydispatch import Dispatch
from pydispatch.web import dashboard
from tests.web_support import PREFIX, browsing, parse

HOSTILE = {
    "markup": "<script>alert(1)</script><img src=x onerror=alert(1)>",
    "quotes": '"\'`</a> onmouseover="x',
    "long": "long-" * 2000,
    "emoji": "👩‍💻🎉 naïve ✓",
    "control": "tab\there\r\n\x01\x7f",
    "bidi": "\u202egnp.exe\u2066",
    "slashes": "../../a//b/..",
    "percent": "%2e%2e%00%",
    "question": "?q=1&policy=x#y",
    "dots": "..",
    "empty": "",
    "spaces": "  two  ",
    "template": "{{ 7 * 7 }}{% raw %}",
    "a star": "*",
}


@pytest.fixture
def scene(conn: psycopg.Connection) -> psycopg.Connection:
    """A database in which jobs wait for gates, wait for their time, are queued, ran and died."""
    script = """
        select dispatch_define_policy('calls', '{"partition_by": "tenant", "gates": [
            {"type": "throttle", "rate": {"ctx": "rate", "default": 60}, "per": 60, "burst": 5},
            {"type": "concurrency", "max": {"ctx": "cap", "default": 2}}]}');
        select dispatch_define_policy('learns', '{"partition_by": "tenant", "gates": [
            {"type": "adaptive_concurrency", "initial_max": 3, "target_lag_ms": 100}]}');
        select dispatch_define_policy('free', '{}');
        select dispatch_map_task('call', 'calls');
        select dispatch_stage('calls', 'call', '{"tenant": "acme", "secret": "TOP-SECRET"}')
          from generate_series(1, 5);
        select dispatch_stage('calls', 'call', '{"tenant": "later"}',
          p_scheduled_at => now() + interval '1 day');
        select dispatch_stage('learns', 'learn', '{"tenant": "acme"}');
        select dispatch_tick();
        update procrastinate_jobs set status = 'doing' where task_name = 'learn';
        update procrastinate_jobs set status = 'succeeded' where task_name = 'learn';
        update dispatch_partitions set due_at = now(), blocked_until = null
          where partition_key = 'acme' and policy_name = 'calls';
        select dispatch_tick();
        select dispatch_sweep();
        """
    for statement in script.split(";\n"):
        conn.execute(statement.encode())
    return conn


def one(conn: psycopg.Connection, statement: str) -> Any:
    row = conn.execute(statement.encode()).fetchone()
    assert row is not None
    return row[0]


def partition_id(conn: psycopg.Connection, policy: str, key: str) -> str:
    row = conn.execute("select dispatch_partition_id(%s, %s)", [policy, key]).fetchone()
    assert row is not None
    return str(row[0])


async def test_the_overview_shows_totals_capacity_charts_hints_and_policies(dsn, scene):
    scene.execute("select dispatch_pause('calls', 'acme')")
    async with browsing(dsn) as browser:
        page = await browser.get("/")
    hints = page.id("hints")
    assert "1 partition is paused" in hints.text
    assert f"{PREFIX}/policy?name=calls" in hints.links()
    assert f"{PREFIX}/partitions/{partition_id(scene, 'calls', 'acme')}" in hints.links()
    assert "Waiting41 or more scheduled for later" in page.id("totals").text
    assert "2 of 2 slots" in page.id("capacity").text
    assert "0 alive" in page.id("capacity").text
    assert "none takes jobs" in page.id("capacity").text
    assert [row[:2] for row in page.id("policies").cells()] == [
        ["calls 1 paused", "4"],
        ["free", "0"],
        ["learns", "0"],
    ]
    for id, most in ("throughput", "from 0 to 3"), ("pending", "waiting: last 4"):
        (chart,) = page.id(id).all("svg")
        assert most in chart.all("desc")[0].text
        assert page.id(f"{id}-numbers").cells()


async def test_an_empty_database_has_an_overview_too(dsn, conn):
    async with browsing(dsn) as browser:
        for path in ("/", "/policies", "/partitions", "/dead", "/audit", "/hints"):
            page = await browser.get(path)
            assert "0" in page.text or "no" in page.text.lower(), path


async def test_a_policy_shows_its_numbers_its_partitions_its_denials_and_its_definition(dsn, scene):
    async with browsing(dsn) as browser:
        page = await browser.get("/policy?name=calls")
        adaptive = await browser.get("/policy?name=learns")
    assert "Waiting41 or more scheduled for later" in page.text
    assert "Waiting0as of the last tick" in adaptive.text
    assert page.id("partitions").cells()[0][:4] == ["acme", "all slots taken", "3", "2"]
    assert page.id("denials").cells()[0][:2] == ["all slots taken concurrency_full", "1"]
    assert page.id("definition").cells() == [
        ["throttle", "throttle", "per 60; rate context rate, else 60; burst 5"],
        ["concurrency", "concurrency", "max context cap, else 2; full backoff 1"],
    ]
    assert "Taskscall" in page.id("definition").text
    assert '"partition_by": "tenant"' in page.id("definition-json").text
    assert not page.has("lag")
    assert adaptive.has("lag")


async def test_a_partition_says_why_and_what_to_change(dsn, scene):
    async with browsing(dsn) as browser:
        page = await browser.get(f"/partitions/{partition_id(scene, 'calls', 'acme')}")
        later = await browser.get(f"/partitions/{partition_id(scene, 'calls', 'later')}")
        learns = await browser.get(f"/partitions/{partition_id(scene, 'learns', 'acme')}")
    state = page.id("state").text
    assert "all slots taken" in state
    assert "2 in flight of at most 2" in state
    assert "raise max, which is cap in the context of the newest staged job, else 2" in state
    assert [row[:2] for row in page.id("gates").cells()] == [
        ["throttle", "lets it pass"],
        ["concurrency", "holds it"],
    ]
    assert [row[0] for row in page.id("waiting").cells()] == ["1", "2", "3"]
    assert [row[1] for row in page.id("inflight").cells()] == ["queued, no worker has it"] * 2
    assert "in 24 h" in later.id("waiting").cells()[0][5]
    assert learns.id("adaptive").cells()[0][:2] == ["adaptive_concurrency", "3"]
    assert learns.id("caps").cells()[0][1:] == ["3"]
    assert learns.has("lags")
    assert not page.has("caps")


async def test_a_partition_is_compared_with_the_others_that_are_due(dsn, scene):
    path = f"/partitions/{partition_id(scene, 'calls', 'acme')}"
    due = "update dispatch_partitions set due_at = now() - interval '90 s'"
    due += " where policy_name = 'calls'"
    scene.execute(f"{due} and partition_key = 'acme'")
    async with browsing(dsn) as browser:
        alone = await browser.get(path)
        scene.execute(due)
        beside = await browser.get(path)
    assert "due for 90 s" in alone.id("state").text
    assert "Beside it" not in alone.text
    assert "1 other partition is due; 1 of them served less than this one" in beside.text


async def test_a_partition_that_no_tick_has_seen_is_found(dsn, scene):
    scene.execute("""select dispatch_stage('calls', 'call', '{"tenant": "new"}')""")
    scene.execute("select dispatch_pause('calls', 'only paused')")
    async with browsing(dsn) as browser:
        page = await browser.get(f"/partitions/{partition_id(scene, 'calls', 'new')}")
        paused = await browser.get(f"/partitions/{partition_id(scene, 'calls', 'only paused')}")
    assert len(page.id("waiting").cells()) == 1
    assert "paused" in paused.all("h1")[0].text
    assert "No tick has looked" in paused.id("state").text


async def test_waiting_jobs_are_paged_in_the_order_of_admission(dsn, conn):
    """Case: the list of waiting jobs shows another order than that of admission."""
    conn.execute(
        """
        select dispatch_define_policy('p', '{"gates": [{"type": "concurrency", "max": 0}]}');
        select dispatch_stage('p', 't', p_priority => n % 3,
          p_scheduled_at => case when n % 7 = 0 then now() + make_interval(hours => n) end)
        from generate_series(1, 60) as n;
        select dispatch_tick();
        """
    )
    path = f"/partitions/{partition_id(conn, 'p', '')}"
    listed = []
    async with browsing(dsn) as browser:
        while True:
            page = await browser.get(path)
            listed += [int(row[1]) for row in page.id("waiting").cells()]
            following = page.all("a", rel="next")
            if not following:
                break
            path = following[0].attributes["href"]
    rows = conn.execute("select id from dispatch_waiting_page('p', '', 1000)").fetchall()
    assert listed == [id for (id,) in rows]
    assert len(listed) == 60


async def test_a_job_shows_what_it_waits_for_wherever_it_is(dsn, scene):
    waiting = one(scene, "select min(id) from dispatch_staged_jobs")
    queued = one(scene, "select min(job_id) from dispatch_inflight_jobs")
    async with browsing(dsn) as browser:
        staged = await browser.get(f"/jobs/{waiting}")
        admitted = await browser.get(f"/jobs/{queued}")
    assert "all slots taken" in staged.id("state").text
    assert len(staged.id("explain").cells()) == 2
    assert "no worker is alive" in admitted.id("state").text
    now = [each.text for each in admitted.id("lifecycle").all("li", aria_current="step")]
    assert len(now) == 1
    assert "admitted" in now[0]


async def test_dead_jobs_are_paged_also_those_of_a_policy_that_is_gone(dsn, conn):
    conn.execute(
        """
        select dispatch_define_policy('p', '{}'), dispatch_define_policy('gone', '{}');
        insert into dispatch_dead_jobs (id, partition_id, staged_at, died_at, priority, attempts,
          policy_name, partition_key, task_name, queue_name, args, context, error)
        select n, gen_random_uuid(), now(), now() - make_interval(mins => n / 2), 0, 0,
          case when n % 3 = 0 then 'gone' else 'p' end, 'k', 't', 'q', '{}', '{}', '<b>bad</b>'
        from generate_series(1, 120) as n;
        select dispatch_drop_policy('gone');
        """
    )
    path = "/dead"
    listed: list[int] = []
    async with browsing(dsn) as browser:
        while True:
            page = await browser.get(path)
            listed += [int(row[0]) for row in page.id("dead").cells()]
            following = page.all("a", rel="next")
            if not following:
                break
            path = following[0].attributes["href"]
        gone = await browser.get("/dead?policy=gone")
    rows = conn.execute("select id from dispatch_dead_jobs order by died_at desc, id desc")
    assert listed == [id for (id,) in rows.fetchall()]
    assert len(gone.id("dead").cells()) == 40
    assert "<b>bad</b>" in gone.id("dead").text


async def test_search_leads_to_a_job_a_partition_or_a_policy(dsn, scene):
    job = one(scene, "select min(id) from dispatch_staged_jobs")
    later = partition_id(scene, "calls", "later")
    async with browsing(dsn) as browser:

        async def leads(text: str) -> Any:
            response = await browser.raw(f"/search?{urlencode({'q': text})}")
            return response.headers.get("location")

        assert await leads(str(job)) == f"{PREFIX}/jobs/{job}"
        assert await leads("later") == f"{PREFIX}/partitions/{later}"
        assert await leads("ATE") == f"{PREFIX}/partitions/{later}"
        assert await leads(later) == f"{PREFIX}/partitions/{later}"
        assert await leads("learns") == f"{PREFIX}/policy?name=learns"
        both = await browser.get("/search?q=acme")
        assert len(both.id("results").all("li")) == 2
        nothing = await browser.get("/search?q=%00%EF%BF%BE")
        assert "No job" in nothing.id("results").text
        for text in ("9" * 400, "-1", "1e5", "", "%", "_"):
            assert (await browser.raw(f"/search?{urlencode({'q': text})}")).status_code in (
                200,
                303,
            )


async def test_a_partition_of_a_paused_policy_does_not_wait_for_a_tick(dsn, scene):
    scene.execute("select dispatch_pause('calls'), dispatch_pause('calls', 'later')")
    async with browsing(dsn) as browser:
        for path in ("/partitions?policy=calls&sort=key", "/policy?name=calls"):
            rows = (await browser.get(path)).id("partitions").cells()
            assert {row[0]: row[-8] for row in rows} == {"acme": "policy paused", "later": "paused"}


async def test_a_number_may_be_a_job_and_a_key(dsn, scene):
    job = one(scene, "select min(id) from dispatch_staged_jobs")
    scene.execute(
        "select dispatch_stage('calls', 'call', %s::jsonb)", [json.dumps({"tenant": str(job)})]
    )
    async with browsing(dsn) as browser:
        page = await browser.get(f"/search?q={job}")
    assert len(page.id("results").all("li")) == 2


async def test_from_the_overview_two_clicks_lead_to_why_a_tenants_jobs_do_not_run(dsn, scene):
    async with browsing(dsn) as browser:
        overview = await browser.get("/")
        (form,) = overview.all("form", role="search")
        (box,) = form.all("input")
        found = await browser.get(
            f"{form.attributes['action']}?{urlencode({box.attributes['name']: 'acme'})}"
        )
        (link,) = [
            each
            for each in found.id("results").all("a")
            if partition_id(scene, "calls", "acme") in each.attributes["href"]
        ]
        page = await browser.get(link.attributes["href"])
    assert "What to change: See whether the jobs in flight run." in page.id("state").text


@pytest.mark.parametrize("sort", ["pending", "admitted", "stale", "recent", "key"])
async def test_partitions_are_searched_sorted_and_paged(dsn, conn, sort):
    conn.execute(
        """
        select dispatch_define_policy('p', '{"partition_by": "k", "gates": [
          {"type": "throttle", "rate": 3, "per": 3600}]}');
        select dispatch_stage('p', 't', jsonb_build_object('k', 'key_' || n % 70))
        from generate_series(1, 300) as n;
        select dispatch_stage('p', 't', '{"k": "other"}');
        select dispatch_tick();
        """
    )
    path = f"/partitions?policy=p&sort={sort}&q=KEY_&pending=1"
    listed: list[str] = []
    async with browsing(dsn) as browser:
        while True:
            page = await browser.get(path)
            listed += [row[0] for row in page.id("partitions").cells()]
            following = page.all("a", rel="next")
            if not following:
                break
            path = following[0].attributes["href"]
    rows = conn.execute(
        "select partition_key from dispatch_partitions_page('p', %s, null, 1000, 'key_', true)",
        [sort],
    ).fetchall()
    assert listed == [key for (key,) in rows]
    assert "other" not in listed
    assert len(listed) > 50


@pytest.mark.parametrize("cursor", ["", "x", "AAAA", "%00", "W10", "W1tb" * 2500, "9" * 5000, "🎉"])
async def test_a_forged_cursor_gives_the_first_page(dsn, scene, cursor):
    """Case: a forged page cursor gives an internal error."""
    id = partition_id(scene, "calls", "acme")
    async with browsing(dsn) as browser:
        for path in ("/partitions", "/dead", "/audit", f"/partitions/{id}"):
            plain = await browser.get(path)
            forged = await browser.get(f"{path}?cursor={quote(cursor)}&before={quote(cursor)}")
            assert len(forged.all("tr")) == len(plain.all("tr")), path


@pytest.mark.parametrize("settings", ["datestyle=German", "intervalstyle=iso_8601"])
async def test_times_are_read_however_the_role_writes_them(dsn, scene, settings):
    async with browsing(f"{dsn} options='-c {settings}'") as browser:
        for path in ("/", "/policies", "/policy?name=calls", "/partitions", "/hints", "/dead"):
            await browser.get(path)
        assert "dispatch_up 1.0" in (await browser.raw("/metrics")).text


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_hostile_key_is_shown_as_text_and_leads_to_its_page(dsn, conn, name):
    key = HOSTILE[name]
    conn.execute(
        """
        select dispatch_define_policy('p', '{"partition_by": "k", "gates": [
          {"type": "concurrency", "max": 0}]}')
        """
    )
    conn.execute(
        "select dispatch_stage('p', 't', %s::jsonb, p_lock => %s)", [json.dumps({"k": key}), key]
    )
    conn.execute("select dispatch_tick()")
    conn.execute("select dispatch_pause('p', %s)", [key])
    conn.execute(
        "select dispatch_audit(%s, %s, 'p', %s, null, null)", [key or "-", key or "-", key]
    )
    id = partition_id(conn, "p", key)
    async with browsing(dsn, authorize=lambda *_: True) as browser:
        for path in (
            "/",
            "/policy?name=p",
            "/partitions",
            f"/partitions?{urlencode({'q': key})}",
            f"/partitions/{id}",
            f"/actions/drain?partition={id}",
            "/audit",
            "/jobs/1",
        ):
            response = await browser.raw(path)
            assert response.status_code == 200, path
            page = parse(response.text)
            assert not page.all("img")
            assert len(page.all("script")) == 1
            invisible = "[\u202a-\u202e\u2066-\u2069\x01-\x08\x7f]"
            assert not re.search(invisible, page.text), path
            assert "49" not in page.all("h1")[0].text
            assert len(response.text) < 200_000
        page = await browser.get("/partitions")
        assert f"{PREFIX}/partitions/{id}" in page.id("partitions").links()
        page = await browser.get(f"/partitions/{id}")
        whole = page.id("full-key") if page.has("full-key") else page.all("h1")[0]
        shown = whole.text.replace("␣", " ")
        seen = {
            "empty": "(empty)",
            "bidi": r"\u202egnp.exe\u2066",
            "control": r"tab\there\r\n\x01\x7f",
            "spaces": " two ",
        }
        assert seen.get(name, key) in shown
        response = await browser.raw(f"/search?{urlencode({'q': key})}")
        assert response.headers["location"] == f"{PREFIX}/partitions/{id}"


async def test_a_hostile_name_of_a_policy_is_text_too(dsn, conn):
    name = """../<b>"'?a=1&b#%2f {{ 7 * 7 }}"""
    conn.execute("select dispatch_define_policy(%s, '{}')", [name])
    async with browsing(dsn, authorize=lambda *_: True) as browser:
        (link,) = [
            each
            for each in (await browser.get("/policies")).id("policies").all("a")
            if "/policy?" in each.attributes["href"]
        ]
        page = await browser.get(link.attributes["href"])
        assert name in page.all("h1")[0].text
        (pause,) = page.all("a", data_action="pause")
        after = await browser.act(pause.attributes["href"])
        assert name in after.id("flash").text
        assert name in (await browser.get("/partitions?" + urlencode({"policy": name}))).text


@pytest.mark.parametrize(
    "path",
    [
        "/policy?name=unknown",
        "/policy",
        "/policy?name=%00",
        "/policy?name=" + "x" * 3000,
        "/partitions?policy=unknown",
        "/partitions/00000000-0000-0000-0000-000000000000",
        "/partitions/nonsense",
        "/jobs/999999",
        "/jobs/x",
        "/jobs/" + "9" * 30,
        "/nowhere",
        "/actions/explode",
        "/static/../app.py",
        "/static/nothing.css",
    ],
)
async def test_what_is_not_there_is_a_page_with_a_way_back(dsn, conn, path):
    async with browsing(dsn, authorize=lambda *_: True) as browser:
        page = await browser.get(path, status=404)
    assert f"{PREFIX}/" in page.id("problem").links()


async def test_an_error_of_the_database_is_shown_with_detail_and_hint(dsn, conn, monkeypatch):
    conn.execute(
        """
        create or replace function dispatch_now() returns timestamptz language plpgsql as $$
        begin
          raise exception sqlstate 'PD009'
            using message = 'no <time>', detail = 'It is late.', hint = 'Go to bed.';
        end $$
        """
    )
    async with browsing(dsn) as browser:
        page = await browser.get("/", status=400)
    for text in ("no <time>", "It is late.", "Go to bed.", "PD009"):
        assert text in page.id("problem").text


async def test_a_database_without_pydispatch_says_so(server, admin):
    async with browsing(server.dsn("template1")) as browser:
        page = await browser.get("/", status=500)
    assert "pydispatch migrate" in page.id("problem").text


async def test_a_database_that_is_down_is_said_and_comes_back(own_server):
    async with browsing(own_server.dsn("dispatch")) as browser:
        assert "by the database's clock" in (await browser.get("/")).text
        own_server.terminate()
        response = await browser.raw("/")
        assert response.status_code == 503
        assert response.headers["retry-after"] == "5"
        page = parse(response.text)
        assert "cannot be reached" in page.id("problem").text
        assert "As of" not in page.text, "no other clock stands in for the database's"
        assert page.all("main")[0].attributes["data-live"] == ""
        assert page.all("noscript")[0].all("meta")[0].attributes["http-equiv"] == "refresh"
        assert "password" not in response.text
        own_server.start()
        assert "Overview" in (await browser.get("/")).text


async def test_a_partition_tells_of_its_dead_jobs(dsn, scene):
    scene.execute(
        """
        insert into dispatch_dead_jobs (id, partition_id, staged_at, died_at, priority, attempts,
          policy_name, partition_key, task_name, queue_name, args, context, error)
        select 100000 + n, gen_random_uuid(), now(), now() + make_interval(secs => n), 0, 0,
          'calls', case when n < 3 then 'acme' else 'other' end, 't', 'q', '{}', '{}', 'bad'
        from generate_series(1, 3) as n
        """
    )
    async with browsing(dsn) as browser:
        page = await browser.get(f"/partitions/{partition_id(scene, 'calls', 'acme')}")
        later = await browser.get(f"/partitions/{partition_id(scene, 'calls', 'later')}")
    assert "2 of its jobs could not be handed off and are set aside" in page.id("state").text
    assert f"{PREFIX}/jobs/100002" in page.id("state").links()
    assert "handed off" not in later.id("state").text


async def test_payloads_are_shown_only_when_that_was_asked_for(dsn, scene):
    scene.execute('update dispatch_partitions set context = \'{"note": "TOP-SECRET"}\'')
    staged = one(scene, "select min(id) from dispatch_staged_jobs")
    queued = one(scene, "select min(job_id) from dispatch_inflight_jobs")
    scene.execute(
        """
        insert into dispatch_dead_jobs (id, partition_id, staged_at, died_at, priority, attempts,
          policy_name, partition_key, task_name, queue_name, args, context, error)
        select id + 100000, partition_id, staged_at, now(), 0, 0, policy_name, partition_key,
          task_name, queue_name, args, context, 'bad'
        from dispatch_staged_jobs limit 1
        """
    )
    dead = one(scene, "select id from dispatch_dead_jobs")
    paths = [
        "/",
        "/policy?name=calls",
        "/partitions",
        f"/partitions/{partition_id(scene, 'calls', 'acme')}",
        f"/jobs/{staged}",
        f"/jobs/{queued}",
        f"/jobs/{dead}",
        "/dead",
        "/metrics",
    ]
    async with browsing(dsn) as browser:
        for path in paths:
            assert "TOP-SECRET" not in (await browser.raw(path)).text, path
    async with browsing(dsn, show_payloads=True) as browser:
        for path in (paths[3], paths[4], paths[6]):
            assert "TOP-SECRET" in (await browser.raw(path)).text, path


@pytest.mark.parametrize("prefix", ["", "/a", "/a b/ü", "/deep/er/still"])
async def test_links_hold_below_any_prefix(dsn, scene, prefix):
    async with browsing(dsn, prefix=prefix) as browser:
        seen: set[str] = set()
        waiting = [quote(f"{prefix}/")]
        while waiting:
            address = waiting.pop()
            response = await browser.client.get(address)
            assert response.status_code in (200, 303), address
            if response.status_code == 303:
                found = [response.headers["location"]]
            else:
                page = parse(response.text)
                found = [*page.links(), *(e.attributes["href"] for e in page.all("link"))]
                found = [each for each in found if not each.startswith("#")]
                if not address.endswith((".css", ".svg")) and "." in found[-1]:
                    found.pop()
            for each in found:
                each = each.partition("#")[0]
                assert each.startswith(f"{quote(prefix)}/"), each
                if each not in seen and "/static/" not in each:
                    seen.add(each)
                    waiting.append(each)
        assert len(seen) > 12


async def test_a_reader_sees_every_page(dsn, scene):
    """The rights that the page on operations gives to a reader are all that is needed to look."""
    from tests.test_reader import PAGE

    scene.execute("create role looker login")
    try:
        for block in re.findall(r"^```sql\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE):
            for statement in block.split(";\n"):
                if statement.startswith("grant") and statement.endswith("reader"):
                    scene.execute(re.sub("reader$", "looker", statement).encode())
        id = partition_id(scene, "calls", "acme")
        options = psycopg.conninfo.make_conninfo(dsn, user="looker")
        async with browsing(options, show_payloads=True) as browser:
            for path in (
                "/",
                "/hints",
                "/policies",
                "/policy?name=calls",
                "/partitions",
                f"/partitions/{id}",
                "/jobs/1",
                "/jobs/5",
                "/dead",
                "/audit",
                "/search?q=acme",
            ):
                await browser.get(path)
            assert "dispatch_up 1.0" in (await browser.raw("/metrics")).text
    finally:
        scene.execute("drop owned by looker; drop role looker")


async def test_an_application_tells_where_the_database_is(dsn, scene):
    for connector in (PsycopgConnector(conninfo=dsn), SyncPsycopgConnector(conninfo=dsn)):
        app = App(connector=connector)
        for where in (app, Dispatch(app)):
            async with browsing(where) as browser:
                assert "calls" in (await browser.get("/policies")).text
                assert "dispatch_up 1.0" in (await browser.raw("/metrics")).text


def test_what_tells_no_database_is_refused():
    with pytest.raises(ValueError, match="conninfo"):
        dashboard(App(connector=InMemoryConnector()))
    with pytest.raises(TypeError, match="int is neither"):
        dashboard(5)  # type: ignore[arg-type]


async def test_times_without_end_are_shown(dsn, scene):
    scene.execute("select dispatch_pause('calls')")
    scene.execute("update dispatch_partitions set due_at = '9999-12-31 UTC'")
    scene.execute(
        """
        select dispatch_stage('calls', 'call', '{"tenant": "far"}',
          p_scheduled_at => '9999-12-31 UTC')
        """
    )
    async with browsing(dsn) as browser:
        for path in (
            "/policies",
            "/partitions",
            f"/partitions/{partition_id(scene, 'calls', 'far')}",
        ):
            assert "no end" in (await browser.get(path)).text or path == "/policies"
