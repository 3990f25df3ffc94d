"""What docs/dashboard.md says is tried here."""

from __future__ import annotations

import inspect
import re
import sys
import types
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request

from pydispatch.web import dashboard
from pydispatch.web.actions import ACTIONS, MOST_JOBS
from pydispatch.web.database import READING, WRITING
from tests.web_support import parse

PAGE = (Path(__file__).parent.parent / "docs" / "dashboard.md").read_text(encoding="utf-8")
IN_STARLETTE, IN_FASTAPI, IN_DJANGO = re.findall(r"^```python\n(.*?)^```$", PAGE, re.S | re.M)


def run(code: str, dsn: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(code.replace('"postgresql:///app"', repr(dsn)), names)
    return names


async def ask(app: Any, path: str, headers: dict[str, str]) -> httpx.Response:
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
        return await client.get(path, headers=headers)


async def test_the_code_for_starlette_works(dsn, conn):
    conn.execute("select dispatch_define_policy('p', '{}')")
    app = run(IN_STARLETTE, dsn)["app"]
    assert (await ask(app, "/dispatch/", {})).status_code == 403
    page = parse((await ask(app, "/dispatch/", {"x-remote-user": "bob"})).text)
    assert "Overview" in page.text
    drain = "/dispatch/actions/drain?policy=p"
    assert (await ask(app, drain, {"x-remote-user": "bob"})).status_code == 403
    assert (await ask(app, drain, {"x-remote-user": "ada"})).status_code == 200
    await app.routes[0].app.state.site.database.close()


async def test_the_code_for_fastapi_works(dsn, conn, monkeypatch):
    """FastAPI is a Starlette, as far as mounting goes."""
    stand_in = types.ModuleType("fastapi")
    vars(stand_in).update(FastAPI=Starlette, Request=Request)
    monkeypatch.setitem(sys.modules, "fastapi", stand_in)
    app = run(IN_FASTAPI, dsn)["app"]
    assert (await ask(app, "/dispatch/", {})).status_code == 403
    response = await ask(app, "/dispatch/policies", {"cookie": "session=a valid one"})
    assert response.status_code == 200
    await app.routes[-1].app.state.site.database.close()


def test_the_code_for_django_is_python():
    compile(IN_DJANGO, "asgi.py", "exec")


def test_the_page_has_every_argument_with_its_default():
    rows = dict(re.findall(r"^\| `(\w+)` \| (?:`(.*?)`|\w+) \|", PAGE, re.M))
    parameters = inspect.signature(dashboard).parameters
    assert list(rows) == list(parameters)
    for name, default in rows.items():
        assert default == (
            "" if (value := parameters[name].default) is None else repr(value).replace("'", '"')
        )


def test_the_page_has_every_action_and_bound():
    for name, action in ACTIONS.items():
        assert f'"{name}"' in PAGE
        if action.limit:
            assert f"{action.limit[1]:,}" in PAGE
    for bound in (f"{MOST_JOBS} dead jobs", f"after {READING:.0f} s", f"after {WRITING:.0f} s"):
        assert bound in PAGE


@pytest.mark.parametrize("path", ["/policies", "/audit", "/metrics"])
async def test_a_path_of_the_page_is_there(dsn, conn, path):
    app = dashboard(dsn)
    assert (await ask(app, path, {})).status_code == 200
    await app.state.site.database.close()
