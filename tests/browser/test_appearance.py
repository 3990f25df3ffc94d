"""Light and dark: as the system says, or as the reader does."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page, expect

from tests.browser.inspection import brightness


@pytest.mark.parametrize("javascript", [True, False], ids=["javascript", "without"])
def test_the_page_is_as_dark_as_the_system_until_somebody_chooses(gallery, new_page, javascript):
    dark = new_page(gallery, color_scheme="dark", java_script_enabled=javascript)
    dark.goto("/")
    assert brightness(dark) < 60
    light = new_page(gallery, color_scheme="light", java_script_enabled=javascript)
    light.goto("/")
    assert brightness(light) > 220

    choose(light, "dark")
    assert brightness(light) < 60
    light.goto("/policies")
    assert brightness(light) < 60, "the choice is forgotten"
    choose(light, "light")
    assert brightness(light) > 220
    choose(light, "dark")
    choose(light, "auto")
    assert brightness(light) > 220


def choose(page: Page, theme: str) -> None:
    """Press the switch's button of a theme, and stay on the page."""
    path = page.url
    page.locator(f"#theme button[name=theme][value={theme}]").click()
    page.wait_for_load_state()
    expect(page.locator("main#main")).to_be_visible()
    assert page.url == path


def test_who_wants_little_motion_gets_none(gallery, new_page):
    page = new_page(gallery, reduced_motion="reduce")
    page.goto("/")
    moving = page.locator("body *").evaluate_all(
        "all => all.filter(e => parseFloat(getComputedStyle(e).animationDuration) > 0.01"
        " || parseFloat(getComputedStyle(e).transitionDuration) > 0.01).map(e => e.outerHTML)"
    )
    assert moving == []
