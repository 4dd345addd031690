"""Defines the base class of the parts of `result.json`, and their types of numbers.

The types are checked where a file is read or written, not in a program that makes a part. An epsilon is infinite if no
noise was added, and JSON has no infinity: it is written as the text `"inf"` and read back as the number.
"""

from __future__ import annotations

from typing import Annotated, Any, Self

import msgspec
from msgspec import Meta

from hushfleet.plain_json import to_json
from hushfleet.schema import Count as Count

Measured = float | None
"""A number, which may be infinite; None if it was not measured."""
Fraction = Annotated[float, Meta(ge=0, le=1)] | None
"""An accuracy or a share in [0, 1]; None if it was not measured."""
Epsilon = Annotated[float, Meta(ge=0)]
"""May be infinite."""
Delta = Annotated[float, Meta(gt=0, lt=1)]


class JsonRecord(msgspec.Struct, frozen=True):
    """A part of the file."""

    @classmethod
    def of(cls, plain: Any) -> Self:
        """Checks a part, or the JSON of one, whose unknown keys are ignored. Arrays become lists, and NaN becomes None.

        Raises `msgspec.ValidationError`.
        """
        return msgspec.convert(to_json(plain), cls, strict=False)

    def but(self, **changes: Any) -> Self:
        """Returns a copy with other values of some fields."""
        return msgspec.structs.replace(self, **changes)
