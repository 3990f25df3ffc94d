"""What people do: each action asks first, is done in the database, and is written down."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Page, expect

pytestmark = pytest.mark.parametrize("javascript", [True, False], ids=["javascript", "without"])


@pytest.fixture
def page(site, new_page, javascript):
    return new_page(site, java_script_enabled=javascript)


def act(page: Page, action: str, limit: int | None = None) -> None:
    """Choose an action, confirm it, and be told that it is done."""
    page.locator(f"a[data-action={action}]").first.click()
    form = page.locator("form#confirm")
    expect(form).to_be_visible()
    if limit is not None:
        form.locator("#limit").fill(str(limit))
    form.locator("#do").click()
    expect(page.locator("#flash")).not_to_be_empty()


def audit(site, action: str):
    """Return the one entry of an action: policy, key, job, outcome."""
    rows = site.conn.execute(
        "select policy_name, partition_key, job_id, outcome, actor from dispatch_audit_log"
        " where action = %s",
        [action],
    ).fetchall()
    assert len(rows) == 1, rows
    *about, actor = rows[0]
    assert actor == "tester"
    return tuple(about)


def test_a_policy_is_paused_and_resumed(site, page):
    page.goto("/policy?name=searches")
    act(page, "pause")
    paused = "select paused from dispatch_policy_status where policy_name = 'searches'"
    assert site.scene.one(paused) == (True,)
    assert audit(site, "pause")[:3] == ("searches", None, None)
    act(page, "resume")
    assert site.scene.one(paused) == (False,)
    assert audit(site, "resume")[:3] == ("searches", None, None)
    page.goto("/audit")
    expect(page.locator("#audit")).to_contain_text("tester")
    expect(page.locator("#audit")).to_contain_text("resume")


def test_a_partition_is_paused_and_resumed(site, page):
    paused = "select paused from dispatch_partition_status where partition_key = 'globex'"
    page.goto(site.scene.partition("calls", "globex"))
    act(page, "pause")
    assert site.scene.one(paused) == (True,)
    assert audit(site, "pause")[:3] == ("calls", "globex", None)
    act(page, "resume")
    assert site.scene.one(paused) == (False,)


def test_jobs_are_forced_past_a_gate(site, page):
    page.goto(site.scene.partition("calls", "globex"))
    act(page, "force-admit", limit=3)
    assert site.scene.one(
        "select count(*) from dispatch_inflight_jobs where partition_key = 'globex'"
    ) == (5,)
    *about, outcome = audit(site, "force-admit")
    assert about == ["calls", "globex", None]
    assert 3 in outcome.values()
    expect(page.locator("#flash")).to_contain_text("3")


def test_a_partition_is_drained(site, page):
    page.goto(site.scene.partition("calls", "acme"))
    act(page, "drain")
    assert site.scene.one(
        "select count(*) from dispatch_staged_jobs"
        " where policy_name = 'calls' and partition_key = 'acme'"
    ) == (0,)
    *about, outcome = audit(site, "drain")
    assert about == ["calls", "acme", None]
    assert outcome["admitted"] == 4


def test_draining_what_waits_for_its_time_says_so(site, page):
    """Case: "Drained 0, n remain" for ever, because what remains is scheduled for later."""
    page.goto(site.scene.partition("calls", "hooli"))
    act(page, "drain")
    expect(page.locator("#flash")).to_contain_text(re.compile("later|time|schedule", re.I))


def test_a_staged_job_is_cancelled(site, page):
    path = site.scene.job("staged")
    number = int(path.rpartition("/")[2])
    page.goto(path)
    act(page, "cancel")
    assert site.scene.one("select state from dispatch_job(%s)", number) == ("cancelled",)
    policy, key, job_id, _ = audit(site, "cancel")
    assert (policy, key, job_id) == ("calls", "acme", number)


def test_a_dead_job_is_requeued(site, page):
    path = site.scene.job("dead")
    number = int(path.rpartition("/")[2])
    page.goto("/dead")
    page.locator(f"#dead a[href$='{path}']").first.click()
    act(page, "requeue")
    assert site.scene.one("select state from dispatch_job(%s)", number) == ("staged",)
    assert audit(site, "requeue")[:3] == ("calls", "umbrella", number)


def test_a_dead_job_is_discarded(site, page):
    path = site.scene.job("dead")
    page.goto(path)
    act(page, "discard")
    assert site.scene.one("select count(*) from dispatch_dead_jobs") == (0,)
    assert audit(site, "discard")[:3] == ("calls", "umbrella", int(path.rpartition("/")[2]))


def test_dead_jobs_are_chosen_and_requeued_together(site, page):
    chosen = site.scene.stage("calls", "stark", 2, args={"poison": 1})
    site.scene.tick()
    page.goto("/dead")
    for number in chosen:
        page.get_by_label(f"Choose job {number}").check()
    page.locator("#dead button[data-action=requeue]").click()
    page.locator("form#confirm #do").click()
    expect(page.locator("#flash")).to_contain_text("2 jobs")
    left = site.conn.execute("select partition_key from dispatch_dead_jobs").fetchall()
    assert left == [("umbrella",)]
    assert site.conn.execute(
        "select job_id from dispatch_audit_log where action = 'requeue' order by 1"
    ).fetchall() == [(number,) for number in chosen]


def test_nothing_is_done_before_it_is_confirmed(site, page):
    page.goto(site.scene.partition("calls", "globex"))
    page.locator("a[data-action=force-admit]").first.click()
    expect(page.locator("form#confirm")).to_be_visible()
    page.go_back()
    expect(page.locator("#state")).to_be_visible()
    assert site.scene.one("select count(*) from dispatch_audit_log") == (0,)
    assert site.scene.one(
        "select count(*) from dispatch_inflight_jobs where partition_key = 'globex'"
    ) == (2,)


def test_a_form_that_is_sent_twice_acts_on_what_is_left(site, page):
    """The second of two tabs cancels a job that the first one has cancelled."""
    page.goto(site.scene.job("staged"))
    page.locator("a[data-action=cancel]").first.click()
    other = page.context.new_page()
    other.goto(page.url)
    page.locator("#do").click()
    expect(page.locator("#flash")).not_to_be_empty()
    other.locator("#do").click()
    expect(other.locator("#flash")).not_to_be_empty()
    assert site.scene.one(
        "select count(*) from dispatch_audit_log where outcome ->> 'error' is null"
    ) == (1,)
