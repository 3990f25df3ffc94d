"""docs/cli.md, made from the commands themselves; ``python -m tests.reference`` writes it."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

import typer
from typer.models import ArgumentInfo, OptionInfo

from pydispatch.cli import app

HEAD = """\
# The command line

<!-- Written by python -m tests.reference from the commands. -->

`pydispatch COMMAND`, or `python -m pydispatch COMMAND`. On a terminal tables fit its width;
elsewhere they are plain columns, and nothing is cut off. `--json` prints one JSON document: times
are ISO 8601, durations are seconds. Whatever a value holds, it is shown as text: control characters
are escaped.

Exit status: 0 it went well; 1 it failed, and standard error says why (with `--json` as JSON); 2 the
command was not understood. Commands that say something else say so.
"""

TITLES = {None: "Setting up and running", "Looking": "Looking", "Operating": "Operating"}


def page() -> str:
    """Return docs/cli.md."""
    commands = list(_commands())
    shared = {name for name, *_ in _parameters(_callback_of_app())} - {"version"}
    parts = [HEAD, "## Every command\n"]
    parts += [*_table(_parameters(_callback_of_app())), ""]
    parts += ["They may stand before the command or behind it, except for `--version`.\n"]
    for panel, title in TITLES.items():
        parts.append(f"## {title}\n")
        for name, found_in, callback in commands:
            if found_in != panel:
                continue
            own = [each for each in _parameters(callback) if each[0] not in shared]
            arguments = [
                _name(argument, info)
                if default is inspect.Parameter.empty
                else f"[{argument.upper()}]"
                for argument, info, _, default in own
                if isinstance(info, ArgumentInfo)
            ]
            usage = " ".join([f"pydispatch {name}", *arguments])
            first, *rest = inspect.cleandoc(callback.__doc__ or "").split("\n\n")
            parts += [f"### {name}\n", f"`{usage}`\n", first, ""]
            parts += [f"{paragraph}\n" for paragraph in rest]
            if own:
                parts += [*_table(own), ""]
    known = {found_in for _, found_in, _ in commands}
    assert known == set(TITLES), known
    return "\n".join(parts).rstrip() + "\n"


Command = tuple[str, str | None, Callable[..., Any]]
Parameter = tuple[str, OptionInfo | ArgumentInfo, Any, Any]


def _commands() -> Iterator[Command]:
    """Each command's name, panel and function."""
    for command in app.registered_commands:
        assert command.callback
        yield str(command.name), _given(command.rich_help_panel), command.callback
    for group in app.registered_groups:
        assert group.typer_instance
        for command in group.typer_instance.registered_commands:
            assert command.callback
            panel = _given(group.rich_help_panel)
            yield f"{group.name} {command.name}", panel, command.callback


def _given(panel: Any) -> str | None:
    return panel if isinstance(panel, str) else None


def _callback_of_app() -> Callable[..., Any]:
    assert app.registered_callback
    callback = app.registered_callback.callback
    assert callback
    return callback


def _parameters(callback: Callable[..., Any]) -> Iterator[Parameter]:
    """Each parameter's name, what typer knows of it, its type and its default."""
    for name, parameter in inspect.signature(callback).parameters.items():
        if parameter.annotation is not typer.Context:
            kind, info = typing.get_args(parameter.annotation)
            yield name, info, kind, parameter.default


def _name(name: str, info: OptionInfo | ArgumentInfo) -> str:
    if isinstance(info, ArgumentInfo):
        return info.metavar or name.upper()
    # Among an annotation's options the first stands where otherwise the default is.
    first = [str(info.default)] if str(info.default).startswith("-") else []
    return ", ".join([*first, *(info.param_decls or ())] or ["--" + name.replace("_", "-")])


def _table(parameters: typing.Iterable[Parameter]) -> Iterator[str]:
    yield "| | value | default | |"
    yield "|---|---|---|---|"
    for name, info, kind, default in parameters:
        names = ", ".join(f"`{each}`" for each in _name(name, info).split(", "))
        cells = [names, _value(info, kind), _default(default), info.help or ""]
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _value(info: OptionInfo | ArgumentInfo, kind: Any) -> str:
    """What may be given, in words."""
    if typing.get_origin(kind) is types.UnionType:
        kind = next(each for each in typing.get_args(kind) if each is not types.NoneType)
    if typing.get_origin(kind) is list:
        return f"{_value(info, typing.get_args(kind)[0])}, repeated"
    if kind is bool:
        return ""
    if isinstance(kind, type) and issubclass(kind, Enum):
        return ", ".join(f"`{each.value}`" for each in kind)
    if kind in (int, float):
        what = "whole number" if kind is int else "number"
        # An id is as large as the database lets it be.
        top = None if info.max is None or info.max > 2**62 else _number(info.max)
        if info.min is not None:
            return f"{what}, {_number(info.min)} to {top}" if top else f"{what}, from {info.min}"
        return f"{what}, up to {top}" if top else what
    return "text"


def _default(default: Any) -> str:
    if default is inspect.Parameter.empty:
        return "required"
    if default is None or default is False:
        return ""
    if isinstance(default, Enum):
        return f"`{default.value}`"
    return _number(default) if isinstance(default, (int, float)) else f"`{default}`"


def _number(value: float) -> str:
    return f"{int(value):,}" if value == int(value) else f"{value:,}"
