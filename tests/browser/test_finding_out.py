"""Somebody on call begins at the overview and wants to know why a tenant's jobs do not run."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect


@pytest.mark.parametrize("javascript", [True, False], ids=["javascript", "without"])
def test_two_clicks_from_the_overview_tell_why_a_tenants_jobs_do_not_run(
    gallery, new_page, javascript
):
    page = new_page(gallery, java_script_enabled=javascript)
    page.goto("/")
    page.locator("#policies").get_by_role("link", name="calls", exact=True).click()
    page.locator("#partitions").get_by_role("link", name="acme", exact=True).click()
    expect(page.get_by_role("heading", level=1)).to_contain_text("acme")
    state = page.locator("#state")
    expect(state).to_contain_text("of 1 tokens are there, 1 come in 3600 s")
    expect(state).to_contain_text(re.compile(r"Waiting\s*4"))
    expect(state).to_contain_text(re.compile("What to change: .*raise rate, which is rate in the"))
    throttle, concurrency = page.locator("#gates tbody tr").all()
    expect(throttle).to_contain_text("holds it")
    expect(concurrency).to_contain_text("lets it pass")


def test_a_hint_leads_to_what_it_is_about(gallery, new_page):
    page = new_page(gallery)
    page.goto("/")
    page.locator("#hints").get_by_role("link", name="initech", exact=True).click()
    page.wait_for_url(f"**{gallery.scene.partition('calls', 'initech')}")
    expect(page.locator("#state")).to_contain_text("paused")


@pytest.mark.parametrize("javascript", [True, False], ids=["javascript", "without"])
def test_a_tenants_name_leads_to_its_partitions_and_a_number_to_a_job(
    gallery, new_page, javascript
):
    page = new_page(gallery, java_script_enabled=javascript)
    page.goto("/")
    page.locator("#q").fill("acme")
    page.locator("#q").press("Enter")
    page.locator(f"#results a[href$='{gallery.scene.partition('calls', 'acme')}']").click()
    expect(page.get_by_role("heading", level=1)).to_contain_text("acme")

    job = gallery.scene.job("staged")
    page.locator("#q").fill(job.rpartition("/")[2])
    page.locator("#q").press("Enter")
    page.wait_for_url(f"**{job}")
    expect(page.locator("#explain")).to_contain_text("throttle")


def test_what_is_waited_for_differs_from_partition_to_partition(gallery, new_page):
    page = new_page(gallery)
    for key, why in {
        "acme": "throttle",
        "globex": "concurrency",
        "initech": "paused",
        "hooli": "2100",
    }.items():
        page.goto(gallery.scene.partition("calls", key))
        expect(page.locator("#state")).to_contain_text(re.compile(why, re.I))
    page.goto(gallery.scene.partition("exports", "acme"))
    expect(page.locator("main")).to_contain_text(re.compile("paused", re.I))


def test_a_queued_job_waits_for_a_worker_and_not_for_a_gate(gallery, new_page):
    page = new_page(gallery)
    page.goto(gallery.scene.job("queued"))
    expect(page.locator("#state")).to_contain_text("worker")


def test_waiting_jobs_are_listed_in_the_order_in_which_they_are_admitted(site, new_page):
    """Case: the list of waiting jobs shows another order than that of admission."""
    later = {"scheduled_at": "2100-01-01T00:00:00Z"}
    ids = [
        *site.scene.stage("calls", "new"),
        *site.scene.stage("calls", "new", priority=5),
        *site.scene.stage("calls", "new", priority=9, **later),
        *site.scene.stage("calls", "new"),
    ]
    site.conn.execute("select dispatch_pause('calls', 'new')")
    site.scene.tick()
    page = new_page(site)
    page.goto(site.scene.partition("calls", "new"))
    links = page.locator("#waiting tbody a[href*='/jobs/']")
    paths = links.evaluate_all("links => links.map(link => link.pathname)")
    listed = [int(path.rpartition("/")[2]) for path in paths]
    assert listed == [ids[1], ids[0], ids[3], ids[2]]
