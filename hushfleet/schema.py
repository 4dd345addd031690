"""Converts unchecked data to typed values: TOML that people write, msgpack from the network.

A frozen dataclass that derives from `Checked` is a schema. Its types and `msgspec.Meta` constraints define the valid
values of a field. Its `__post_init__` defines the valid combinations of fields. The same rules apply when our own code
makes a value. Only two conversions happen: integer to float, and list to tuple. Boards import this.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import sys
import threading
from collections.abc import Mapping
from datetime import date
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from hushfleet.at_need import at_need
from hushfleet.errors import BadInput, Malformed, format_value
from hushfleet.field_types import MAX_COUNT, hints
from hushfleet.rules import NO_RULES, check_rules

if sys.version_info >= (3, 11):
    import tomllib
else:  # the same parser, for boards
    import tomli as tomllib

if TYPE_CHECKING:
    from hushfleet import refusals
else:
    refusals = at_need("hushfleet.refusals")

T = TypeVar("T")

_MAX = sys.float_info.max
Finite = Annotated[float, Meta(ge=-_MAX, le=_MAX, description="a finite number")]
NotNegative = Annotated[float, Meta(ge=0, le=_MAX, description="finite and not negative")]
Positive = Annotated[float, Meta(gt=0, le=_MAX, description="positive and finite")]
PositiveOrInf = Annotated[float, Meta(gt=0, description="positive")]
Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
AtLeast1 = Annotated[int, Meta(ge=1)]
Port = Annotated[int, Meta(ge=1, le=65535, description="a port, 1 to 65535")]
Share = Annotated[float, Meta(gt=0, le=1)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
Probability = Annotated[float, Meta(gt=0, lt=1, description="between 0 and 1")]


NOTHING_GONE: Mapping[str, str] = {}


def require(condition: bool, name: str, value: object, accepted: str) -> None:
    """Raises ValueError unless the condition is true; all configuration errors have the form of its text."""
    if not condition:
        raise ValueError(f"{name} = {format_value(value)}: must be {accepted}")


class Checked:
    """Base of frozen dataclasses that check the types and constraints of their fields at construction.

    :cvar rules: between the fields.
    :cvar gone: what to use in place of a field of earlier versions, by its name.
    """

    rules = NO_RULES
    gone = NOTHING_GONE

    def __post_init__(self) -> None:
        kind: type = type(self)
        names, row = _fields(kind)
        given = tuple([getattr(self, name) for name in names])
        try:
            values = msgspec.structs.astuple(msgspec.convert(given, row, dec_hook=_decoded))
        except msgspec.ValidationError as error:
            raise ValueError(refusals.explained(error, kind, self, "", names)) from error
        for name, before, value in zip(names, given, values, strict=True):
            if value is not before:
                object.__setattr__(self, name, value)
        check_rules(self, self.rules)


def later(default: Any) -> Any:
    """Returns a field that was added after its format was fixed.

    It is left out if it has its default value, so that the bytes of other messages do not change. A receiver that does
    not know the field refuses a message that contains it, and reads all others.
    """
    if isinstance(default, dict):
        return dataclasses.field(default_factory=default.copy, metadata={"default": default})
    return dataclasses.field(default=default, metadata={"default": default})


_SCALARS = frozenset({bool, int, float, str, bytes, type(None)})


def to_plain(value: Any) -> Any:
    """Converts a dataclass (which may be nested) to dicts, lists and scalars, ready for msgpack or JSON."""
    kind: type = type(value)
    if kind in _SCALARS:
        return value
    if hasattr(value, "to_wire"):
        return value.to_wire()
    if dataclasses.is_dataclass(value):
        plain = {}
        for name, default in _written(kind):
            item = getattr(value, name)
            if default is dataclasses.MISSING or default != item:
                plain[name] = item if type(item) in _SCALARS else to_plain(item)
        return plain
    if kind is tuple and value and dataclasses.is_dataclass(value[0]):
        return [to_plain(item) for item in value]
    return str(value) if isinstance(value, Path | date) else value


@cache
def _written(kind: type) -> tuple[tuple[str, Any], ...]:
    """Returns the fields of a dataclass, each with the value with which it is left out."""
    return tuple((field.name, field.metadata.get("default", dataclasses.MISSING)) for field in dataclasses.fields(kind))


def from_plain(kind: type[T], plain: object, *, where: str = "") -> T:
    """Inverts `to_plain`, also for TOML. Raises `Malformed` that names the field, the value and the rule."""
    where = where or kind.__name__
    _decoder(kind)
    try:
        value = msgspec.convert(plain, kind, dec_hook=_decoded)
    except (msgspec.ValidationError, RecursionError) as error:
        raise Malformed(refusals.explained(error, kind, plain, where), code=_code_of(error)) from error
    except UnicodeEncodeError as error:
        raise Malformed(refusals.halved(where, error.object)) from error
    _check_known(value, plain, where)
    return value


def pack(value: Any) -> bytes:
    """Encodes a dataclass as msgpack."""
    return msgspec.msgpack.encode(to_plain(value))


def unpack(kind: type[T], data: bytes | memoryview, *, what: str) -> T:
    """Decodes a value of type `kind` from `data`, which must have exactly the form that `pack` gives.

    The value is packed again and must give the same bytes. So repeated keys, padded integers and fields in another
    order are refused without a rule for each.

    :param what: its name in error texts, such as "the update's header".

    Raises `Malformed`, and nothing else.
    """
    try:
        value = _decoder(kind).decode(data)
    except msgspec.ValidationError as error:
        raise Malformed(refusals.explained(error, kind, _unchecked(data), kind.__name__)) from error
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise Malformed(f"{what} is not msgpack: {error}") from error
    if pack(value) != data:
        _check_known(value, _unchecked(data), kind.__name__)
        raise Malformed(f"{what} is not written in the canonical form")
    return value


def parse_toml(text: str) -> dict[str, Any]:
    r"""Parses TOML. Raises `ValueError` if the text is not valid.

    >>> parse_toml("[limits]\nepsilon_server = 8.0")
    {'limits': {'epsilon_server': 8.0}}
    """
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("it has too many brackets within brackets") from None


def read_file(path: Path) -> Any:
    """Returns the content of a TOML file, or of a JSON file if its name ends in `.json`. Raises `BadInput`."""
    is_json = path.suffix == ".json"
    text = ""
    try:
        text = path.read_text(encoding="utf-8-sig")  # editors on Windows may write a byte-order mark
        return json.loads(text) if is_json else parse_toml(text)
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # bad syntax, not UTF-8, or an integer of thousands of digits
        hint = "" if is_json else _of_backslashes(error, text)
        raise BadInput(f"{path} is not valid {'JSON' if is_json else 'TOML'}: {error}{hint}") from error


def _of_backslashes(error: Exception, text: str) -> str:
    """Returns a hint about Windows paths if the unreadable line has a backslash, else an empty text."""
    line = re.search(r"\(at line (\d+)", str(error))
    if "\\" not in text.split("\n")[int(line[1]) - 1 if line else -1]:
        return ""
    return "; between double quotes \\ begins an escape: write a Windows path between single quotes, or with /"


def _code_of(error: BaseException) -> str:
    """Returns the code of the broken rule; empty if the error is of another kind."""
    return getattr(error.__cause__, "code", "")


@cache
def _fields(kind: type) -> tuple[list[str], type[msgspec.Struct]]:
    """Returns the names of a dataclass's fields, and a type that reads their values from a tuple.

    The type is a Struct, because msgspec reads the types of a `tuple[...]` again at each call: that takes ten times as
    long, and drops a KeyboardInterrupt that arrives meanwhile.
    """
    kinds = hints(kind)
    names = [f.name for f in dataclasses.fields(kind)]
    row = msgspec.defstruct(kind.__name__, [(name, kinds[name]) for name in names], array_like=True)
    _decoder(row)
    return names, row


_first_look = threading.RLock()
_decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {}


def _decoder(kind: type[T]) -> msgspec.msgpack.Decoder[T]:
    """Returns the decoder of a type; it must be made before any thread converts to that type.

    msgspec caches information about a class at the first use. If a second thread uses the class meanwhile, it reads a
    half-filled cache: a segmentation fault.
    """
    if kind not in _decoders:
        with _first_look:
            _decoders[kind] = msgspec.msgpack.Decoder(kind, dec_hook=_decoded)
    return _decoders[kind]


def _decoded(kind: Any, value: Any) -> Any:
    """Decodes the types that msgspec does not know."""
    if isinstance(value, kind):
        return value
    if kind is Path and isinstance(value, str):
        return Path(value)
    if hasattr(kind, "from_wire"):
        return kind.from_wire(value)
    raise ValueError(f"expected a {kind.__name__}, got {format_value(value)}")


def _unchecked(data: bytes | memoryview) -> Any:
    """Decodes msgpack without a schema, for an error's text; None if it cannot be read."""
    try:
        return msgspec.msgpack.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


def _check_known(value: Any, plain: Any, where: str) -> None:
    """Raises `Malformed` for errors that msgspec does not find: unknown keys, NaN, and halves of characters.

    :param value: the result of converting `plain`.
    """
    if isinstance(plain, float) and math.isnan(plain):
        raise Malformed(f"{where}: expected a number, got nan")
    if isinstance(plain, str) and _HALF.search(plain):
        raise Malformed(refusals.halved(where, plain))
    if dataclasses.is_dataclass(value) and isinstance(plain, dict):
        if not plain.keys() <= {field.name for field in dataclasses.fields(value)}:
            raise Malformed(next(refusals.unknown(type(value), plain, where)))
        for name, item in plain.items():
            _check_known(getattr(value, name), item, f"{where}.{name}")
    elif isinstance(value, tuple) and isinstance(plain, (list, tuple)):
        for place, (one, item) in enumerate(zip(value, plain, strict=True)):
            _check_known(one, item, f"{where}[{place}]")


_HALF = re.compile("[\ud800-\udfff]")
"""A half of a character (a surrogate): JSON and names of files may have one, and no text in UTF-8 can."""
