"""What guards the dashboard beside the forms: headers, hosts, who may look, cookies."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from starlette.exceptions import HTTPException
from starlette.requests import Request
from typer.testing import CliRunner

from pydispatch.cli import app as command_line
from pydispatch.cli_web import web_app
from pydispatch.web import dashboard
from tests.web_support import ORIGIN, PREFIX, browsing, parse

STATIC = Path(__file__).parent.parent / "pydispatch" / "web" / "static"


@pytest.mark.parametrize(
    "path", ["/", "/nowhere", "/static/dispatch.css", "/metrics", "/search?q=1", "/actions/pause"]
)
async def test_every_answer_carries_the_headers(dsn, conn, path):
    async with browsing(dsn, authorize=lambda *_: True) as browser:
        headers = (await browser.raw(path)).headers
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "same-origin"
    assert headers["x-frame-options"] == "DENY"
    kept = "immutable" if "static" in path else "no-store"
    assert kept in headers["cache-control"]


async def test_a_page_that_breaks_tells_nothing_and_carries_the_headers(dsn, conn, monkeypatch):
    from pydispatch.web.database import Reader

    async def breaks(*_: object) -> None:
        raise RuntimeError("a secret")

    monkeypatch.setattr(Reader, "database_time", breaks)
    app = dashboard(dsn)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url=ORIGIN) as client:
        response = await client.get("/")
    await app.state.site.database.close()
    assert response.status_code == 500
    assert "a secret" not in response.text
    assert "default-src 'none'" in response.headers["content-security-policy"]
    assert response.headers["cache-control"] == "no-store"


async def test_who_may_not_look_sees_nothing(dsn, conn):
    async def nobody(request: Request) -> bool:
        return False

    def breaks(request: Request) -> bool:
        raise ZeroDivisionError

    def logs_in(request: Request) -> bool:
        raise HTTPException(303, headers={"location": "/login"})

    conn.execute("select dispatch_define_policy('secret', '{}')")
    for authorize_view, status in (nobody, 403), (breaks, 403), (logs_in, 303):
        async with browsing(dsn, authorize_view=authorize_view) as browser:
            for path in ("/", "/policies", "/metrics", "/audit", "/nowhere"):
                response = await browser.raw(path)
                assert response.status_code == status, path
                assert "secret" not in response.text
    async with browsing(dsn, authorize_view=lambda request: True) as browser:
        assert "secret" in (await browser.raw("/policies")).text


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8080", 200),
        ("localhost", 200),
        ("LOCALHOST:1", 200),
        ("[::1]:8080", 200),
        ("evil.example", 421),
        ("127.0.0.1.evil.example:8080", 421),
        ("localhost@evil.example", 421),
        ("", 421),
        ("[", 421),
    ],
)
async def test_a_loopback_server_answers_only_to_its_own_names(dsn, conn, host, status):
    """A page elsewhere may let a name of its own point to 127.0.0.1."""
    app = web_app(dsn, "127.0.0.1", allow_actions=True)
    transport = httpx.ASGITransport(app, client=("127.0.0.1", 1))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        response = await client.get("/policies", headers={"host": host})
    await app.state.site.database.close()
    assert response.status_code == status


@pytest.mark.parametrize(
    ("client", "headers", "status"),
    [
        ("127.0.0.1", {}, 200),
        ("::1", {}, 200),
        ("192.0.2.1", {}, 403),
        ("127.0.0.1", {"x-forwarded-for": "192.0.2.1"}, 403),
        ("127.0.0.1", {"forwarded": "for=192.0.2.1"}, 403),
    ],
)
async def test_actions_on_a_loopback_server_are_for_this_machine(
    dsn, conn, client, headers, status
):
    conn.execute("select dispatch_define_policy('p', '{}')")
    app = web_app(dsn, "127.0.0.1", allow_actions=True)
    transport = httpx.ASGITransport(app, client=(client, 1))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        response = await http.get("/actions/pause?policy=p", headers=headers)
    await app.state.site.database.close()
    assert response.status_code == status


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "192.0.2.1", "example.com", "localhost.evil.com"]
)
def test_actions_are_refused_on_an_address_that_others_reach(host):
    result = CliRunner().invoke(
        command_line, ["--dsn", "host=/nowhere", "web", "--host", host, "--allow-actions"]
    )
    assert result.exit_code == 2
    assert "--allow-actions" in result.output


def test_the_command_serves_the_dashboard_until_it_is_stopped(dsn, conn):
    command = [sys.executable, "-m", "pydispatch", "--dsn", dsn, "web", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            found = None
            while not found:
                line = process.stderr.readline()
                assert line
                found = re.search(r"on (http://127\.0\.0\.1:\d+) ", line)
            page = parse(httpx.get(f"{found[1]}/").text)
            assert "looking only" in page.text
        finally:
            process.terminate()
        assert process.wait(timeout=20) == 0


def test_an_address_that_is_taken_is_said_and_ends_with_status_1(dsn):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "pydispatch", "--dsn", dsn, "web", "--port", port]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert "address already in use" in ended.stderr


def test_a_missing_extra_is_named():
    script = """
import sys
sys.modules["starlette"] = None
try:
    import pydispatch.web
except ImportError as error:
    print(type(error).__name__, error)
"""
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout
    assert shown == (
        'WebExtraMissingError the dashboard needs the extra "web" (starlette is not installed): '
        "pip install 'dispatch-policy[web]'\n"
    )


async def test_the_theme_is_remembered_and_leads_back(dsn, conn):
    headers = {"sec-fetch-site": "same-origin", "origin": ORIGIN}
    async with browsing(dsn) as browser:
        page = await browser.get("/partitions?sort=key&q=%2F%3F")
        assert page.all("html")[0].attributes["data-theme"] == "auto"
        form = page.id("theme")
        response = await browser.send(form, theme="dark")
        assert response.status_code == 303
        assert response.headers["location"] == f"{PREFIX}/partitions?sort=key&q=%2F%3F"
        page = await browser.get(response.headers["location"])
        assert page.all("html")[0].attributes["data-theme"] == "dark"
        await browser.send(form, theme="nonsense")
        page = await browser.get("/")
        assert page.all("html")[0].attributes["data-theme"] == "dark"
        for back in ("//evil.example", "http://evil.example", "/\\evil.example", "x", ""):
            response = await browser.client.post(
                f"{PREFIX}/theme", data={"theme": "light", "back": back}, headers=headers
            )
            assert response.headers["location"] == f"{PREFIX}/"
        response = await browser.send(form, headers={"sec-fetch-site": "cross-site"}, theme="light")
        assert response.status_code == 403


async def test_cookies_are_kept_from_scripts_and_from_other_sites(dsn, conn):
    conn.execute("select dispatch_define_policy('p', '{}')")
    async with browsing(dsn, authorize=lambda *_: True) as browser:
        response = await browser.raw("/actions/pause?policy=p")
        plain = response.headers["set-cookie"].lower()
        assert "httponly" in plain
        assert "samesite=strict" in plain
        assert f"path={PREFIX}/" in plain
        address = f"https://ops.example{PREFIX}/actions/pause?policy=p"
        response = await browser.client.get(address)
        secure = response.headers["set-cookie"]
        assert secure.startswith("__Host-dispatch_csrf=")
        assert "Secure" in secure
        assert "Path=/;" in secure


@pytest.mark.parametrize("cookie", ["x", "e30=", "W10=", "WzEsIDJd", "=" * 5000, "é"])
async def test_a_forged_flash_says_nothing(dsn, conn, cookie):
    async with browsing(dsn) as browser:
        page = await browser.get("/", headers={"cookie": f"dispatch_flash={cookie}".encode()})
    assert not page.has("flash")


def test_the_files_hold_no_address_of_elsewhere():
    for file in STATIC.iterdir():
        text = file.read_text().replace("http://www.w3.org/2000/svg", "")
        assert "://" not in text, file
        assert "innerHTML =" not in text
        assert "eval(" not in text
