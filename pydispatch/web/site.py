"""What all pages share: the options, the templates, addresses below any mount, cookies, errors."""

from __future__ import annotations

import base64
import binascii
import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from pydispatch.connect import Source
from pydispatch.errors import DispatchError
from pydispatch.web import charts, security, shown
from pydispatch.web.database import Database
from pydispatch.web.scrape import Metrics

__all__ = ["FOLDER", "Flash", "Site", "Urls", "path_below", "site_of"]

FOLDER = Path(__file__).parent

THEME_COOKIE = "dispatch_theme"
FLASH_COOKIE = "dispatch_flash"
THEMES = ("auto", "light", "dark")


class Urls:
    """Addresses of our pages, below whatever the application is mounted under.

    Paths only, no host: so they hold behind any proxy.
    """

    def __init__(self, request: Request) -> None:
        self.base = ("/" + request.scope.get("root_path", "").strip("/")).rstrip("/")

    def __call__(self, path: str, **query: Any) -> str:
        """The address of a path that begins with ``/``; a query value of None is left out."""
        address = quote(self.base + path)
        wanted = {name: value for name, value in query.items() if value is not None}
        # What no browser can be kept from reading as a path stays in the query, encoded.
        return f"{address}?{urlencode(wanted, doseq=True)}" if wanted else address

    def policy(self, name: str) -> str:
        """The page of a policy."""
        return self("/policy", name=name)

    def partition(self, id: object) -> str:
        """The page of a partition."""
        return self(f"/partitions/{id}")

    def job(self, id: object) -> str:
        """The page of a job."""
        return self(f"/jobs/{id}")

    def action(self, action: str, **target: Any) -> str:
        """The page that asks before an action."""
        return self(f"/actions/{action}", **target)

    def static(self, name: str) -> str:
        """A static file, by an address that changes with it."""
        return self(f"/static/{name}", v=_fingerprint(name))


@dataclasses.dataclass(frozen=True)
class Flash:
    """What is said once, on the page after an action.

    Attributes:
        level: ``done``, ``nothing`` (it went well, but there was nothing to do) or ``failed``.
        lines: The sentences.
    """

    level: str
    lines: tuple[str, ...]


class Site:
    """The dashboard's options, and what makes its pages."""

    def __init__(
        self,
        source: Source,
        *,
        authorize: security.Authorize | None,
        authorize_view: security.AuthorizeView | None,
        show_payloads: bool,
        allowed_hosts: tuple[str, ...] | None,
        title: str,
    ) -> None:
        self.database = Database(source)
        self.metrics = Metrics(source)
        self.authorize = authorize
        self.authorize_view = authorize_view
        self.show_payloads = show_payloads
        self.allowed_hosts = allowed_hosts
        self.title = title

    @property
    def acts(self) -> bool:
        """Are there actions at all?"""
        return self.authorize is not None

    def page(
        self,
        request: Request,
        template: str,
        *,
        code: int = 200,
        now: datetime | None = None,
        **values: Any,
    ) -> Response:
        """Render a page.

        Args:
            request: What is answered.
            template: The template's file, without ``.html``.
            code: HTTP's status.
            now: The time by the database's clock; without one, the page shows none.
            values: What the template names.
        """
        theme = request.cookies.get(THEME_COOKIE, "auto")
        flash = _read_flash(request.cookies.get(FLASH_COOKIE))
        urls = Urls(request)
        body = (
            templates()
            .get_template(f"{template}.html")
            .render(
                {
                    "url": urls,
                    "site": self,
                    "title_of_site": self.title,
                    "theme": theme if theme in THEMES else "auto",
                    "themes": THEMES,
                    "flash": flash,
                    "here": here(request),
                    "query": request.query_params.get("q", "") if template == "search" else "",
                    "now": now,
                    "ago": functools.partial(shown.ago, now=now) if now else None,
                    **values,
                }
            )
        )
        response = HTMLResponse(body, code)
        if flash is not None:
            response.delete_cookie(FLASH_COOKIE, path=f"{urls.base}/")
        return response

    def problem(
        self,
        request: Request,
        code: int,
        title: str,
        *lines: str,
        error: DispatchError | None = None,
        retries: bool = False,
    ) -> Response:
        """Render a page that says what is wrong, with a way back."""
        response = self.page(
            request,
            "problem",
            code=code,
            problem=title,
            lines=lines,
            error=error,
            retries=retries,
        )
        if retries:
            response.headers["retry-after"] = "5"
        return response

    def redirect(self, request: Request, address: str, flash: Flash | None = None) -> Response:
        """Send the browser to one of our pages, perhaps with something to say there."""
        response = RedirectResponse(address, 303)
        if flash is not None:
            self.set_cookie(request, response, FLASH_COOKIE, _written_flash(flash), max_age=60)
        return response

    def set_cookie(
        self, request: Request, response: Response, name: str, value: str, **more: Any
    ) -> None:
        """Set a cookie that only our pages get, and no script; behind https, only over https."""
        options = {"path": f"{Urls(request).base}/", "samesite": "strict", **more}
        secure = request.url.scheme == "https"
        response.set_cookie(name, value, httponly=True, secure=secure, **options)


def site_of(request: Request) -> Site:
    """The site that a request was sent to."""
    site: Site = request.app.state.site
    return site


def here(request: Request) -> str:
    """The path and query of a page, below the mount: to come back to."""
    query = request.scope.get("query_string", b"").decode("latin-1")
    return path_below(request) + (f"?{query}" if query else "")


def path_below(request: Request) -> str:
    """The path of a page below the mount, decoded."""
    path: str = request.scope["path"]
    root: str = request.scope.get("root_path", "")
    return (path[len(root) :] if root and path.startswith(root) else path) or "/"


@functools.cache
def templates() -> Environment:
    """The templates, with everything escaped that does not say that it is markup."""
    environment = Environment(
        loader=FileSystemLoader(FOLDER / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        duration=shown.duration,
        key=shown.key,
        number=shown.number,
        plain=shown.plain,
        reason=shown.reason,
        said=shown.said,
        seconds=shown.seconds,
        shortened=shown.shortened,
        shown_json=shown.as_json,
        words=shown.words,
        numbers=shown.numbers,
    )
    environment.globals.update(
        draw=charts.draw,
        bar=charts.bar,
        version=importlib.metadata.version("dispatch-policy"),
    )
    return environment


@functools.cache
def _fingerprint(name: str) -> str:
    return hashlib.sha256((FOLDER / "static" / name).read_bytes()).hexdigest()[:12]


def _written_flash(flash: Flash) -> str:
    """A flash as a cookie's value, which browsers keep up to 4 kB of."""
    lines = [shown.shortened(line, 300) for line in flash.lines[:7]]
    text = json.dumps([flash.level, *lines])
    return base64.urlsafe_b64encode(text.encode()).decode()[:3600]


def _read_flash(cookie: str | None) -> Flash | None:
    if not cookie:
        return None
    with contextlib.suppress(ValueError, binascii.Error):
        level, *lines = json.loads(base64.urlsafe_b64decode(cookie))
        if level in ("done", "nothing", "failed") and all(isinstance(line, str) for line in lines):
            return Flash(level, tuple(lines))
    return None
