"""Helpers for tests of the dashboard without a browser: pages as trees, a client below a prefix."""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.routing import Mount

from pydispatch.web import dashboard

PREFIX = "/ops/dispatch"
ORIGIN = "http://ops.example"
VOID = {"br", "hr", "img", "input", "link", "meta"}


@dataclass
class Element:
    """An element of a page."""

    tag: str
    attributes: dict[str, str] = field(default_factory=dict)
    children: list[Element | str] = field(default_factory=list)

    def walk(self) -> Iterator[Element]:
        yield self
        for child in self.children:
            if isinstance(child, Element):
                yield from child.walk()

    @property
    def text(self) -> str:
        parts = [child if isinstance(child, str) else child.text for child in self.children]
        return re.sub(r"\s+", " ", "".join(parts))

    def all(self, tag: str, **attributes: str) -> list[Element]:
        """The elements of a tag whose attributes have these values (``data_x`` is ``data-x``)."""
        wanted = {name.replace("_", "-"): value for name, value in attributes.items()}
        return [
            each
            for each in self.walk()
            if each.tag == tag
            and all(each.attributes.get(name) == value for name, value in wanted.items())
        ]

    def id(self, id: str) -> Element:
        (found,) = [each for each in self.walk() if each.attributes.get("id") == id]
        return found

    def has(self, id: str) -> bool:
        return any(each.attributes.get("id") == id for each in self.walk())

    def cells(self) -> list[list[str]]:
        """The text of the cells of the rows in the bodies of tables."""
        return [
            [cell.text.strip() for cell in row.children if isinstance(cell, Element)]
            for body in self.all("tbody")
            for row in body.all("tr")
        ]

    def links(self) -> list[str]:
        return [each.attributes["href"] for each in self.all("a")]


class _Parser(HTMLParser):
    """Builds the tree, and refuses what a browser would have to guess about."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.root = Element("page")
        self.open = [self.root]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), f"an attribute twice: {self.get_starttag_text()}"
        element = Element(tag, {name: value or "" for name, value in attrs})
        self.open[-1].children.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open[-1].tag == tag, f"</{tag}> ends <{self.open[-1].tag}>"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.open[-1].children.append(data)


def parse(html: str) -> Element:
    """The tree of a page, which has to be sound."""
    parser = _Parser()
    parser.feed(html)
    parser.close()
    assert parser.open == [parser.root], f"not ended: {parser.open[-1].tag}"
    page = parser.root
    check(page)
    return page


def check(page: Element) -> None:
    """Fail for what makes a page unsound, unsafe or hard to use without eyes or a mouse."""
    ids = [each.attributes["id"] for each in page.walk() if "id" in each.attributes]
    assert sorted(ids) == sorted(set(ids))
    for each in page.walk():
        assert not {"style", "onclick", "onload", "onerror"} & set(each.attributes), each
        for name in ("aria-labelledby", "aria-describedby", "for"):
            for id in each.attributes.get(name, "").split():
                assert id in ids, f"{name} of <{each.tag}> names {id}"
        if each.tag == "script":
            assert each.attributes["src"]
            assert not each.children
        if each.tag == "th":
            assert each.attributes["scope"] in ("col", "row")
        if each.tag == "table":
            assert each.all("caption")
        if each.tag == "svg":
            named = "aria-labelledby" in each.attributes or "aria-label" in each.attributes
            assert named or each.attributes.get("aria-hidden") == "true"
        if each.tag in ("input", "select") and each.attributes.get("type") != "hidden":
            labelled = [at.attributes["for"] for at in page.all("label")]
            assert "aria-label" in each.attributes or each.attributes["id"] in labelled, each
    assert len(page.all("h1")) == 1
    assert len(page.all("main")) == 1


@dataclass
class Browser:
    """A client that asks for pages below the prefix, keeps cookies and sends forms."""

    client: httpx.AsyncClient
    prefix: str = PREFIX

    async def get(self, path: str, status: int = 200, **options: Any) -> Element:
        """A page. ``path`` is below the prefix, or what a link of a page says."""
        response = await self.raw(path, **options)
        assert response.status_code == status, response.text
        return parse(response.text)

    async def raw(self, path: str, **options: Any) -> httpx.Response:
        return await self.client.get(self.address(path), **options)

    def address(self, path: str) -> str:
        return path if path.startswith(f"{self.prefix}/") or not self.prefix else self.prefix + path

    async def send(
        self, form: Element, headers: dict[str, str] | None = None, **changes: Any
    ) -> httpx.Response:
        """Send a form as a browser would, with some of its fields changed (None: left out)."""
        fields: dict[str, Any] = {}
        for each in form.all("input"):
            if each.attributes.get("type") == "checkbox" and "checked" not in each.attributes:
                continue
            fields.setdefault(each.attributes["name"], []).append(each.attributes.get("value", ""))
        fields.update(changes)
        return await self.client.post(
            form.attributes["action"],
            data={name: value for name, value in fields.items() if value is not None},
            headers={"origin": ORIGIN, "sec-fetch-site": "same-origin", **(headers or {})},
        )

    async def act(self, path: str, **changes: Any) -> Element:
        """Ask for a confirmation, confirm, and return the page that it leads to."""
        page = await self.get(path)
        response = await self.send(page.id("confirm"), **changes)
        assert response.status_code == 303, response.text
        return await self.get(response.headers["location"])


@contextlib.asynccontextmanager
async def browsing(
    where: Any, prefix: str = PREFIX, client: str = "203.0.113.7", **options: Any
) -> AsyncIterator[Browser]:
    """A browser in front of a dashboard that is mounted in an application."""
    app = dashboard(where, **options)
    outer = Starlette(routes=[Mount(prefix, app)]) if prefix else app
    transport = httpx.ASGITransport(outer, client=(client, 1234))
    try:
        async with httpx.AsyncClient(transport=transport, base_url=ORIGIN) as http:
            yield Browser(http, prefix)
    finally:
        await app.state.site.database.close()
