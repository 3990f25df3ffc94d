"""Without a mouse: every stop is reached in order and is seen, and an action can be done."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from tests.browser.inspection import focused, mark_stops


@pytest.mark.parametrize("page_of", ["overview", "partition", "partitions", "dead", "confirmation"])
def test_tab_goes_through_everything_in_order_and_shows_where_it_is(gallery, new_page, page_of):
    scene = gallery.scene
    partition = scene.partition("calls", "globex")
    path = {
        "overview": "/",
        "partition": partition,
        "partitions": "/partitions",
        "dead": "/dead",
        "confirmation": f"/actions/drain?partition={partition.rpartition('/')[2]}",
    }[page_of]
    page = new_page(gallery)
    page.goto(path)
    stops = mark_stops(page)
    reached: list[int] = []
    for _ in range(stops + 5):
        page.keyboard.press("Tab")
        at = focused(page)
        if at is None or (reached and at["stop"] == reached[0]):
            break
        if at["stop"] is None:
            continue  # a box that scrolls
        assert at["ring"], f"no sign of the focus: {at['html']}"
        assert at["inSight"], f"not in sight: {at['html']}"
        reached.append(at["stop"])
    assert reached == sorted(reached), "the order is not that of the page"
    assert set(range(stops)) - set(reached) == set()


def test_the_first_stop_skips_to_the_content(gallery, new_page):
    page = new_page(gallery)
    page.goto("/")
    page.keyboard.press("Tab")
    skip = page.locator("a.skip")
    expect(skip).to_be_focused()
    expect(skip).to_be_in_viewport()
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    assert page.evaluate("document.querySelector('main').contains(document.activeElement)")


def test_an_action_is_done_with_the_keyboard_alone(site, new_page):
    page = new_page(site)
    page.goto(site.scene.partition("calls", "globex"))
    page.locator("a[data-action=pause]").first.focus()
    page.keyboard.press("Enter")
    expect(page.locator("form#confirm")).to_be_visible()
    page.locator("#do").focus()
    page.keyboard.press("Enter")
    expect(page.locator("#flash")).not_to_be_empty()
    assert site.scene.one(
        "select paused from dispatch_partition_status where partition_key = 'globex'"
    ) == (True,)
