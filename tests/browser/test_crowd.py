"""Pages of an installation with 100,000 partitions."""

from __future__ import annotations

from playwright.sync_api import expect

from bench.crowd import FLOOD
from tests.browser.inspection import too_wide


def test_each_page_loads_and_stays_small(crowd, new_page):
    page = new_page(crowd)
    for path in (
        "/",
        "/hints",
        "/policies",
        "/policy?name=calls",
        "/partitions",
        crowd.scene.partition("calls", FLOOD),
        "/dead",
        "/audit",
    ):
        response = page.goto(path)
        assert response is not None
        assert response.status == 200, path
        assert len(response.body()) < 300_000, path
        assert too_wide(page) == [], path


def test_one_of_them_is_found(crowd, new_page):
    page = new_page(crowd)
    page.goto("/partitions")
    page.locator("#filter input[name=q]").fill("nt-0077777")
    page.locator("#filter input[name=q]").press("Enter")
    rows = page.locator("#partitions tbody tr")
    expect(rows).to_have_count(1)
    rows.get_by_role("link", name="tenant-0077777").click()
    expect(page.get_by_role("heading", level=1)).to_contain_text("tenant-0077777")


def test_pages_follow_each_other_without_a_gap(crowd, new_page):
    page = new_page(crowd)
    page.goto("/partitions?sort=key&policy=calls")
    keys: list[str] = []
    for _ in range(3):
        keys += page.locator("#partitions tbody tr a[href*='/partitions/']").all_inner_texts()
        page.locator("#partitions a[rel=next], a[rel=next]").first.click()
        page.wait_for_url("**cursor=*")
    expected = crowd.conn.execute(
        "select partition_key from dispatch_partitions where policy_name = 'calls'"
        " order by partition_key limit %s",
        [len(keys)],
    ).fetchall()
    assert len(keys) > 50
    assert keys == [key for (key,) in expected]


def test_the_flood_shows_its_first_jobs(crowd, new_page):
    page = new_page(crowd)
    page.goto(crowd.scene.partition("calls", FLOOD))
    listed = page.locator("#waiting tbody tr")
    assert 10 <= listed.count() <= 200
    page.locator("#waiting a[rel=next], #waiting a[href*='cursor=']").first.click()
    page.wait_for_url("**cursor=*")
    expect(listed.first).to_be_visible()
