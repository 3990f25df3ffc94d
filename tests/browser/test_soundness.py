"""What holds of every page."""

from __future__ import annotations

import re
from collections import defaultdict

import pytest

from tests.browser.faults import Faults
from tests.browser.inspection import faint_text, structure, too_wide

NUMBER = re.compile(r"[0-9a-f]{8}-[0-9a-f-]{27}|[0-9]+")


@pytest.fixture(scope="module")
def found(browser, gallery):
    """What was found in each page: by what was looked for and the page's path, a list.

    Also the links of all pages.
    """
    found: defaultdict[str, dict[str, list[str]]] = defaultdict(dict)
    faults = Faults()
    context = browser.new_context(base_url=gallery.url)
    faults.watch(context)
    page = context.new_page()
    for path in gallery.scene.paths():
        page.emulate_media(color_scheme="light")
        page.set_viewport_size({"width": 1280, "height": 800})
        response = page.goto(path)
        assert response is not None
        policy = response.header_value("content-security-policy")
        found["answer"][path] = [] if response.status == 200 else [response.status]
        found["policy"][path] = [] if "default-src 'none'" in (policy or "") else [policy]
        page.locator("details").evaluate_all("all => all.forEach(details => details.open = true)")
        found["structure"][path] = structure(page)
        links = page.locator("a[href]").evaluate_all("links => links.map(link => link.href)")
        found["links"][path] = [link.partition("#")[0] for link in links]
        found["light"][path] = faint_text(page)
        page.emulate_media(color_scheme="dark")
        found["dark"][path] = faint_text(page)
        found["1280"][path] = too_wide(page)
        page.set_viewport_size({"width": 400, "height": 800})
        found["400"][path] = too_wide(page)
        found["faults"][path] = [*faults]
        faults.clear()
    context.close()
    return found


def bad(found, what: str) -> dict[str, list[str]]:
    """Return the pages in which something was found."""
    assert found[what]
    return {path: faults for path, faults in found[what].items() if faults}


def test_every_page_answers_and_allows_no_script_but_its_own(found):
    assert bad(found, "answer") == {}
    assert bad(found, "policy") == {}


def test_nothing_in_a_page_fails(found):
    """No console error, no failed request, nothing against the content security policy."""
    assert bad(found, "faults") == {}


def test_every_link_leads_somewhere(found, gallery, new_page):
    page = new_page(gallery)
    links = {link for links in found["links"].values() for link in links}
    one_of_each = {NUMBER.sub("0", link): link for link in links}
    assert len(one_of_each) > 20
    for link in one_of_each.values():
        assert link.startswith(gallery.url), "a link leads out"
        assert page.request.get(link).status == 200, link


def test_every_page_has_one_heading_and_a_name_for_each_field_and_table(found):
    assert bad(found, "structure") == {}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_text_is_faint(found, scheme):
    assert bad(found, scheme) == {}


@pytest.mark.parametrize("width", ["1280", "400"])
def test_no_page_is_wider_than_its_window(found, width):
    assert bad(found, width) == {}
