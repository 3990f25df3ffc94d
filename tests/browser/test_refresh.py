"""Live refresh: it keeps what the reader is at, never asks twice at once, and survives outages."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest
from playwright.sync_api import Page, expect

from pydispatch.web import dashboard
from tests.browser.serving import serve

LOADED = datetime(2026, 1, 1, tzinfo=timezone.utc)

# Counts in the page itself, where nothing is told late: all requests, and the most open at once.
COUNT = """
globalThis.asked = { begun: 0, open: 0, most: 0 };
const ask = globalThis.fetch;
globalThis.fetch = (...what) => {
  asked.begun += 1;
  asked.open += 1;
  asked.most = Math.max(asked.most, asked.open);
  return ask(...what).finally(() => { asked.open -= 1; });
};
"""


@pytest.fixture
def page(site, new_page):
    """The page of a partition, with a clock that only ``pass_time`` moves."""
    return open_page(new_page(site), site.scene.partition("calls", "globex"))


def open_page(page: Page, path: str) -> Page:
    """Go to a path, and stop the page's clock there."""
    page.add_init_script(COUNT)
    page.clock.install(time=LOADED)
    page.goto(path)
    page.clock.pause_at(LOADED + timedelta(hours=1))
    return page


def choose(page: Page, seconds: int) -> None:
    """Choose how often the page is refreshed."""
    page.locator("#live").select_option(str(seconds))


def pass_time(page: Page, seconds: float) -> None:
    """Let time pass in the page, and timers run. What they ask for may still be on its way."""
    page.clock.run_for(round(seconds * 1000))


def settle(page: Page) -> None:
    """Wait until the page has its answer and has planned the next request."""
    expect(page.locator("#live-status")).not_to_have_attribute("aria-busy", "true")


def asked(page: Page, what: str = "begun") -> int:
    """Return how often the page has asked so far, or how many requests are (were) open."""
    count: int = page.evaluate("what => asked[what]", what)
    return count


def test_the_page_shows_what_is_new_without_being_asked(site, page):
    choose(page, 2)
    site.scene.stage("calls", "globex", 72)
    site.scene.tick()
    pass_time(page, 2.5)
    expect(page.locator("#state")).to_contain_text("76")


def test_off_asks_for_nothing(site, page):
    choose(page, 2)
    choose(page, 0)
    pass_time(page, 60)
    expect(page.locator("#live")).to_have_value("0")
    assert asked(page) == 0


@pytest.mark.parametrize("seconds", [0, 2, 5, 10])
def test_the_choice_is_remembered_on_all_pages(gallery, new_page, seconds):
    page = new_page(gallery)
    page.goto("/")
    choose(page, seconds)
    page.goto("/policies")
    expect(page.locator("#live")).to_have_value(str(seconds))
    page.reload()
    expect(page.locator("#live")).to_have_value(str(seconds))


@pytest.mark.parametrize("seconds", [2, 5, 10])
def test_the_pace_is_the_chosen_one(site, page, seconds):
    choose(page, seconds)
    for times in range(5):
        pass_time(page, seconds - 0.5)
        assert asked(page) == times
        pass_time(page, 0.5)
        assert asked(page) == times + 1
        settle(page)
    assert asked(page, "most") == 1


def test_a_slow_answer_is_waited_for_and_no_second_is_asked_for(site, page):
    page.route(page.url, lambda route: None)  # never answered
    choose(page, 2)
    pass_time(page, 12)
    assert asked(page) == asked(page, "open") == 1
    for _ in range(20):  # long enough for the page to give one up
        pass_time(page, 2)
    assert asked(page) > 1
    assert asked(page, "most") == 1

    page.unroute(page.url)
    site.scene.stage("calls", "globex", 72)
    site.scene.tick()
    pass_time(page, 16)  # the last of them is given up
    settle(page)
    pass_time(page, 2)
    expect(page.locator("#state")).to_contain_text("76")


def test_scroll_position_focus_and_open_details_stay(site, page):
    page.goto("/policy?name=calls")
    choose(page, 2)
    details = page.locator("#pending details").first
    details.locator("summary").click()
    link = page.locator("#partitions").get_by_role("link", name="globex", exact=True)
    link.focus()
    page.evaluate("scrollTo(0, 200)")
    before = page.evaluate("scrollY")
    site.scene.stage("calls", "globex", 72)
    site.scene.tick()
    pass_time(page, 2.5)
    expect(page.locator("#partitions")).to_contain_text("76")
    assert page.evaluate("scrollY") == before == 200
    expect(link).to_be_focused()
    assert details.evaluate("details => details.open")


def test_what_is_typed_and_selected_stays(site, new_page):
    page = open_page(new_page(site), "/partitions?policy=calls")
    choose(page, 2)
    field = page.locator("#filter input[name=q]")
    field.fill("half a wo")
    site.scene.stage("calls", "late")
    site.scene.tick()
    pass_time(page, 2.5)
    expect(page.locator("#partitions")).to_contain_text("late")
    expect(field).to_have_value("half a wo")
    expect(field).to_be_focused()


def test_an_outage_is_told_and_passes(server, site, new_page, faults):
    with serve(dashboard(site.conn.info.dsn)) as url:
        page = open_page(new_page(site), url + site.scene.partition("calls", "globex"))
        choose(page, 2)
        pass_time(page, 2.5)
        settle(page)
        status = page.locator("#live-status")
        quiet = status.inner_text()
    pass_time(page, 2.5)
    expect(status).not_to_have_text(quiet)
    expect(status).to_contain_text("cannot be reached")
    expect(page.locator("#waiting")).to_be_visible()  # what was there is still there
    site.scene.stage("calls", "globex", 72)
    site.scene.tick()
    with serve(dashboard(site.conn.info.dsn), int(url.rpartition(":")[2])):
        settle(page)
        pass_time(page, 2.5)
        expect(page.locator("#state")).to_contain_text("76")
        expect(status).to_have_text(quiet)
    faults.clear()  # refused connections: that is what it was about


def test_a_page_in_the_background_asks_for_nothing(site, page):
    choose(page, 2)
    hide(page, True)
    pass_time(page, 60)
    expect(page.locator("#live")).to_have_value("2")
    assert asked(page) == 0
    hide(page, False)
    assert asked(page) == 1, "who comes back sees what is new at once"
    settle(page)
    pass_time(page, 2.5)
    assert asked(page) == 2


def hide(page: Page, hidden: bool) -> None:
    """Let the page believe that its tab went to the background, or came back."""
    page.evaluate(
        """
        hidden => {
          const state = { hidden, visibilityState: hidden ? 'hidden' : 'visible' };
          for (const [name, value] of Object.entries(state))
            Object.defineProperty(document, name, { get: () => value, configurable: true });
          document.dispatchEvent(new Event('visibilitychange'));
        }
        """,
        hidden,
    )
