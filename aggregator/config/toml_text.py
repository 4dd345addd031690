"""Plain values as TOML, which Python reads and does not write."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def to_toml(values: Mapping[str, Any], *, prefix: str = "") -> str:
    """Scalars and lists first, then tables, as deep as they go; None is left out."""
    lines = [f"{key} = {toml_value(value)}" for key, value in values.items() if not isinstance(value, Mapping | None)]
    tables = [(f"{prefix}{key}", value) for key, value in values.items() if isinstance(value, Mapping)]
    text = "".join(f"{line}\n" for line in lines)
    for name, table in tables:
        text += f"\n[{name}]\n{to_toml(table, prefix=f'{name}.')}"
    return text.lstrip("\n") if not prefix else text


def toml_value(value: Any) -> str:
    """On one line. Raises `TypeError` for None, which TOML has not."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else str(value)
    if isinstance(value, int):
        return str(value)
    if isinstance(value, str | Path):
        return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(name)} = {toml_value(each)}" for name, each in value.items()) + "}"
    return "[" + ", ".join(toml_value(each) for each in value) + "]"
