"""Typed values from untrusted plain data: what msgpack or TOML gave, checked field by field.

A frozen dataclass says what is accepted: its type hints are the types, its `__post_init__` the ranges
(raising `ValueError`). A `NamedTuple` in it travels as a list. Nothing is converted except an integer where a
float is expected; unknown and missing fields are refused. No third-party validation library, because boards
import this.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from hushfleet.errors import Malformed
from hushfleet.model.params import ParamLayout

T = TypeVar("T")
_SCALARS = (int, str, bytes, bool)


def later(default: Any) -> Any:
    """A field that came after its format was fixed: left out where it has its default, so that the bytes stay.

    Whoever does not know the field refuses a message that needs it, and reads all others.
    """
    if isinstance(default, dict):
        return dataclasses.field(default_factory=lambda: dict(default), metadata={"default": default})
    return dataclasses.field(default=default, metadata={"default": default})


def to_plain(value: Any) -> Any:
    """A dataclass (nested as may be) as dicts, lists and scalars, ready for msgpack."""
    if type(value) in _SCALARS:  # first, since a round plan has thousands
        return value
    if isinstance(value, ParamLayout):
        return value.to_wire()
    if dataclasses.is_dataclass(value):
        plain = {}
        for f in dataclasses.fields(value):
            item = getattr(value, f.name)
            if "default" not in f.metadata or item != f.metadata["default"]:
                plain[f.name] = to_plain(item)
        return plain
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: to_plain(item) for key, item in value.items()}
    return value


def from_plain(cls: type[T], plain: object, *, where: str = "") -> T:
    """The inverse of `to_plain`. Raises `Malformed` that names the field and the value."""
    where = where or cls.__name__
    if not isinstance(plain, dict):
        raise Malformed(f"{where}: expected fields, got {_shown(plain)}")
    hints = _hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    unknown = sorted(str(key) for key in plain if key not in fields)
    if unknown:
        raise Malformed(f"{where}: unknown field {unknown[0]!r}; known are {', '.join(fields)}")
    values = {}
    for name, field in fields.items():
        if name in plain:
            values[name] = _checked(hints[name], plain[name], f"{where}.{name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise Malformed(f"{where}: the field {name!r} is missing")
    try:
        return cls(**values)
    except ValueError as error:
        raise Malformed(f"{where}: {error}") from error


@cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _checked(hint: Any, value: Any, where: str) -> Any:
    if hint in _SCALARS:  # first, since a round plan has thousands
        if type(value) is not hint:
            raise Malformed(f"{where}: expected {hint.__name__}, got {_shown(value)}")
        return value
    if hint is Any:
        return value
    if hint is ParamLayout:
        return ParamLayout.from_wire(value)
    if dataclasses.is_dataclass(hint):
        return from_plain(hint, value, where=where)
    if isinstance(hint, type) and issubclass(hint, tuple) and hasattr(hint, "_fields"):
        return hint(*_checked_tuple(tuple(_hints(hint).values()), value, where))
    if hint is float:
        try:
            number = float(value) if type(value) in (int, float) else math.nan
        except OverflowError:  # an integer of hundreds of digits
            number = math.nan
        if math.isnan(number):
            raise Malformed(f"{where}: expected a number, got {_shown(value)}")
        return number
    origin = get_origin(hint)
    if origin is Literal:
        if value not in get_args(hint):
            raise Malformed(f"{where}: expected one of {get_args(hint)}, got {_shown(value)}")
        return value
    if origin in (Union, types.UnionType):
        if value is None and type(None) in get_args(hint):
            return None
        (inner,) = [arg for arg in get_args(hint) if arg is not type(None)]
        return _checked(inner, value, where)
    if origin is tuple:
        return _checked_tuple(get_args(hint), value, where)
    if origin is dict:
        key_hint, item_hint = get_args(hint)
        if not isinstance(value, dict):
            raise Malformed(f"{where}: expected a table, got {_shown(value)}")
        return {
            _checked(key_hint, key, where): _checked(item_hint, item, f"{where}.{key}")
            for key, item in value.items()
        }
    raise TypeError(f"{where}: no check is written for the type {hint}")


def _checked_tuple(args: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, (list, tuple)):
        raise Malformed(f"{where}: expected a list, got {_shown(value)}")
    if len(args) == 2 and args[1] is Ellipsis:
        args = (args[0],) * len(value)
    if len(args) != len(value):
        raise Malformed(f"{where}: expected {len(args)} items, got {len(value)}")
    return tuple(
        _checked(arg, item, f"{where}[{i}]") for i, (arg, item) in enumerate(zip(args, value, strict=True))
    )


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
