"""The dashboard: an ASGI application to look at pydispatch in a browser, and to steer it.

``dashboard(...)`` returns it; mount it in FastAPI, Starlette or Django, or run ``pydispatch web``.

Everything is server-rendered and works without JavaScript. All paths are below the mount, with any
``root_path``. Partitions are named by their id (a uuid), policies by a query parameter, so that
any text works as a key or a name.

==============================================  ==================================================
path                                            what
==============================================  ==================================================
``GET /``                                       overview: ``#hints``, ``#totals``, ``#capacity``,
                                                ``#throughput``, ``#pending``, ``#policies``
``GET /search?q=``                              a job's id or a partition's key: leads to it, or
                                                lists what it may be (``#results``)
``GET /hints``                                  all hints (``#hints``)
``GET /policies``                               ``#policies``
``GET /policy?name=``                           one policy: ``#hints``, ``#totals``,
                                                ``#throughput``, ``#pending``, ``#lag``,
                                                ``#denials``, ``#partitions``, ``#definition``
``GET /partitions?policy=&sort=&q=&pending=1``  ``#filter``, ``#partitions``; ``&cursor=`` pages
``GET /partitions/{uuid}``                      one: ``#state``, ``#gates``, ``#waiting``
                                                (``?cursor=`` pages), ``#inflight``, ``#adaptive``,
                                                ``#fairness``, ``#caps``, ``#lags``
``GET /jobs/{id}``                              one job: ``#state``, ``#explain``, ``#lifecycle``,
                                                ``#payload`` (with ``show_payloads`` only)
``GET /dead?policy=``                           dead jobs: ``#dead``; ``&cursor=`` pages
``GET /audit``                                  what was done by whom: ``#audit``; ``?cursor=``
``GET /actions/{action}?policy=``               confirmation (``form#confirm``, ``#limit``, button
or ``?partition={uuid}`` or ``?id=&id=``        ``#do``) of pause, resume, drain, force-admit,
                                                cancel, requeue, discard
``POST /actions/{action}``                      does it, and redirects (303) to the page it is about
``POST /theme``                                 ``theme=auto|light|dark``, kept in a cookie
``GET /metrics``                                for Prometheus
``GET /static/{file}``                          ``dispatch.css``, ``dispatch.js``, ``favicon.svg``
==============================================  ==================================================

On every page: ``a.skip``, ``header``, ``nav[aria-label=Main]`` (the current page has
``aria-current=page``), ``form[role=search]`` with ``#q``, ``main#main``, ``#flash`` (role status:
what an action did), ``#theme`` (buttons ``name=theme``); with JavaScript ``#live`` (a select: 0, 2,
5 or 10 seconds) and ``#live-status`` (role status). ``main[data-live]`` is what is refreshed.
Each section has the id above, each table a caption; charts are ``svg[role=img]`` followed by a
``details`` with the same numbers in a table. A link to an action has ``data-action=<action>``.
"""

from __future__ import annotations

__all__ = ["Target", "WebExtraMissingError", "dashboard"]


class WebExtraMissingError(ImportError):
    """What the dashboard is built with is not installed; the message says what to do."""


try:
    from pydispatch.web.app import dashboard
    from pydispatch.web.security import Target
except ModuleNotFoundError as error:
    package = (error.name or "").partition(".")[0]
    if package not in ("jinja2", "prometheus_client", "starlette"):
        raise
    raise WebExtraMissingError(
        f'the dashboard needs the extra "web" ({package} is not installed): '
        "pip install 'dispatch-policy[web]'",
        name=error.name,
    ) from None
