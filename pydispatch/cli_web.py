"""``pydispatch web``: the dashboard on a server of its own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pydispatch.cli_session import Session
from pydispatch.errors import DispatchError

if TYPE_CHECKING:
    from starlette.applications import Starlette

__all__ = ["web", "web_app"]


def web(
    session: Session,
    host: Annotated[str, typer.Option(help="Listen on this address.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Listen on this port.")] = 8080,
    allow_actions: Annotated[
        bool,
        typer.Option(
            "--allow-actions",
            help="Let everybody who reaches it pause, drain, cancel and so on. On a loopback "
            "address only, where that is whoever is logged in to this machine.",
        ),
    ] = False,
    show_payloads: Annotated[
        bool, typer.Option("--show-payloads", help="Show args and contexts of jobs.")
    ] = False,
    title: Annotated[str, typer.Option(help="At the top of each page.")] = "pydispatch",
) -> None:
    """Serve the dashboard, until SIGTERM or SIGINT (needs the extra "web")."""
    try:
        import uvicorn

        from pydispatch.web.security import is_loopback
    except ImportError as error:
        message = (
            'the dashboard needs the extra "web" (uvicorn is not installed): '
            "pip install 'dispatch-policy[web]'"
            if error.name == "uvicorn"
            else str(error)
        )
        raise DispatchError(message, sqlstate="") from error
    if allow_actions and not is_loopback(host):
        raise typer.BadParameter(
            f"{host} can be reached from elsewhere; actions are for a loopback address such as "
            "127.0.0.1. To act from elsewhere mount dashboard(authorize=...) in an application.",
            param_hint="--allow-actions",
        )
    where: Any = session.conninfo
    app = web_app(
        session.needed_dispatch if where is None else where,
        host,
        allow_actions=allow_actions,
        show_payloads=show_payloads,
        title=title,
    )
    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # Headers of a proxy are not believed: the address of who asks counts where actions are on.
    config = uvicorn.Config(
        app, host=host, port=port, log_config=None, access_log=False, proxy_headers=False
    )
    server = uvicorn.Server(config)
    # One that cannot listen has logged why, and ends with a status of its own.
    with _stopped_by_signals(server.handle_exit), contextlib.suppress(SystemExit):
        asyncio.run(server.serve())
    if not server.started:
        raise typer.Exit(1)


@contextlib.contextmanager
def _stopped_by_signals(stop: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Let SIGTERM and SIGINT end the server in order, which then counts as going well.

    The server takes its signals itself, and raises them anew when it has ended.
    """
    before = {each: signal.signal(each, stop) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def web_app(
    where: Any,
    host: str,
    *,
    allow_actions: bool = False,
    show_payloads: bool = False,
    title: str = "pydispatch",
) -> Starlette:
    """Return the dashboard as it is served on a host: with what that address allows."""
    from pydispatch.web import dashboard
    from pydispatch.web.security import is_loopback, loopback_only

    # Where only this machine is served, a page from elsewhere must not get at it by a name
    # of its own that it lets point here.
    names = ("localhost", "127.0.0.1", "::1", host) if is_loopback(host) else None
    return dashboard(
        where,
        authorize=loopback_only if allow_actions else None,
        show_payloads=show_payloads,
        allowed_hosts=names,
        title=title,
    )
