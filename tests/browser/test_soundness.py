"""What holds of every page."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page

from tests.browser.inspection import faint_text, structure, too_wide


def test_every_page_answers_and_nothing_in_it_fails(gallery, new_page):
    """No console error, no failed request, nothing against the content security policy."""
    page = new_page(gallery)
    for path in gallery.scene.paths():
        response = page.goto(path)
        assert response is not None
        assert response.status == 200, path
        assert "default-src 'none'" in (response.header_value("content-security-policy") or "")


def test_every_link_leads_somewhere(gallery, new_page):
    page = new_page(gallery)
    seen: set[str] = set()
    for path in gallery.scene.paths():
        page.goto(path)
        seen |= set(
            page.locator("a[href]").evaluate_all(
                "links => links.map(link => link.href.split('#')[0])"
            )
        )
    assert len(seen) > len(gallery.scene.paths())
    for link in seen:
        assert link.startswith(gallery.url), "a link leads out"
        assert page.request.get(link).status == 200, link


def test_every_page_has_one_heading_and_a_name_for_each_field_and_table(gallery, new_page):
    page = new_page(gallery)
    assert on_every_page(gallery, page, structure) == {}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_text_is_faint(gallery, new_page, scheme):
    page = new_page(gallery, color_scheme=scheme)
    assert on_every_page(gallery, page, faint_text) == {}


@pytest.mark.parametrize("width", [1280, 400])
def test_no_page_is_wider_than_its_window(gallery, new_page, width):
    page = new_page(gallery, viewport={"width": width, "height": 800})
    assert on_every_page(gallery, page, too_wide) == {}


def on_every_page(site, page: Page, look) -> dict[str, list[str]]:
    """Return what is found, by the page's path."""
    found = {}
    for path in site.scene.paths():
        page.goto(path)
        page.locator("details").evaluate_all("all => all.forEach(details => details.open = true)")
        if faults := look(page):
            found[path] = faults
    return found
