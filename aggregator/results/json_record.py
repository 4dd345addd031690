"""Defines the base class of the parts of `result.json`, and the types of numbers that JSON cannot write.

An epsilon is infinite if no noise was added, and JSON has no infinity: it is written as the string
`"inf"` and read back as the number.
"""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, ValidationError, model_validator


def _read(value: Any) -> Any:
    if isinstance(value, str) and value in ("inf", "-inf"):
        return float(value)
    if hasattr(value, "tolist"):  # a NumPy scalar
        value = value.tolist()
    if isinstance(value, float) and math.isnan(value):
        return None
    return value


def _write(value: float | None) -> float | str | None:
    if value is None or math.isfinite(value):
        return value
    return "inf" if value > 0 else "-inf"


_json = PlainSerializer(_write, when_used="json")
Number = Annotated[float, BeforeValidator(_read), _json]
"""A number that may be infinite."""
Measured = Annotated[float | None, BeforeValidator(_read), _json]
"""A number, or null if it was not measured or is NaN."""
Fraction = Annotated[Annotated[float, Field(ge=0, le=1)] | None, BeforeValidator(_read)]
"""An accuracy or a share in [0, 1], or null."""
Count = Annotated[int, BeforeValidator(_read), Field(ge=0)]
Seconds = Annotated[float, BeforeValidator(_read)]


class JsonRecord(BaseModel):
    """A part of the file; arrays are accepted as lists. Raises `ValidationError`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=True, populate_by_name=True)

    @model_validator(mode="before")
    @classmethod
    def _arrays_are_lists(cls, data: Any) -> Any:
        if isinstance(data, dict):
            return {name: v.tolist() if hasattr(v, "tolist") else v for name, v in data.items()}
        return data


def mistakes(error: ValidationError) -> list[str]:
    """Returns each mistake as "where: what"; the text of our own validators is kept without pydantic's prefix."""
    return [
        f"{'.'.join(map(str, each['loc'])) or 'the whole'}: {each.get('ctx', {}).get('error') or each['msg']}"
        for each in error.errors(include_url=False)
    ]
