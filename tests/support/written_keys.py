"""Every key of a file that a person writes, found in its dataclasses, and values that no such key expects."""

from __future__ import annotations

import copy
import datetime
import math
import os
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from types import MappingProxyType
from typing import Annotated, Any, Literal, get_args, get_origin

from hypothesis import strategies as st
from msgspec import Meta

from hushfleet.field_types import hints

EXTREMES: tuple[Any, ...] = (
    *(0, 1, 2, -1, 7, 255, 4096, 4097, 65_536, 65_537, 100_001, 1_000_001, 10**9, 2**31, 2**32, 2**53),
    *(2**63 - 1, 2**63, 2**64, -(2**63), -(2**63) - 1, 10**30, 10**400),
    *(0.0, -0.0, 0.5, 1.0, 1e-9, 1e-30, 1e-310, 5e-324, 1 - 1e-16, 1 + 1e-9, 1e4, 1e17, 1e38, 1.7e308, -1.7e308),
    *(math.nan, math.inf, -math.inf, True, False),
    *("", " ", "a", "x" * 100_000, "é", "e\u0301", "\U0001f994", "\x00", "\x1b[31m", "a\nb", "[bold]x[/]", "{0}", "%s"),
    *("nan", "true", "all", "0", "1e999d", "9" * 400 + "d", "30d", "0.0000001s", "24h", "~", "~nobody", "/", ".", ".."),
    *("/dev/null", "a:b", ":", "x.py:Net", "x.onnx", "torchvision:", "timm:none", "linear", "arrays", "secure"),
    *(datetime.date.min, datetime.date.max, datetime.datetime(2027, 1, 1, 1, 1), datetime.time(1, 2)),
    *([], [0], [1, 1, 5], [0, 0, 0], [-1, 1, 1], [4096] * 3, [4097, 1, 1], [1, 1, 2**63], [1] * 10_000, [[]], [[[1]]]),
    *(["a"], ["a", "b"], ["a", "a"], [""], [f"c{n}" for n in range(70_000)], ["x" * 200_000, "y"], [1, "a"], [True]),
    *([math.nan], [math.inf], [0.0], [0.5], [1e300], [1e-300], [1e30], [1.0, 1.0]),
    *({}, {"a": 1}, {"name": "x"}, {"a": {"b": {}}}, {"": 1}, {"x" * 10_000: 1}),
)
"""Values of every type, at and beyond what any key takes."""
ACCEPTS = re.compile(
    "must|expected|save|come|need|take|give|leave|known are|write|set |has no|at most|only|there are|cannot|below|"
    "boards are|use |has samples|did you mean"
)
"""Words that tell what would be right."""


@dataclass(frozen=True)
class Key:
    """A key of a file.

    :param path: names of tables, and the key; 0 for the first of repeated tables.
    :param kind: its type.
    :param rules: the `Meta` of its type, and the intervals of a method's setting.
    """

    path: tuple[str | int, ...]
    kind: Any
    rules: tuple[Any, ...] = ()

    @property
    def name(self) -> str:
        """The key as errors write it, such as `scenario.late[0].at_s`."""
        return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in self.path).removeprefix(".")

    @property
    def values(self) -> list[Any]:
        """The values to try: the extremes, and those at each bound of this key and just beyond it."""
        return [*EXTREMES, *_bounds(self)]


def keys_of(kind: type, path: tuple[str | int, ...] = ()) -> Iterator[Key]:
    """Yields all keys of a file with this content, in sections, tables and repeated tables."""
    for field in fields(kind):
        for inner, rules in _alternatives(hints(kind)[field.name]):
            below = (*path, field.name)
            repeated = get_args(inner)[0] if get_origin(inner) is tuple else None
            if is_dataclass(inner):
                yield from keys_of(typing.cast(type, inner), below)
            elif is_dataclass(repeated):
                yield from keys_of(typing.cast(type, repeated), (*below, 0))
            elif inner is not types.NoneType:
                yield Key(below, inner, (*rules, *field.metadata.values()))


def _alternatives(kind: Any) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Yields the types of a union, each with its constraints."""
    if get_origin(kind) is Annotated:
        inner, *rules = get_args(kind)
        yield from ((each, (*found, *rules)) for each, found in _alternatives(inner))
    elif get_origin(kind) in (typing.Union, types.UnionType):
        for each in get_args(kind):
            yield from _alternatives(each)
    else:
        yield kind, ()


def _bounds(key: Key) -> list[Any]:
    found: list[Any] = [*get_args(key.kind)] if get_origin(key.kind) is Literal else []
    ends = [end for rule in key.rules if isinstance(rule, Meta) for end in (rule.ge, rule.gt, rule.le, rule.lt)]
    ends += [float(end) for rule in key.rules if isinstance(rule, str) for end in rule[1:-1].split(",")]
    for end in ends:
        if end is not None and math.isfinite(end):
            whole = [int(end) - 1, int(end), int(end) + 1]
            found += whole if key.kind is int else [math.nextafter(end, -math.inf), end, math.nextafter(end, math.inf)]
    return found


def changes(keys: list[Key], most: int = 2) -> st.SearchStrategy[list[tuple[Key, Any]]]:
    """Draws one or more keys, each with a value to try."""
    random = st.integers() | st.floats() | st.text(max_size=8) | st.lists(st.floats(), max_size=4)
    one = st.sampled_from(keys).flatmap(
        lambda key: st.tuples(st.just(key), st.sampled_from(key.values) | st.sampled_from(_bounds(key) or [0]) | random)
    )
    return st.lists(one, min_size=1, max_size=most, unique_by=lambda each: each[0].name)


def changed(
    plain: dict[str, Any], drawn: list[tuple[Key, Any]], tables: Mapping[str, dict[str, Any]] = MappingProxyType({})
) -> dict[str, Any]:
    """Returns a copy of a file's content with these keys set.

    :param tables: the other keys of a section that the file does not have yet.
    """
    found = copy.deepcopy(plain)
    for key, value in drawn:
        found.setdefault(str(key.path[0]), copy.deepcopy(tables.get(str(key.path[0]), {})))
        table: Any = found
        for step in key.path[:-1]:
            table = table[step] if isinstance(step, int) else table.setdefault(step, {})
        table[key.path[-1]] = copy.deepcopy(value)
    return found


def check_text(said: str, drawn: list[tuple[Key, Any]], keys: Sequence[Key], *files: str) -> None:
    """Asserts that an error names one of the keys, or the section that a task cannot have, with its value or the other
    key that it does not go with, and what would be right, in few words.

    :param keys: all keys of the file.
    :param files: files that the keys name, and what else names a key; an error about a file's content names the file.
    """
    assert len(said) < 1500, said
    assert not re.search(r"`(int|str|float|array|object|bool|bytes|date|null)\b", said), f"a word of msgspec's: {said}"
    assert ACCEPTS.search(said), said
    named = [(key, value) for key, value in drawn if _is_named(key, said)]
    files += tuple(
        os.path.expanduser(value) for _, value in drawn if isinstance(value, str) and value[:1] in ("~", "/")
    )
    assert named or any(file in said for file in files), f"names none of {[key.name for key, _ in drawn]}: {said}"
    if named and not any(_is_shown(value, said) for _, value in named) and not any(map(said.count, files)):
        names = {key.name for key, _ in drawn}
        assert any(_is_named(key, said) for key in keys if key.name not in names), said


def _is_named(key: Key, said: str) -> bool:
    section, word = Key(key.path[:-1], None).name, str(key.path[-1])
    both = section in said and re.search(rf"\b{word}\b", said)
    whole = f"{section}: " in said or (section in ("evaluation", "statistic") and section in said)
    return key.name in said or bool(both) or whole


def _is_shown(value: Any, said: str) -> bool:
    shown = [repr(value), str(value), str(len(value)) if isinstance(value, list) else ""]
    shown += [f"{value:g}"] if isinstance(value, int | float) and abs(value) < 1e300 else []
    shown += [repr(value[0])] if isinstance(value, list) and value else []
    shown += list(value) if isinstance(value, dict) else []
    return any(each[:40] in said for each in shown if each) or "unknown field" in said
