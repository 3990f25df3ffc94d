"""Live refresh: it keeps what the reader is at, never asks twice at once, and survives outages."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from playwright.sync_api import Page, Request, Response, Route, expect

from pydispatch.web import dashboard
from tests.browser.serving import serve
from tests.support import wait_for


@pytest.fixture
def page(site, new_page):
    """The page of a partition, with a clock that only ``pass_time`` moves."""
    page = new_page(site)
    page.clock.install()
    page.goto(site.scene.partition("calls", "globex"))
    return page


def choose(page: Page, seconds: int) -> None:
    """Choose how often the page is refreshed."""
    page.locator("#live").select_option(str(seconds))


def pass_time(page: Page, seconds: float) -> None:
    """Let time pass in the page, and timers run."""
    page.clock.run_for(round(seconds * 1000))


def pass_time_until(page: Page, condition: Callable[[], bool], step: float = 1.0) -> None:
    """Let time pass until something holds."""

    def passed() -> bool:
        pass_time(page, step)
        return condition()

    wait_for(passed)


def asking(page: Page) -> list[Request]:
    """Return the list of what the page asks for from now on, which grows."""
    asked: list[Request] = []
    page.on("request", lambda request: asked.append(request))
    return asked


def waiting(page: Page) -> str:
    return page.locator("#state").inner_text()


def test_the_page_shows_what_is_new_without_being_asked(site, page):
    choose(page, 2)
    site.scene.stage("calls", "globex", 72)
    site.scene.tick()
    pass_time(page, 2.5)
    expect(page.locator("#state")).to_contain_text("76")


def test_off_asks_for_nothing(site, page):
    choose(page, 2)
    choose(page, 0)
    asked = asking(page)
    pass_time(page, 60)
    expect(page.locator("#live")).to_have_value("0")
    assert asked == []


@pytest.mark.parametrize("seconds", [0, 2, 5, 10])
def test_the_choice_is_remembered_on_all_pages(gallery, new_page, seconds):
    page = new_page(gallery)
    page.goto("/")
    choose(page, seconds)
    page.goto("/policies")
    expect(page.locator("#live")).to_have_value(str(seconds))
    page.reload()
    expect(page.locator("#live")).to_have_value(str(seconds))


def test_the_pace_is_the_chosen_one(site, page):
    answered: list[Response] = []
    page.on("response", lambda response: answered.append(response))
    choose(page, 5)
    pass_time(page, 6)
    wait_for(lambda: page.title() and answered)
    for _ in range(4):
        answered.clear()
        pass_time(page, 4)
        assert answered == []
        pass_time(page, 2)
        wait_for(lambda: page.title() and answered)


def test_a_slow_answer_is_waited_for_and_no_second_is_asked_for(site, page, faults):
    held: list[Route] = []
    given_up: list[Request] = []
    page.on("requestfailed", lambda request: given_up.append(request))
    hold = True
    page.route(page.url, lambda route: held.append(route) if hold else route.continue_())
    choose(page, 2)
    pass_time(page, 2)
    wait_for(lambda: page.title() and held)
    for _ in range(5):
        pass_time(page, 2)
    assert len(held) == 1
    for _ in range(20):  # long enough for the page to give one up
        pass_time(page, 2)
        assert len(held) - len(given_up) <= 1
    assert given_up

    hold = False
    for route in held:
        route.abort()
    site.scene.stage("calls", "globex", 72)
    site.scene.tick()
    pass_time_until(page, lambda: "76" in waiting(page))
    faults.clear()  # what was held


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
    page = new_page(site)
    page.clock.install()
    page.goto("/partitions?policy=calls")
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
    page = new_page(site)
    page.clock.install()
    with serve(dashboard(site.conn.info.dsn)) as url:
        page.goto(url + site.scene.partition("calls", "globex"))
        choose(page, 2)
        pass_time(page, 2.5)
        status = page.locator("#live-status")
        quiet = status.inner_text()
    pass_time(page, 2.5)
    expect(status).not_to_have_text(quiet)
    expect(status).to_contain_text("cannot be reached")
    expect(page.locator("#waiting")).to_be_visible()  # what was there is still there
    site.scene.stage("calls", "globex", 72)
    site.scene.tick()
    with serve(dashboard(site.conn.info.dsn), int(url.rpartition(":")[2])):
        pass_time_until(page, lambda: "76" in waiting(page), step=5)
        expect(status).to_have_text(quiet)
    faults.clear()  # refused connections: that is what it was about


def test_a_page_in_the_background_asks_for_nothing(site, page):
    choose(page, 2)
    page.evaluate(
        """
        () => {
          Object.defineProperty(document, 'hidden', { get: () => true });
          Object.defineProperty(document, 'visibilityState', { get: () => 'hidden' });
          document.dispatchEvent(new Event('visibilitychange'));
        }
        """
    )
    asked = asking(page)
    pass_time(page, 60)
    expect(page.locator("#live")).to_have_value("2")
    assert len(asked) <= 1
