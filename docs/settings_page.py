"""Writes docs/settings.md, the reference of all keys, from the types, bounds and docstrings of the schemas.

python docs/settings_page.py
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from hushfleet.aggregator.config.task import Task
from hushfleet.edge_client.board.config import DeviceConfig
from hushfleet.methods import METHODS
from hushfleet.methods.method import TrainingConfig
from hushfleet.refusals import accepted, bare
from hushfleet.schema import hints

PAGE = Path(__file__).with_name("settings.md")
HEAD = """# Settings

This page lists every key of a task file and of DEVICE.toml, and the settings of every method. It is made from the code
by `python docs/settings_page.py`. [Field reference](field-reference.md) and [your own network and data](own.md) explain
how keys work together. An unknown key, a wrong type, a value out of its range, or keys that contradict each other are
refused; the message names the line.
"""
_PARAM = re.compile(r"^\s*:param (\w+): (.*)$")
_KINDS = {"str": "text", "int": "integer", "float": "number", "bool": "true or false", "Path": "path", "date": "date"}


def page() -> str:
    """Returns the whole page."""
    parts = [HEAD, "## The task file\n", *_sections(Task)]
    parts += ["## Methods\n", "### All methods\n", _table(TrainingConfig, "method")]
    common = {field.name: field for field in dataclasses.fields(TrainingConfig)}
    for name, method in sorted(METHODS.items()):
        own = [each.name for each in dataclasses.fields(method.config) if not _is_same(each, common.get(each.name))]
        if own:
            parts += [f"### `{name}`\n", f"{method.summary}. {method.source}.\n", _table(method.config, "method", own)]
    return "\n".join([*parts, "## DEVICE.toml\n", *_sections(DeviceConfig)])


def _is_same(field: Any, other: Any) -> bool:
    return other is not None and (field.type, field.default) == (other.type, other.default)


def _sections(kind: type) -> Iterator[str]:
    """Yields a heading and a table for each section; the keys outside of sections come first."""
    sections = {name: bare(hint) for name, hint in hints(kind).items() if dataclasses.is_dataclass(bare(hint))}
    outside = [name for name in hints(kind) if name not in sections]
    if outside:
        yield _table(kind, "", outside)
    for name, section in sections.items():
        if name not in ("method", "scenario"):  # which has tables of its own; which is for simulations of failures
            intro = inspect.cleandoc(section.__doc__ or "").split("\n:param")[0].strip()
            yield f"### [{name}]\n\n{intro}\n"
            yield _table(section, name)


def _table(kind: type, section: str, names: list[str] | None = None) -> str:
    """Returns the table of some fields."""
    rows = ["| key | default | values | meaning |", "|---|---|---|---|"]
    meanings, fields = _meanings(kind), {field.name: field for field in dataclasses.fields(kind)}
    for name in names or fields:
        key, hint = f"{section}.{name}" if section else name, hints(kind)[name]
        cells = (f"`{key}`", _default(fields[name]), _values(hint, fields[name]), meanings[name])
        rows.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join([*rows, ""])


def _meanings(kind: type) -> dict[str, str]:
    """Returns the description of each field, from the docstrings of the class and of those that it derives from."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        name = ""
        for line in (base.__doc__ or "").splitlines():
            if param := _PARAM.match(line):
                name, found[param[1]] = param[1], param[2]
            elif name and line.startswith("        "):
                found[name] += f" {line.strip()}"
            else:
                name = ""
    return found


def _values(hint: Any, field: Any) -> str:
    """Returns what a key accepts, and its type where neither that nor the default shows it."""
    said = accepted(hint).removeprefix("in ").removeprefix("one of ")
    if get_origin(bare(hint)) is Literal or (not said and _default(field) not in ("", "required")):
        return said
    return said or _type(hint)


def _type(hint: Any) -> str:
    inner = bare(hint)
    if get_origin(inner) is tuple:
        return f"list of {_type(get_args(inner)[0]).replace('list of', 'lists of').removesuffix('s')}s"
    if get_origin(inner) is Literal:
        return "text"
    return _KINDS.get(inner.__name__, "table")


def _default(field: Any) -> str:
    if field.default is field.default_factory is dataclasses.MISSING:
        return "required"
    value = field.default if field.default is not dataclasses.MISSING else field.default_factory()
    if value in (None, "", ()):
        return ""
    texts = {True: "true", False: "false"} if isinstance(value, bool) else {math.inf: "inf"}
    return f"`{texts.get(value, repr(value)).replace(chr(39), chr(34))}`"


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
