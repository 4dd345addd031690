"""Writes plain values as TOML, because Python's library only reads TOML."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hushfleet.errors import BadInput
from hushfleet.schema import parse_toml


def to_toml(values: Mapping[str, Any]) -> str:
    """Writes scalars and lists first, then tables of any depth; None is left out.

    The text is parsed again: raises `BadInput` if that gives other values.

    >>> to_toml({"epsilon": 2.0})
    'epsilon = 2.0\\n'
    """
    text = _tables(values, prefix="").lstrip("\n")
    try:
        same = parse_toml(text) == without_none(values)
    except ValueError:
        same = False
    if not same:
        raise BadInput("a value has a type or a character that TOML cannot hold; nothing was written")
    return text


def dotted(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns the values of all tables by whole key, such as `round.rounds`; None is left out."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= dotted(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return {key: value for key, value in found.items() if value is not None}


def _tables(values: Mapping[str, Any], *, prefix: str) -> str:
    plain = {key: value for key, value in values.items() if not isinstance(value, Mapping | None)}
    text = "".join(f"{_key(key)} = {toml_value(value)}\n" for key, value in plain.items())
    for key, value in values.items():
        if isinstance(value, Mapping):
            name = f"{prefix}{_key(key)}"
            text += f"\n[{name}]\n{_tables(value, prefix=f'{name}.')}"
    return text


def without_none(value: Any) -> Any:
    """Returns the value that a TOML reader returns for this one: no keys with None, and paths as texts.

    >>> without_none({"a": None, "b": [1]})
    {'b': [1]}
    """
    if isinstance(value, Mapping):
        return {key: without_none(each) for key, each in value.items() if each is not None}
    if isinstance(value, list | tuple):
        return [without_none(each) for each in value]
    return str(value) if isinstance(value, Path) else value


def _key(name: str) -> str:
    return name if re.fullmatch("[A-Za-z0-9_-]+", name) else _text(name)


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def toml_value(value: Any) -> str:
    """Writes one value on one line. Raises `TypeError` for None, which TOML does not have.

    >>> toml_value(["a", 2.0, True])
    '["a", 2.0, true]'
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else str(value)
    if isinstance(value, int):
        return str(value)
    if isinstance(value, str | Path):
        return _text(str(value))
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_text(name)} = {toml_value(each)}" for name, each in value.items()) + "}"
    return "[" + ", ".join(toml_value(each) for each in value) + "]"
