"""Reads protobuf's wire format strictly, for unchecked messages.

Protobuf is lenient: unknown fields are skipped, repeated singular fields are merged, and two parsers may
interpret the same bytes in two ways. This reader accepts only fields that a schema names, each singular field
once, so every other parser sees exactly the content that was checked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from hushfleet.errors import Malformed

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5


class Field(NamedTuple):
    """One field of a message.

    :param kind: `int`, `float` (32 bits), `double`, `bytes`, `string` (UTF-8) or `message` (left unread).
    :param repeated: numbers may be packed or not; protobuf requires every parser to accept both.
    """

    name: str
    kind: str
    repeated: bool = False


Schema = Mapping[int, Field]


def fields(text: str) -> Schema:
    """Parses fields written as `number name kind`, or `kind*` for a repeated field, separated by commas."""
    entries = [entry.split() for entry in text.split(",")]
    return {int(number): Field(name, kind.rstrip("*"), kind[-1] == "*") for number, name, kind in entries}


_NUMBER_WIRE_TYPES = {"int": VARINT, "float": FIXED32, "double": FIXED64}


def read_message(data: memoryview, schema: Schema, *, message: str, max_values: int) -> dict[str, list[Any]]:
    """Returns all fields of one message by name, each a list of its values.

    Integers are returned as signed 64 bits, strings as `str`, bytes and messages as views into `data`, floating-point
    numbers as NaN, because only their count is needed.

    :param max_values: cap on the values of the whole message.
    :raises Malformed: the bytes are incomplete, break the wire format, or hold a field that `schema` does not allow.
    """
    values: dict[str, list[Any]] = {}
    position, seen = 0, 0
    while position < len(data):
        key, position = _varint(data, position, message)
        number, wire_type = key >> 3, key & 7
        field = schema.get(number)
        if field is None:
            raise Malformed(f"{message} has the field {number}, which is not allowed")
        found = values.setdefault(field.name, [])
        if found and not field.repeated:
            raise Malformed(f"{message} has the field {field.name!r} twice")
        expected = _NUMBER_WIRE_TYPES.get(field.kind, BYTES)
        if wire_type == expected:
            value, position = _single(data, position, field, message)
            found.append(value)
            seen += 1
        elif wire_type == BYTES and field.repeated:
            chunk, position = _length_delimited(data, position, message)
            packed = _packed(chunk, field, message, max_values)
            found.extend(packed)
            seen += len(packed)
        else:
            raise Malformed(f"{message}.{field.name} has the wire type {wire_type}, not {expected}")
        if seen > max_values:
            raise Malformed(f"{message} has more than {max_values} values")
    return values


def _single(data: memoryview, position: int, field: Field, message: str) -> tuple[object, int]:
    if field.kind == "int":
        value, position = _varint(data, position, message)
        return _signed(value), position
    if field.kind in ("float", "double"):
        stop = position + (4 if field.kind == "float" else 8)
        if stop > len(data):
            raise Malformed(f"{message} ends inside the number {field.name!r}")
        return math.nan, stop  # no rule depends on the value of a floating-point number
    chunk, position = _length_delimited(data, position, message)
    if field.kind != "string":
        return chunk, position
    try:
        return str(chunk, "utf-8"), position
    except UnicodeDecodeError as error:
        raise Malformed(f"{message}.{field.name} is not UTF-8: {error}") from error


def _packed(chunk: memoryview, field: Field, message: str, max_values: int) -> list[Any]:
    if field.kind == "int":
        numbers: list[int] = []
        position = 0
        while position < len(chunk):
            value, position = _varint(chunk, position, message)
            numbers.append(_signed(value))
            if len(numbers) > max_values:
                raise Malformed(f"{message}.{field.name} has more than {max_values} values")
        return numbers
    width = 4 if field.kind == "float" else 8
    if len(chunk) % width:
        raise Malformed(f"{message}.{field.name} has {len(chunk)} bytes, not a multiple of {width}")
    if len(chunk) // width > max_values:
        raise Malformed(f"{message}.{field.name} has more than {max_values} values")
    return [math.nan] * (len(chunk) // width)


def _length_delimited(data: memoryview, position: int, message: str) -> tuple[memoryview, int]:
    length, position = _varint(data, position, message)
    if length > len(data) - position:
        raise Malformed(f"{message} ends inside a field of {length} bytes")
    return data[position : position + length], position + length


def _varint(data: memoryview, position: int, message: str) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if position >= len(data):
            raise Malformed(f"{message} ends inside a number")
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            if value >= 1 << 64:
                break
            return value, position
    raise Malformed(f"{message} has a number of more than 64 bits")


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
