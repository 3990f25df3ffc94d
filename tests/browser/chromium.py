"""Finds and starts the system's Chromium."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator

from playwright.sync_api import Browser, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
ABSENT = (
    f"no browser: none of {', '.join(NAMES)} is in the path "
    "(Debian, Ubuntu: apt-get install chromium)"
)

# Playwright adds --no-sandbox by itself: root has to, and only our own pages are opened.
OPTIONS = (
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--disable-quic",
    "--disable-sync",
    "--no-first-run",
)


def find_chromium() -> str | None:
    """Return the path of a browser's program, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


@contextlib.contextmanager
def open_browser(program: str) -> Iterator[Browser]:
    """Start a browser with a fresh profile and a home of its own.

    While it is open, an event loop runs in this thread: Playwright's. No other can.
    """
    with tempfile.TemporaryDirectory(prefix="pydispatch-browser-") as home, sync_playwright() as p:
        browser = p.chromium.launch(
            executable_path=program, args=[*OPTIONS], env={**os.environ, "HOME": home}
        )
        try:
            yield browser
        finally:
            browser.close()
