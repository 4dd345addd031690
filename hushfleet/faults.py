"""Finds all mistakes in TOML that a person wrote, with their lines; imported at the first mistake."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hushfleet.errors import BadInput, Malformed
from hushfleet.field_types import hints
from hushfleet.refusals import bare, missing, unknown
from hushfleet.schema import from_plain


class Fault(str):
    """The text of a mistake.

    :param code: of the broken rule between settings; empty for a key, a type or a bound.
    """

    code: str

    def __new__(cls, text: str, code: str = "") -> Fault:
        """Makes the text, and adds the code."""
        fault = super().__new__(cls, text)
        fault.code = code
        return fault


_SECTION = re.compile(r"^\s*\[\[?\s*([\w.-]+)\s*\]")
_KEY = re.compile(r"^(\s*)([\w-]+)\s*=")
_NAMED = re.compile(r"^([\w.]+)(?:\[(\d+)\])?")
_UNKNOWN = re.compile(r"unknown field '([\w-]+)'")


def refusal(where: object, found: Sequence[Fault]) -> BadInput:
    """Returns the error for all mistakes in a file."""
    codes = filter(None, (fault.code for fault in found))
    return BadInput(f"{where}: {'; '.join(found)}", code=" ".join(codes))


def faults(kind: Any, plain: Any, where: str = "") -> list[Fault]:
    """Returns all mistakes that `from_plain` would refuse, each with the name of its field; empty if there are none.

    :param where: the prefix of the names of fields.
    """
    inner, found = bare(kind), list[Fault]()
    if not (isinstance(inner, type) and dataclasses.is_dataclass(inner) and isinstance(plain, dict)):
        return _refused(kind, plain, where)
    for field in dataclasses.fields(inner):
        name = f"{where}.{field.name}" if where else field.name
        if field.name in plain:
            found += faults(hints(inner)[field.name], plain[field.name], name)
        elif field.default is field.default_factory is dataclasses.MISSING:
            found.append(Fault(missing(field.name, where)))
    found += map(Fault, unknown(inner, plain, where))
    return found or _refused(kind, plain, where)


def _refused(kind: Any, plain: Any, where: str) -> list[Fault]:
    try:
        from_plain(kind, plain, where=where)
    except Malformed as error:
        own = "" if where else f"{getattr(kind, '__name__', kind)}"
        return [Fault(str(error).removeprefix(f"{own}: ").removeprefix(f"{own}."), error.code)]
    return []


def with_lines(path: Path, found: Sequence[Fault]) -> list[Fault]:
    """Returns the same faults in the order of the file, each with the line and the column of its key."""
    if path.suffix == ".json":
        return list(found)
    lines = path.read_text(encoding="utf-8-sig").splitlines()
    placed = [(_place(lines, fault), fault) for fault in found]
    end = (len(lines) + 1, 0)
    return [
        fault if place is None else Fault(f"line {place[0]}, column {place[1]}: {fault}", fault.code)
        for place, fault in sorted(placed, key=lambda each: each[0] or end)
    ]


def _place(lines: Sequence[str], fault: Fault) -> tuple[int, int] | None:
    """Returns the line and the column, from 1, of the key that a fault names, or of the heading of its section; None if
    the place is not known, for example in a table that is written in one line."""
    named, strange = _NAMED.match(fault), _UNKNOWN.search(fault)
    whole = [] if named is None or fault.startswith(("unknown ", "missing ")) else named[1].split(".")
    whole += [] if strange is None else [strange[1]]
    tables_before = 0 if named is None else int(named[2] or 0)
    section, above = list[str](), None
    for number, line in enumerate(lines, 1):
        if head := _SECTION.match(line):
            section, place = head[1].split("."), (number, line.index("[") + 1)
            if section == whole:
                if not tables_before:
                    return place
                tables_before -= 1
            elif section == whole[:-1]:
                above = above or place
        elif (key := _KEY.match(line)) and [*section, key[2]] == whole:
            return number, len(key[1]) + 1
    return above
