"""Numbers as standard JSON has them: it knows no infinity, which an epsilon without noise is."""

from __future__ import annotations

import math
from typing import Any


def to_json(value: Any) -> Any:
    """Standard JSON for what Python, NumPy and pydantic have: infinities as `"inf"`, `"-inf"`; NaN as None."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if hasattr(value, "model_dump"):
        value = value.model_dump()
    if isinstance(value, dict):
        return {str(name): to_json(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else ("inf" if value > 0 else "-inf")
    return value


def from_json(value: Any) -> Any:
    """With infinities as numbers again; in it no text may be called `inf`."""
    if isinstance(value, dict):
        return {name: from_json(item) for name, item in value.items()}
    if isinstance(value, list):
        return [from_json(item) for item in value]
    return float(value) if value in ("inf", "-inf") else value
