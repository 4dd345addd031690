"""Reads the annotated types of dataclasses' fields, for `hushfleet.schema` and for its words of refusal."""

from __future__ import annotations

import typing
from functools import cache
from typing import Any

MAX_COUNT = (1 << 63) - 1
"""The highest count: the range that msgpack implementations share."""


@cache
def hints(kind: type) -> dict[str, Any]:
    """Returns the types of a dataclass's fields, with their constraints."""
    return typing.get_type_hints(kind, include_extras=True)
