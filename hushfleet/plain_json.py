"""Converts numbers to standard JSON, which has no infinity; epsilon is infinite without noise."""

from __future__ import annotations

import math
from typing import Any

import msgspec

_UNCHANGED = frozenset({str, int, bool, type(None)})


def to_json(value: Any) -> Any:
    """Converts values of Python, NumPy and msgspec to standard JSON: infinities to `"inf"`, `"-inf"`; NaN to None.

    >>> to_json({"epsilon": math.inf, "loss": math.nan})
    {'epsilon': 'inf', 'loss': None}
    """
    kind = type(value)
    if kind in _UNCHANGED or (kind is float and math.isfinite(value)):
        return value
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, msgspec.Struct):
        value = msgspec.structs.asdict(value)
    if isinstance(value, dict):
        return {str(name): to_json(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return list(value) if _UNCHANGED.issuperset(map(type, value)) else [to_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else ("inf" if value > 0 else "-inf")
    return value


def from_json(value: Any) -> Any:
    """Turns infinities into numbers again; so no ordinary text in the value may be `inf` or `-inf`.

    >>> from_json({"epsilon": "inf"})
    {'epsilon': inf}
    """
    if isinstance(value, dict):
        return {name: from_json(item) for name, item in value.items()}
    if isinstance(value, list):
        return [from_json(item) for item in value]
    return float(value) if isinstance(value, str) and value in ("inf", "-inf") else value
