"""The ASGI application: its routes, what is in front of them, and what becomes of an error."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any
from urllib.parse import urlsplit

import procrastinate
import psycopg
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from pydispatch.connect import Source
from pydispatch.dispatch import Dispatch
from pydispatch.errors import DispatchError, NotMigrated, UnknownPolicy, translated
from pydispatch.web import acting, pages, security
from pydispatch.web.asked import first, form_of
from pydispatch.web.database import UnreachableError
from pydispatch.web.site import FOLDER, THEME_COOKIE, THEMES, Site, Urls, path_below, site_of

__all__ = ["dashboard"]

logger = logging.getLogger(__name__)


def dashboard(
    where: procrastinate.App | Dispatch | str = "",
    *,
    authorize: security.Authorize | None = None,
    authorize_view: security.AuthorizeView | None = None,
    show_payloads: bool = False,
    allowed_hosts: Sequence[str] | None = None,
    title: str = "pydispatch",
) -> Starlette:
    """Return the dashboard, an ASGI application to be mounted under any path.

    It has connections of its own, four at most, opened when they are first needed. It knows no
    users: keep strangers from it with ``authorize_view``, or by what is around it.

    Args:
        where: The application, its ``Dispatch``, or a libpq connection string (``""`` takes
            libpq's variables).
        authorize: Called with the request, the action (``"pause"``, ``"resume"``, ``"drain"``,
            ``"force-admit"``, ``"cancel"``, ``"requeue"``, ``"discard"``) and its ``Target``, also
            before the page that asks for confirmation. True lets it happen, a text does too and
            names who did it in the audit log, anything else refuses. May be async; a sync one runs
            in a thread. Default: there are no actions.
        authorize_view: Called with the request before each page and the metrics; what is false
            refuses. Default: who reaches the dashboard may look.
        show_payloads: Show args and contexts of jobs.
        allowed_hosts: The names in a ``Host`` header that are answered, without port.
            Default: any.
        title: The name at the top of each page, such as that of the installation.

    Raises:
        ValueError: The application's connector does not tell where it connects.
        TypeError: ``where`` is nothing of that.
    """
    site = Site(
        _source(where),
        authorize=authorize,
        authorize_view=authorize_view,
        show_payloads=show_payloads,
        allowed_hosts=None if allowed_hosts is None else tuple(allowed_hosts),
        title=title,
    )

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await site.database.close()

    app = Starlette(
        routes=[
            Route("/", pages.overview),
            Route("/search", pages.search),
            Route("/hints", pages.hints),
            Route("/policies", pages.policies),
            Route("/policy", pages.policy),
            Route("/partitions", pages.partitions),
            Route("/partitions/{id:uuid}", pages.partition),
            Route("/jobs/{id}", pages.job),
            Route("/dead", pages.dead),
            Route("/audit", pages.audit),
            Route("/actions/{action}", acting.confirm, methods=["GET"]),
            Route("/actions/{action}", acting.act, methods=["POST"]),
            Route("/theme", _theme, methods=["POST"]),
            Route("/metrics", site.metrics),
            Route("/static/{path:path}", _static, name="static"),
        ],
        middleware=[
            Middleware(security.SecurityHeaders),
            Middleware(BaseHTTPMiddleware, dispatch=_guard),
        ],
        exception_handlers={
            HTTPException: _http_error,
            UnreachableError: _unreachable,
            psycopg.Error: _database_error,
            DispatchError: _database_error,
            Exception: _broken,
        },
        lifespan=lifespan,
    )
    app.state.site = site
    return app


def _source(where: procrastinate.App | Dispatch | str) -> Source:
    if isinstance(where, str):
        return Source(where)
    if isinstance(where, Dispatch):
        where = where.app
    if isinstance(where, procrastinate.App):
        return Source(connector=where.connector)
    raise TypeError(f"{type(where).__name__} is neither an App, a Dispatch nor a conninfo")


async def _guard(request: Request, call_next: RequestResponseEndpoint) -> Response:
    """Answer only to our names, and only who may look."""
    site = site_of(request)
    if not security.host_is_allowed(request.headers, site.allowed_hosts):
        return PlainTextResponse("This host name is not served here.\n", 421)
    if not path_below(request).startswith("/static/"):
        try:
            may = await security.allows_view(site.authorize_view, request)
        except HTTPException as error:
            return await _http_error(request, error)
        if not may:
            return PlainTextResponse("You may not see this dashboard.\n", 403)
    return await call_next(request)


# -- errors


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code < 400 or error.status_code in (401, 407):
        return PlainTextResponse(error.detail, error.status_code, headers=error.headers)
    said = {
        404: ("Not found", "There is no such page."),
        405: ("Not allowed", "This page cannot be asked for in this way."),
    }
    title, line = said.get(error.status_code, ("It did not work", ""))
    detail = error.detail if error.status_code not in (404, 405) or "." in error.detail else line
    response = site_of(request).problem(request, error.status_code, title, detail)
    for name, value in (error.headers or {}).items():
        response.headers[name] = value
    return response


async def _unreachable(request: Request, error: Exception) -> Response:
    logger.warning(
        "The dashboard cannot reach the database: %s",
        error,
        extra={"action": "database_unreachable"},
    )
    return site_of(request).problem(
        request,
        503,
        "The database cannot be reached",
        "Jobs that are running may go on; nothing is admitted while it is down. "
        "This page comes back by itself when the database does.",
        retries=True,
    )


async def _database_error(request: Request, error: Exception) -> Response:
    """What the database refused: ours with detail and hint, others by their SQLSTATE."""
    site = site_of(request)
    ours = error if isinstance(error, DispatchError) else translated(error)
    if ours is not None and not isinstance(ours, NotMigrated):
        status = 404 if isinstance(ours, UnknownPolicy) else 400
        return site.problem(request, status, "The database refused this", error=ours)
    logger.error("A page failed", exc_info=error, extra={"action": "page_failed"})
    if isinstance(error, psycopg.errors.QueryCanceled):
        return site.problem(
            request,
            503,
            "The database took too long",
            "The statement was ended after its time limit, so that looking does no harm. "
            "Is the database overloaded?",
            retries=True,
        )
    missing = (
        psycopg.errors.UndefinedTable,
        psycopg.errors.UndefinedFunction,
        psycopg.errors.UndefinedColumn,
        psycopg.errors.UndefinedObject,
    )
    if isinstance(ours, NotMigrated) or isinstance(error, missing):
        return site.problem(
            request,
            500,
            "pydispatch is not installed here",
            "Tables or functions are missing, or older than this dashboard. Is this the right "
            'database and schema? If it is, "pydispatch migrate" brings it up to date.',
        )
    assert isinstance(error, psycopg.Error)
    if isinstance(error, psycopg.errors.InsufficientPrivilege):
        return site.problem(
            request,
            500,
            "The dashboard's role may not do this",
            error.diag.message_primary or "",
            "docs/operations.md lists the rights that it needs.",
        )
    return site.problem(
        request,
        500,
        "The database reported an error",
        f"SQLSTATE {error.sqlstate or 'unknown'}. The log of the dashboard has the rest.",
    )


async def _broken(request: Request, error: Exception) -> Response:
    """Something of ours broke; it is raised again for whoever logs such things."""
    return PlainTextResponse(
        "The dashboard broke. Its log says more.\n",
        500,
        headers={**security.HEADERS, "cache-control": "no-store"},
    )


# -- small things


class _Static(StaticFiles):
    """Our files; their addresses change with them, so they may be kept for ever."""

    def file_response(self, *arguments: Any, **options: Any) -> Response:
        response = super().file_response(*arguments, **options)
        response.headers["cache-control"] = "public, max-age=31536000, immutable"
        return response


_files = _Static(directory=FOLDER / "static")


async def _static(request: Request) -> ASGIApp:
    path = request.path_params["path"]
    return await _files.get_response(path, request.scope)


async def _theme(request: Request) -> Response:
    """Remember light or dark, and go back to where that was chosen."""
    if security.foreign_origin(request.headers) is not None:
        raise HTTPException(403, "This was not sent from a page of the dashboard.")
    form = await form_of(request)
    theme, back = first(form, "theme", "auto"), first(form, "back", "/")
    parts = urlsplit(back)
    if not back.startswith("/") or back.startswith("//") or "\\" in back or parts.netloc:
        back = "/"
    urls = Urls(request)
    site = site_of(request)
    response = site.redirect(
        request, urls(urlsplit(back).path) + (f"?{parts.query}" if parts.query else "")
    )
    if theme in THEMES:
        year = 365 * 86400
        site.set_cookie(request, response, THEME_COOKIE, theme, max_age=year, samesite="lax")
    return response
