"""The tables of docs/json.md, as a description that JSON is compared with.

A row is a key, its type and its meaning; a key with a question mark may be missing. Types are those
of ``BASIC``, ``list of TYPE``, ``object of TYPE`` (by any name), the title of another table, and
several of them with "or" between. "The keys of `part`, and:" above a table stands for those keys.
"""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import click

from calibrant import cli

PAGE = Path(__file__).parents[2] / "docs" / "json.md"
BASIC: dict[str, Any] = {
    "integer": int,
    "number": (int, float),
    "text": str,
    "boolean": bool,
    "null": type(None),
    "any": object,
}
Table = dict[str, str]


@functools.cache
def tables() -> dict[str, Table]:
    """Types by key, by the title of the table."""
    found: dict[str, Table] = {}
    title = ""
    inherited: dict[str, str] = {}
    for line in PAGE.read_text("utf-8").splitlines():
        if line.startswith("#"):
            title = line.lstrip("# ").replace("`", "")
        elif other := re.match(r"The keys of `([^`]+)`, and:$", line):
            inherited[title] = other[1]
        elif row := re.match(r"\| `([^`]+)` \| ([^|]+) \| [^|]+ \|$", line):
            found.setdefault(title, {})[row[1]] = row[2].strip()
    for title, other_title in inherited.items():
        found[title] |= found[other_title]
    return found


def verbs(group: Any = cli.cli, path: tuple[str, ...] = ()) -> list[str]:
    """Names of all commands that have --json."""
    context = click.Context(group)
    found = []
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            found += verbs(command, (*path, name))
        elif any("--json" in option.opts for option in command.params):
            found.append(" ".join((*path, name)))
    return found


def check_output(arguments: list[str], text: str) -> None:
    """Raise unless what a command wrote is described by its table."""
    command: Any = cli.cli
    path = []
    for argument in arguments:
        if isinstance(command, click.Group) and argument in command.commands:
            command = command.commands[argument]
            path.append(argument)
    verb = " ".join(path)
    # a table for an option stands beside that of the verb
    titles = [each for each in tables() if each == verb or each.startswith(f"{verb} --")]
    title = max((t for t in titles if {*t.split()} <= {*verb.split(), *arguments}), key=len)
    check_content(json.loads(text, parse_constant=_refused), title)


def check_content(content: dict[str, Any], title: str) -> None:
    """Raise unless an output is described by the table with this title."""
    assert next(iter(content)) == "format", f"{title}: the format is not the first key"
    assert content["format"] == 1
    rest = {key: value for key, value in content.items() if key != "format"}
    _check(rest, title, title)


def _refused(text: str) -> None:
    raise AssertionError(f"{text} is no JSON")


def _check(value: Any, kind: str, place: str) -> None:
    problems = []
    for one in kind.split(" or "):
        try:
            return _check_one(value, one, place)
        except AssertionError as problem:
            problems.append(str(problem))
    raise AssertionError("; ".join(problems))


def _check_one(value: Any, kind: str, place: str) -> None:
    whole, _, part = kind.partition(" of ")
    if part:
        assert isinstance(value, {"list": list, "object": dict}[whole]), f"{place}: not a {whole}"
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for name, each in items:
            _check(each, part, f"{place}.{name}")
    elif kind in BASIC:
        right = isinstance(value, BASIC[kind])
        right &= not isinstance(value, bool) or kind in ("boolean", "any")
        assert right, f"{place}: {value!r} is no {kind}"
    else:
        _check_object(value, tables()[kind], place)


def _check_object(value: Any, table: Table, place: str) -> None:
    assert isinstance(value, dict), f"{place}: {value!r} is no object"
    known = {name.rstrip("?"): kind for name, kind in table.items()}
    assert not value.keys() - known.keys(), f"{place}: not on the page: {value.keys() - known}"
    missing = {name for name in table if not name.endswith("?")} - value.keys()
    assert not missing, f"{place}: missing: {missing}"
    for name, each in value.items():
        _check(each, known[name], f"{place}.{name}")
