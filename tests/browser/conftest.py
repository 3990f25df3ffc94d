"""Fixtures: the browser, dashboards to look at, and pages that are watched for what goes wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from bench.crowd import Crowd, fill
from pydispatch.embedded import EmbeddedPostgres
from tests.browser.chromium import ABSENT, find_chromium, open_browser
from tests.browser.faults import Faults
from tests.browser.site import Site, open_site

NewPage = Callable[..., Page]
OFF = "try { localStorage['dispatch-refresh'] ??= '0'; } catch {}"
"""Pages stay as they are unless a test chooses otherwise."""

PATIENCE = 30_000
"""Milliseconds for which a page is waited for: none should need them, a busy machine may."""
CROWD = Crowd(jobs=150_000, slots=1_000, admissions=1_000, ticks=1_440, samples=1_440)


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """The browser of this process, for as long as it runs tests of this folder.

    No longer: Playwright's event loop would be in the way of tests that run one themselves.
    """
    program = find_chromium()
    if program is None:
        pytest.skip(ABSENT)
    with open_browser(program) as browser:
        yield browser


@pytest.fixture(scope="package")
def gallery(browser: Browser, server: EmbeddedPostgres) -> Iterator[Site]:
    """A site with a ``Scene``, for tests that only look."""
    with open_site(server) as site:
        site.scene.play()
        yield site


@pytest.fixture(scope="package")
def crowd(browser: Browser, server: EmbeddedPostgres) -> Iterator[Site]:
    """A site with 100,000 partitions, for tests that only look."""
    with open_site(server) as site:
        fill(site.conn, CROWD)
        yield site


@pytest.fixture
def site(browser: Browser, server: EmbeddedPostgres) -> Iterator[Site]:
    """A site with a ``Scene`` for one test, which may change it."""
    with open_site(server) as site:
        site.scene.play()
        yield site


@pytest.fixture
def faults() -> Iterator[Faults]:
    """What the test's pages did wrong. If there is any at the end, the test fails."""
    faults = Faults()
    yield faults
    assert not faults


@pytest.fixture
def new_page(browser: Browser, faults: Faults) -> Iterator[NewPage]:
    """A function that opens a page of a site: ``new_page(site)``.

    Each has a profile of its own and a window of 1280 by 800. Takes what ``browser.new_context``
    takes, too.
    """
    contexts = []

    def new_page(site: Site, **options: Any) -> Page:
        context = browser.new_context(
            **{"base_url": site.url, "viewport": {"width": 1280, "height": 800}, **options}
        )
        context.set_default_timeout(PATIENCE)
        context.add_init_script(OFF)
        contexts.append(context)
        faults.watch(context)
        return context.new_page()

    yield new_page
    for context in contexts:
        context.close()


expect.set_options(timeout=PATIENCE)
