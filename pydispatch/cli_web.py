"""``pydispatch web``: the dashboard on a server of its own."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pydispatch.cli_command import command
from pydispatch.cli_output import print_error, print_line
from pydispatch.cli_session import Session
from pydispatch.errors import DispatchError

if TYPE_CHECKING:
    from starlette.applications import Starlette

__all__ = ["web"]


@command()
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
        print_error(DispatchError(message, sqlstate=""), as_json=session.json)
        raise typer.Exit(1) from None
    loopback = is_loopback(host)
    if allow_actions and not loopback:
        raise typer.BadParameter(
            f"{host} can be reached from elsewhere; actions are for a loopback address such as "
            "127.0.0.1. To act from elsewhere mount dashboard(authorize=...) in an application.",
            param_hint="--allow-actions",
        )
    app = _app(
        session,
        host,
        loopback=loopback,
        allow_actions=allow_actions,
        show_payloads=show_payloads,
        title=title,
    )
    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    shown = f"[{host}]" if ":" in host else host
    print_line(f"dashboard on http://{shown}:{port}/" if port else f"dashboard on {shown}")
    # Headers of a proxy are not believed: the address of who asks counts where actions are on.
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            host=host,
            port=port,
            log_config=None,
            proxy_headers=False,
            server_header=False,
            access_log=False,
        )
    )
    server.run()
    if not server.started:
        raise typer.Exit(1)


def _app(
    session: Session,
    host: str,
    *,
    loopback: bool,
    allow_actions: bool,
    show_payloads: bool,
    title: str,
) -> Starlette:
    """Return the dashboard with what its address allows."""
    from pydispatch.web import dashboard
    from pydispatch.web.security import loopback_only

    where: Any = session.conninfo
    return dashboard(
        session.needed_dispatch if where is None else where,
        authorize=loopback_only if allow_actions else None,
        show_payloads=show_payloads,
        # Where only this machine is served, a page from elsewhere must not get at it by a name
        # of its own that it lets point here.
        allowed_hosts=("localhost", "127.0.0.1", "::1", host) if loopback else None,
        title=title,
    )
