"""A key is any text: it is shown as what it is, can be reached and acted upon, and runs nothing."""

from __future__ import annotations

from urllib.parse import parse_qs, urlsplit

import pytest
from playwright.sync_api import Page, expect

from tests.browser.inspection import intruders, too_wide
from tests.browser.keys import HOSTILE
from tests.browser.site import open_site

SHOWN = 100  # a page may cut a key after that many characters
INVISIBLE = set("\x01\x1b\x7f\x85\u2028\u2029\ufeff\u202e\u202d\u2067")


@pytest.fixture(scope="module")
def hostile(browser, server):
    """A site with a partition for each key, a job waiting in each, and a policy of such a name."""
    with open_site(server) as site:
        scene = site.scene.play()
        for key in HOSTILE.values():
            scene.stage("calls", key, 3, context={"rate": 1, "note": key})
        scene.conn.execute("select dispatch_define_policy(%s, '{}')", [HOSTILE["markup"][:128]])
        scene.tick()
        yield site


def test_each_is_reached_by_links_and_shown_as_text(hostile, new_page):
    page = new_page(hostile)
    page.goto("/partitions?policy=calls")
    links = page.locator("#partitions a[href*='/partitions/']")
    listed = links.evaluate_all("links => links.map(link => link.pathname)")
    for name, key in HOSTILE.items():
        path = hostile.scene.partition("calls", key)
        assert path in listed, name
        page.goto(path)
        assert printable(key) in printable(shown(page)), name
        assert not set(shown(page)) & INVISIBLE, name
        assert intruders(page) == [], name
        assert page.evaluate("window.ran") is None, name
        page.locator("#waiting a[href*='/jobs/']").first.click()
        expect(page.locator("#explain")).to_be_visible()
        assert page.evaluate("window.ran") is None, name


def test_each_is_found_by_the_search(hostile, new_page):
    page = new_page(hostile)
    page.goto("/partitions?policy=calls")
    for name, key in HOSTILE.items():
        if not key.strip() or len(key) > 1000 or "\n" in key:
            continue  # nobody types that
        page.locator("#filter input[name=q]").fill(key)
        page.locator("#filter input[name=q]").press("Enter")
        path = hostile.scene.partition("calls", key)
        page.wait_for_url(lambda url, key=key: asked_for(url) == key)
        expect(page.locator(f"#partitions a[href$='{path}']").first).to_be_visible()
        assert page.evaluate("window.ran") is None, name


def test_none_makes_a_page_wider_than_its_window(hostile, new_page):
    page = new_page(hostile)
    wide = {}
    paths = {name: hostile.scene.partition("calls", key) for name, key in HOSTILE.items()}
    for name, path in {**paths, "all": "/partitions?policy=calls", "overview": "/"}.items():
        page.set_viewport_size({"width": 1280, "height": 800})
        page.goto(path)
        for width in (1280, 400):
            page.set_viewport_size({"width": width, "height": 800})
            if found := too_wide(page):
                wide[name] = found
    assert wide == {}


def test_one_that_turns_the_reading_direction_turns_nothing_beside_itself(hostile, new_page):
    page = new_page(hostile)
    page.goto("/partitions?policy=calls")
    path = hostile.scene.partition("calls", HOSTILE["right_to_left"])
    link = page.locator(f"#partitions a[href$='{path}']").first
    isolated = link.evaluate(
        """
        link => {
          const text = link.querySelector('bdi') ?? link;
          return getComputedStyle(text).unicodeBidi;
        }
        """
    )
    assert isolated in ("isolate", "isolate-override", "plaintext")


def test_each_can_be_acted_upon(site, new_page):
    page = new_page(site)
    worst = ("markup", "quotes", "long_emoji", "control", "empty", "dots", "query", "json")
    keys = {name: HOSTILE[name] for name in worst}
    for key in keys.values():
        site.scene.stage("calls", key, 1, context={"rate": 1})
    site.scene.tick()
    action = "/actions/pause?partition={}"
    for name, key in keys.items():
        page.goto(action.format(site.scene.partition("calls", key).rpartition("/")[2]))
        page.locator("form#confirm #do").click()
        expect(page.locator("#flash")).not_to_be_empty()
        assert site.scene.one(
            "select count(*) from dispatch_pauses where policy_name = 'calls'"
            " and partition_key = %s",
            key,
        ) == (1,), name
        assert page.evaluate("window.ran") is None, name
    page.goto("/audit")
    assert page.evaluate("window.ran") is None
    assert site.scene.one("select count(distinct partition_key) from dispatch_audit_log") == (
        len(keys),
    )


def test_a_policys_name_is_text_too(hostile, new_page):
    page = new_page(hostile)
    page.goto("/policies")
    page.locator("#policies").get_by_role("link", name="<script>").first.click()
    expect(page.get_by_role("heading", level=1)).to_contain_text("<script>window.ran=1</script>")
    assert page.evaluate("window.ran") is None


def asked_for(url: str) -> str:
    """Return what a page's address says that was searched for."""
    return parse_qs(urlsplit(url).query, keep_blank_values=True).get("q", [""])[0]


def printable(text: str) -> str:
    """Return what leaves ink, as far as no page would cut it."""
    return "".join(char for char in text if char.isprintable() and char != " ")[:SHOWN]


def shown(page: Page) -> str:
    """Return the heading's text, without the escapes in it that stand for what is invisible."""
    text: str = page.get_by_role("heading", level=1).evaluate(
        """
        heading => {
          const copy = heading.cloneNode(true);
          copy.querySelectorAll('.esc').forEach(escape => escape.remove());
          return copy.textContent;
        }
        """
    )
    return text
