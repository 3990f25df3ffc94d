"""The metrics, as Prometheus gets them from a real database, and what is built on them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest
import yaml
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families
from psycopg.types.json import Jsonb
from psycopg_pool import ConnectionPool

from pydispatch import metrics
from pydispatch.embedded import EmbeddedPostgres
from pydispatch.metrics import Collector, asgi
from tests import reference
from tests.concurrency.support import cap, define, finish, stage, start, tick
from tests.fixtures import Connect
from tests.support import Clock

ROOT = Path(__file__).parent.parent
RULES = ROOT / "examples" / "alerts" / "pydispatch.yml"
DASHBOARD = ROOT / "examples" / "grafana" / "pydispatch.json"
PAGE = ROOT / "docs" / "metrics.md"

Labels = tuple[tuple[str, str], ...]
Scrape = dict[tuple[str, Labels], float]


def exposition(where: metrics.Where) -> str:
    """What a registry of its own shows of a collector."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Collector(where))
    return generate_latest(registry).decode()


def families(where: metrics.Where) -> dict[str, Metric]:
    return {each.name: each for each in text_string_to_metric_families(exposition(where))}


def scrape(where: metrics.Where) -> Scrape:
    """Each sample of a scrape by name and sorted labels."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families(where).values()
        for sample in family.samples
    }


def of(found: Scrape, name: str, policy: str = "p", **labels: str) -> float:
    return found[name, tuple(sorted({"policy": policy, **labels}.items()))]


NEVER = {"gates": [{"type": "throttle", "rate": 1, "per": 86400, "burst": 1}]}


# -- what is shown


def test_the_exposition_follows_the_conventions(conn: psycopg.Connection, dsn: str) -> None:
    define(conn)
    found = families(dsn)
    assert len(found) > 20
    for name, family in found.items():
        assert re.fullmatch(r"dispatch_[a-z_]+[a-z]", name)
        assert family.documentation.endswith(".")
        assert family.type in ("gauge", "counter", "histogram")
        for sample in family.samples:
            assert set(sample.labels) <= {"policy", "reason", "le"}
            assert (family.type == "counter") == sample.name.endswith("_total")
    text = exposition(dsn)
    assert len(re.findall(r"^# HELP ", text, re.M)) == len(
        set(re.findall(r"^# HELP .*", text, re.M))
    )


def test_the_page_has_every_metric(conn: psycopg.Connection, dsn: str) -> None:
    define(conn)
    text = PAGE.read_text(encoding="utf-8")
    assert text == reference.with_part(text, "metrics", reference.metrics()), (
        "run: python -m tests.reference"
    )
    documented = re.findall(r"^\| `(\w+)` \| (\w+) \| (.*?) \| (.*) \|$", text, re.M)
    shown = []
    for family in families(dsn).values():
        labels = {label for sample in family.samples for label in sample.labels if label != "le"}
        name = family.name + ("_total" if family.type == "counter" else "")
        shown.append((name, family.type, labels, family.documentation))
    assert sorted(shown, key=str) == sorted(
        (
            (name, kind, set(re.findall(r"\w+", labels)), text)
            for name, kind, labels, text in documented
        ),
        key=str,
    )


def test_the_numbers_are_those_of_the_policy(
    conn: psycopg.Connection, connect: Connect, dsn: str, clock: Clock
) -> None:
    define(conn, gates=[{"type": "concurrency", "max": {"ctx": "most", "default": 2}}])
    define(conn, "idle")
    stage(conn, "a", "a", "a", "b")
    assert of(scrape(dsn), "dispatch_inbox_notes") == 2
    assert tick(conn) == 3
    conn.execute("insert into procrastinate_workers (last_heartbeat) values (dispatch_now())")
    start(conn)
    conn.execute("update procrastinate_jobs set worker_id = 1 where status = 'doing'")
    clock.advance(50)
    assert tick(conn) == 0
    clock.advance(0.5)

    found = scrape(dsn)
    expected = {
        "jobs_pending": 1,
        "jobs_in_flight": 3,
        "jobs_queued": 2,
        "jobs_running": 1,
        "jobs_dead": 0,
        "jobs_stalled": 0,
        "slots": 4,
        "partitions": 2,
        "partitions_full": 1,
        "partitions_due": 0,
        "partitions_blocked": 1,
        "inbox_notes": 0,
        "policy_paused": 0,
        "oldest_due_seconds": 0,
        "oldest_wait_seconds": 50.5,
        "oldest_queued_seconds": 50.5,
        "jobs_admitted_total": 3,
        "handoff_failures_total": 0,
        "tick_seconds_count": 2,
    }
    assert {name: of(found, f"dispatch_{name}") for name in expected} == expected
    assert {of(found, f"dispatch_{name}", "idle") for name in expected} == {0}
    denied = "dispatch_partitions_denied_total"
    assert of(found, denied, reason="concurrency_full") == 1
    assert of(found, denied, reason="throttle_empty") == 0
    assert of(found, "dispatch_tick_seconds_bucket", le="+Inf") == 2
    assert of(found, "dispatch_tick_seconds_bucket", le="25.0") == 2
    assert 0 < of(found, "dispatch_tick_seconds_sum") < 25
    assert found["dispatch_workers", ()] == 1
    assert found["dispatch_up", ()] == 1
    assert found["dispatch_scrape_errors_total", ()] == 0

    clock.advance(0.5)
    assert of(scrape(dsn), "dispatch_partitions_due") == 1
    clock.advance(400)
    found = scrape(dsn)
    assert of(found, "dispatch_oldest_due_seconds") == 400
    assert of(found, "dispatch_jobs_stalled") == 1
    assert found["dispatch_workers", ()] == 0


def test_a_policy_that_is_never_due_has_metrics(conn: psycopg.Connection, dsn: str) -> None:
    define(conn)
    conn.execute("select dispatch_pause('p', 'a')")
    stage(conn, "a")
    tick(conn)
    found = scrape(dsn)
    assert found["dispatch_up", ()] == 1
    assert of(found, "dispatch_jobs_pending") == 1
    assert of(found, "dispatch_oldest_due_seconds") == 0


def test_no_tenant_makes_a_series(conn: psycopg.Connection, dsn: str) -> None:
    define(conn, **cap(1))
    stage(conn, "a", "a")
    tick(conn)
    before = scrape(dsn).keys()
    stage(conn, *(f"tenant {number}" for number in range(300)))
    tick(conn)
    assert scrape(dsn).keys() == before


def test_any_name_of_a_policy_is_a_label(conn: psycopg.Connection, dsn: str) -> None:
    name = 'a "b" \\n {c="d"} \u00e9\U0001f40d, '
    define(conn, name)
    assert of(scrape(dsn), "dispatch_jobs_pending", name) == 0


def test_a_refused_job_counts(conn: psycopg.Connection, dsn: str) -> None:
    define(conn)
    stage(conn, "a", "b")
    conn.execute(
        """
        create function refuse() returns trigger language plpgsql as $$
        begin
          raise exception 'no';
        end;
        $$;
        create trigger refuse before insert on procrastinate_jobs
        for each row when (new.args ->> 'k' = 'b') execute function refuse();
        """
    )
    tick(conn)
    found = scrape(dsn)
    assert of(found, "dispatch_handoff_failures_total") == 1
    assert of(found, "dispatch_jobs_dead") == 1
    assert of(found, "dispatch_jobs_admitted_total") == 1


def test_slots_are_what_the_lowest_cap_gives(conn: psycopg.Connection, dsn: str) -> None:
    adaptive = {"type": "adaptive_concurrency", "initial_max": 3, "target_lag_ms": 1000}
    limited = {"type": "concurrency", "max": {"sql": "lowest", "default": 1}}
    conn.execute("create function lowest(text, jsonb) returns numeric language sql return 1")
    define(conn, "both", gates=[{"type": "concurrency", "max": 5}, adaptive])
    define(conn, "asked", gates=[limited])
    define(conn, "free", **NEVER)
    for policy in ("both", "asked", "free"):
        stage(conn, "a", "a", "b", policy=policy)
        tick(conn, policy)
    found = scrape(dsn)
    assert [of(found, "dispatch_slots", each) for each in ("both", "asked", "free")] == [6, 0, 0]
    job_id = start(conn)
    assert job_id is not None
    finish(conn, job_id, "failed")
    tick(conn, "both")
    (row,) = conn.execute("select slots, in_flight from dispatch_slot_use").fetchall()
    assert row == (3 + 1, 2)


@pytest.mark.parametrize(
    "limits",
    [
        {"initial": 3},
        {"initial": 7, "max": 4},
        {"initial": 2, "min": 5, "max": 3},
        {"initial": 2.9, "max": 3.4},
        {"initial": 1.5, "min": 0.2},
        {"initial": -4, "min": -5, "max": -6},
        {"initial": "six"},
    ],
)
def test_slots_are_as_many_as_a_tick_fills(
    conn: psycopg.Connection, limits: dict[str, object]
) -> None:
    """Whatever the context says: the view brings it into its range as the gate does."""
    gate = {
        "type": "adaptive_concurrency",
        "initial_max": {"ctx": "initial", "default": 2},
        "min": {"ctx": "min", "default": 1},
        "max": {"ctx": "max", "default": 8},
        "target_lag_ms": 1000,
    }
    define(conn, gates=[gate])
    jobs = [{"task_name": "t", "context": {"k": "a", **limits}}] * 10
    conn.execute("select dispatch_stage_many('p', %s)", [Jsonb(jobs)])
    tick(conn)
    (row,) = conn.execute(
        "select slots, in_flight, full_partitions from dispatch_slot_use"
    ).fetchall()
    assert row == (row[1], row[1], 1)


def test_a_scrape_reads_no_staged_job(conn: psycopg.Connection, connect: Connect) -> None:
    define(conn, **cap(1))
    stage(conn, "a", "a", "b")
    tick(conn)
    looking = connect(autocommit=False)  # a session that has counted nothing yet
    with looking.transaction():
        for statement in (metrics.ALIVE, metrics.STATUS, metrics.TOTALS):
            looking.execute(statement.encode()).fetchall()
        read = looking.execute(
            """
            select relname, seq_scan + coalesce(idx_scan, 0) > 0
            from pg_stat_xact_user_tables
            where relname in ('dispatch_staged_jobs', 'dispatch_partitions')
            """
        ).fetchall()
    assert dict(read) == {"dispatch_staged_jobs": False, "dispatch_partitions": True}


# -- the database is not there


def test_a_database_that_is_down_is_told_and_comes_back(
    own_server: EmbeddedPostgres, caplog: pytest.LogCaptureFixture
) -> None:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Collector(own_server.dsn("dispatch")))

    def up() -> tuple[float | None, float | None]:
        return (
            registry.get_sample_value("dispatch_up"),
            registry.get_sample_value("dispatch_scrape_errors_total"),
        )

    assert up() == (1, 0)
    own_server.terminate()
    assert up() == (0, 2)
    assert "dispatch_jobs_pending" not in generate_latest(registry).decode()
    assert {record.levelname for record in caplog.records} == {"WARNING"}
    assert not any(record.exc_info for record in caplog.records), "no stack trace"
    own_server.start()
    assert up() == (1, 3)


def test_a_database_that_does_not_answer_in_time_counts_as_down(
    conn: psycopg.Connection, connect: Connect, dsn: str
) -> None:
    define(conn)
    holder = connect(autocommit=False)
    holder.execute("lock table dispatch_policies")
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Collector(dsn, timeout=0.2))
    assert registry.get_sample_value("dispatch_up") == 0
    holder.rollback()
    assert registry.get_sample_value("dispatch_up") == 1


def test_a_schema_without_our_tables_counts_as_down(server: EmbeddedPostgres) -> None:
    assert scrape(server.dsn())["dispatch_up", ()] == 0


def test_whatever_gives_connections_may_fail(caplog: pytest.LogCaptureFixture) -> None:
    def none() -> Any:
        raise RuntimeError("closed for today")

    assert scrape(none)["dispatch_up", ()] == 0
    assert "closed for today" in caplog.text


def test_a_pool_gives_the_connections(conn: psycopg.Connection, dsn: str) -> None:
    define(conn)
    with ConnectionPool(dsn, min_size=1, max_size=1, open=True) as pool:
        for _ in range(3):
            assert scrape(pool.connection)["dispatch_up", ()] == 1
        with pool.connection() as again:
            assert again.execute("show statement_timeout").fetchone() == ("0",)
    assert scrape(pool.connection)["dispatch_up", ()] == 0


def test_the_rights_that_the_page_names_are_enough(conn: psycopg.Connection, dsn: str) -> None:
    define(conn, **cap(1))
    stage(conn, "a", "a")
    tick(conn)
    (grant,) = re.findall(r"^```sql\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    conn.execute("create role prometheus")
    try:
        conn.execute(grant.encode())
        found = scrape(psycopg.conninfo.make_conninfo(dsn, options="-c role=prometheus"))
        assert found["dispatch_up", ()] == 1
        assert of(found, "dispatch_jobs_admitted_total") == 1
    finally:
        conn.execute("drop owned by prometheus; drop role prometheus")


# -- the web


@pytest.fixture
async def client(dsn: str) -> Any:
    transport = httpx.ASGITransport(app=asgi(dsn))
    async with httpx.AsyncClient(transport=transport, base_url="http://metrics") as client:
        yield client


async def test_a_get_is_a_scrape(conn: psycopg.Connection, client: httpx.AsyncClient) -> None:
    define(conn)
    answer = await client.get("/")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=")
    names = {family.name for family in text_string_to_metric_families(answer.text)}
    assert "dispatch_jobs_pending" in names
    assert not [name for name in names if not name.startswith("dispatch_")]

    head = await client.head("/whatever")
    assert (head.status_code, head.content) == (200, b"")
    assert (await client.post("/")).status_code == 405

    accept = {"accept": "application/openmetrics-text; version=1.0.0"}
    answer = await client.get("/", headers=accept)
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    parsed = {each.name: each for each in openmetrics.text_string_to_metric_families(answer.text)}
    assert parsed["dispatch_tick_seconds"].type == "histogram"


async def test_it_starts_and_stops_where_a_server_asks_for_that(dsn: str) -> None:
    asked = iter(["lifespan.startup", "lifespan.shutdown"])
    told = []

    async def receive() -> dict[str, str]:
        return {"type": next(asked)}

    async def send(message: Any) -> None:
        told.append(message["type"])

    await asgi(dsn)({"type": "lifespan"}, receive, send)
    assert told == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


def test_without_the_extra_the_error_names_it() -> None:
    code = "import sys; sys.modules['prometheus_client'] = None; import pydispatch.metrics"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "pip install 'dispatch-policy[web]'" in done.stderr.splitlines()[-1]


def test_the_code_of_the_page_runs() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    code = "\n".join(blocks)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(blocks) == 2


# -- what is built on them


def rules() -> dict[str, dict[str, Any]]:
    (group,) = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return {rule["alert"]: rule for rule in group["rules"]}


def dashboard() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    return loaded


def expressions() -> list[str]:
    """All PromQL of the dashboard, with its variables filled in."""
    found = [target["expr"] for panel in dashboard()["panels"] for target in panel["targets"]]
    return [expr.replace("$policy", ".*").replace("$__rate_interval", "1m") for expr in found]


def test_every_metric_in_use_exists(conn: psycopg.Connection, dsn: str) -> None:
    define(conn)
    names = {name for name, _ in scrape(dsn)}
    used = [rule["expr"] for rule in rules().values()] + expressions()
    used += [variable["definition"] for variable in dashboard()["templating"]["list"][1:]]
    for expression in used:
        mentioned = set(re.findall(r"dispatch_\w+", expression))
        assert mentioned, expression
        assert mentioned <= names, expression
    reasons = set(re.search(r'reason=~"(.*?)"', str(used))[1].split("|"))  # type: ignore[index]
    assert reasons < {dict(labels).get("reason") for _, labels in scrape(dsn)}


def test_each_alert_leads_to_its_section() -> None:
    text = PAGE.read_text(encoding="utf-8").partition("## Alerts")[2]
    assert re.findall(r"^### (\w+)$", text, re.MULTILINE) == list(rules())
    for name, rule in rules().items():
        assert rule["annotations"]["runbook"] == f"docs/metrics.md#{name.lower()}"
        assert rule["annotations"]["summary"]
        assert rule["annotations"]["description"]
        assert rule["labels"]["severity"] in ("critical", "warning")


def test_the_dashboard_can_be_imported() -> None:
    board = dashboard()
    assert board["title"] == "pydispatch"
    source, policy = board["templating"]["list"]
    assert (source["type"], source["query"]) == ("datasource", "prometheus")
    assert policy["datasource"]["uid"] == "${datasource}"
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"]) > 10
    for panel in board["panels"]:
        assert panel["datasource"]["uid"] == "${datasource}"
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert panel["description"].endswith((".", "?"))


def situation(conn: psycopg.Connection, clock: Clock, what: str) -> None:
    """Bring about one reason for which a job does not run, two hours long."""
    define(conn, **(NEVER if what == "gate" else cap(1)))
    stage(conn, "a", "a", "a")
    if what == "tick":
        clock.advance(7200)
        return
    assert tick(conn) == 1
    if what == "gate":
        job_id = start(conn)
        assert job_id is not None
        finish(conn, job_id)
    clock.advance(7200)
    assert tick(conn) == 0


WAITS = {
    "gate": "DispatchWaitsForGate",
    "worker": "DispatchNoWorkerTakesJobs",
    "tick": "DispatchNoTick",
}


def holds(expression: str, found: Scrape) -> bool:
    """Is an expression of comparisons, joined by ``and``, true of the policy ``p``?"""
    signs = {">": float.__gt__, "<=": float.__le__}
    true = True
    for comparison in expression.split(" and "):
        name, sign, number = comparison.split()
        true = true and signs[sign](of(found, name), float(number))
    return true


@pytest.mark.parametrize("what", WAITS)
def test_an_alert_tells_waiting_for_a_gate_from_waiting_for_a_worker(
    conn: psycopg.Connection, dsn: str, clock: Clock, what: str
) -> None:
    """case: an alert cannot tell "waits for a gate" from "no worker takes it"."""
    situation(conn, clock, what)
    found = scrape(dsn)
    for each in ("gate", "worker"):
        assert holds(rules()[WAITS[each]]["expr"], found) == (each == what), each


# -- with Prometheus's own tool

Promtool = Callable[..., None]


@pytest.fixture
def promtool(tmp_path: Path) -> Promtool:
    """A function that runs promtool on a file and fails with what it finds."""
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is not installed (Debian's package prometheus has it)")

    def run(command: str, content: str | Path) -> None:
        path = content
        if isinstance(path, str):
            path = tmp_path / "test.yml"
            path.write_text(str(content), encoding="utf-8")
        done = subprocess.run([program, *command.split(), path], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr

    return run


def series(found: Scrape) -> list[dict[str, str]]:
    """A scrape as series of promtool's that stay as they are for half an hour."""
    return [
        {
            "series": name + "{" + ",".join(f'{key}="{label}"' for key, label in labels) + "}",
            "values": f"{value}+0x30",
        }
        for (name, labels), value in found.items()
    ]


def is_true(expression: str, expected: bool) -> dict[str, Any]:
    return {
        "expr": f"(count({expression}) > bool 0) or vector(0)",
        "eval_time": "20m",
        "exp_samples": [{"labels": "{}", "value": int(expected)}],
    }


def test_promtool_takes_the_rules(promtool: Promtool) -> None:
    promtool("check rules", RULES)


@pytest.mark.parametrize("what", WAITS)
def test_promtool_says_the_same_of_each_wait(
    conn: psycopg.Connection, dsn: str, clock: Clock, promtool: Promtool, what: str
) -> None:
    situation(conn, clock, what)
    queries = [is_true(rule["expr"], name == WAITS[what]) for name, rule in rules().items()]
    group = {"interval": "1m", "input_series": series(scrape(dsn)), "promql_expr_test": queries}
    promtool("test rules", json.dumps({"tests": [group]}))


def test_promtool_understands_the_dashboard(
    conn: psycopg.Connection, dsn: str, promtool: Promtool
) -> None:
    define(conn, **cap(1))
    stage(conn, "a", "a")
    tick(conn)
    found = scrape(dsn)
    # A rate of what stands still is 0, and so is what the panels filter.
    queries = [
        is_true(expr, "> 0" not in expr or "dispatch_slots" in expr)
        for expr in expressions()
        if "histogram_quantile" not in expr
    ]
    group = {"interval": "1m", "input_series": series(found), "promql_expr_test": queries}
    promtool("test rules", json.dumps({"tests": [group]}))


@pytest.mark.parametrize(
    ("alert", "name", "values"),
    [
        ("DispatchNotScraped", "dispatch_up", "0+0x30"),
        ("DispatchNotScraped", "another_metric", "1+0x30"),
        ("DispatchLimitBroken", 'dispatch_partitions_denied_total{reason="max_zero"}', "0+1x30"),
        ("DispatchHandoffFailures", "dispatch_handoff_failures_total", "0+0x18 1+0x11"),
        ("DispatchDeadJobs", "dispatch_jobs_dead", "1+0x30"),
        ("DispatchJobsStalled", "dispatch_jobs_stalled", "1+0x30"),
        ("DispatchTickNearLimit", 'dispatch_tick_seconds_bucket{le="+Inf"}', "0+1x30"),
    ],
)
def test_promtool_sees_what_goes_wrong(
    promtool: Promtool, alert: str, name: str, values: str
) -> None:
    found = [{"series": name, "values": values}]
    if alert == "DispatchTickNearLimit":
        for le, step in (("10.0", 0), ("25.0", 1)):
            found.append(
                {"series": f'dispatch_tick_seconds_bucket{{le="{le}"}}', "values": f"0+{step}x30"}
            )
    queries = [is_true(rules()[alert]["expr"], True)]
    group = {"interval": "1m", "input_series": found, "promql_expr_test": queries}
    promtool("test rules", json.dumps({"tests": [group]}))
