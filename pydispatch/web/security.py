"""Who may do what: cross-site requests, hosts, cookies, headers, and the user's ``authorize``.

A form is believed when it carries the token of the cookie that the browser sent with it, and when
the browser says that it comes from our own page. Either is enough in a browser of today; together
they also hold with an old one, or where a neighbouring site may set cookies.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import inspect
import ipaddress
import logging
import secrets
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = [
    "Authorize",
    "AuthorizeView",
    "SecurityHeaders",
    "Target",
    "allowed",
    "allows_view",
    "client_name",
    "csrf_cookie",
    "csrf_token",
    "foreign_origin",
    "host_is_allowed",
    "is_loopback",
    "loopback_only",
    "new_secret",
    "token_matches",
]

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Target:
    """What an action is about, as ``authorize`` gets it.

    Attributes:
        policy: The policy's name; None where the job is not known to be of one.
        partition_key: The partition's key; None when the action is about the whole policy.
        job_id: The job's id, for what is done to a single job.
    """

    policy: str | None = None
    partition_key: str | None = None
    job_id: int | None = None


Verdict: TypeAlias = bool | str | None

Authorize: TypeAlias = Callable[[Request, str, Target], Verdict | Awaitable[Verdict]]
"""Asked before each action: False refuses; a text is the name of who does it; True leaves the name
to the request (its ``user``, else its address)."""

AuthorizeView: TypeAlias = Callable[[Request], Verdict | Awaitable[Verdict]]
"""Asked before each page: anything false refuses."""

CSP = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "form-action 'self'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
    ]
)

HEADERS = {
    "content-security-policy": CSP,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    # Not no-referrer: browsers then send "Origin: null" with our own forms.
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}


class SecurityHeaders:
    """Adds the headers to every response; caches may keep only what says so."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                headers.setdefault("cache-control", "no-store")
            await send(message)

        await self._app(scope, receive, send_with_headers if scope["type"] == "http" else send)


# -- cross-site requests


def csrf_cookie(request: Request) -> str:
    """The name of the cookie: behind https one that no neighbouring site can set."""
    return "__Host-dispatch_csrf" if request.url.scheme == "https" else "dispatch_csrf"


def new_secret() -> str:
    """Return what goes into a new cookie."""
    return secrets.token_urlsafe(32)


def csrf_token(secret: str) -> str:
    """Return what goes into the forms of the browser that has this cookie."""
    return hashlib.sha256(b"pydispatch form\0" + secret.encode()).hexdigest()


def token_matches(secret: str | None, token: str | None) -> bool:
    """Tell whether a form was made for the browser that sent it."""
    if not secret or not token:
        return False
    return hmac.compare_digest(csrf_token(secret).encode(), token.encode())


def foreign_origin(headers: Headers) -> str | None:
    """Return what the browser says of where a form comes from, if that is not our own page.

    Browsers send ``Sec-Fetch-Site`` over https and to localhost, and ``Origin`` always. What is
    no browser may send neither, and then has to know the token.
    """
    site = headers.get("sec-fetch-site")
    if site is not None:
        return None if site == "same-origin" else f"elsewhere ({site})"
    origin = headers.get("origin")
    if origin is None:
        return None
    try:
        same = urlsplit(origin).netloc.lower() == headers.get("host", "").lower() != ""
    except ValueError:
        same = False
    return None if same else origin


# -- hosts


def is_loopback(host: str) -> bool:
    """Tell whether a host's name or address can only be this machine."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def host_is_allowed(headers: Headers, hosts: Iterable[str] | None) -> bool:
    """Tell whether a request was sent to one of our names, whatever the port. None: to any.

    A page of an attacker can let its own name point to 127.0.0.1, and so read what listens there;
    the browser then still says that name.
    """
    if hosts is None:
        return True
    try:
        name = urlsplit(f"//{headers.get('host', '')}").hostname or ""
    except ValueError:
        return False
    return name in {host.lower().strip("[]") for host in hosts}


# -- people


def client_name(request: Request) -> str:
    """Who sent a request, as far as it tells: its user, else its address."""
    user: Any = request.scope.get("user")
    if getattr(user, "is_authenticated", False):
        # starlette's, Django's, or what else is called so
        name = getattr(user, "display_name", None) or getattr(user, "username", None)
        return str(name or user)
    return f"client {request.client.host}" if request.client else "unknown client"


def loopback_only(request: Request, action: str, target: Target) -> str | None:
    """An ``authorize`` for a server on a loopback address: whoever is on this machine may act.

    Not for who came through a proxy, which lets anybody look like this machine.
    """
    forwarded = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-real-ip", "via")
    if request.client is None or not is_loopback(request.client.host):
        return None
    if any(name in request.headers for name in forwarded):
        return None
    return f"loopback {request.client.host}"


async def allowed(
    authorize: Authorize | None, request: Request, action: str, target: Target
) -> str | None:
    """Return the name of who does an action, or None when that is refused.

    Raises:
        HTTPException: What ``authorize`` raised, to send people to a login, say.
    """
    if authorize is None:
        return None
    verdict = await _asked(authorize, request, action, target)
    if isinstance(verdict, str) and verdict:
        return verdict
    return client_name(request) if verdict is True else None


async def allows_view(authorize: AuthorizeView | None, request: Request) -> bool:
    """Tell whether a page may be seen.

    Raises:
        HTTPException: What ``authorize`` raised.
    """
    return authorize is None or bool(await _asked(authorize, request))


async def _asked(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call the user's function, sync ones in a thread; one that fails says no."""
    try:
        if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004
        ):
            return await function(*arguments)
        verdict = await run_in_threadpool(function, *arguments)
        return await verdict if inspect.isawaitable(verdict) else verdict
    except HTTPException:
        raise
    except Exception:
        logger.exception("authorize failed, so it refuses", extra={"action": "authorize_failed"})
        return False
