"""Explains in words why a value does not fit its schema (`hushfleet.schema`); imported at the first refusal."""

from __future__ import annotations

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Annotated, Any, Literal, get_args, get_origin

from msgspec import Meta

from hushfleet.errors import format_value
from hushfleet.field_types import MAX_COUNT, hints


def halved(where: str, text: str) -> str:
    """Returns the error text for a text that has half of a character."""
    return f"{where} = {format_value(text)}: must have whole characters, and one is half of a pair (a lone surrogate)"


def missing(name: str, where: str = "") -> str:
    """Returns the error text for a required field that is missing."""
    return f"{where}{': ' if where else ''}missing field `{name}`"


def unknown(kind: type, plain: dict[Any, Any], where: str = "") -> Iterator[str]:
    """Yields an error text for each key that is no field of the dataclass: what is in its place, or a similar name."""
    names = [f.name for f in dataclasses.fields(kind)]
    for key in sorted(str(key) for key in plain if key not in names):
        begin = f"{where}{': ' if where else ''}"
        if key in (gone := getattr(kind, "gone", {})):
            yield f"{begin}the field {key!r} is gone: {gone[key]}"
            continue
        yield f"{begin}unknown field {format_value(key)}{meant(key, names)}; known are {', '.join(names)}"


def meant(key: str, names: Sequence[str]) -> str:
    """Returns the question whether the most similar of the names was meant; empty if none is similar."""
    close = difflib.get_close_matches(key, names, n=1) if len(key) <= _LONGEST_KEY else []
    return f" (did you mean {close[0]!r}?)" if close else ""


def explained(error: Exception, kind: Any, plain: Any, where: str, places: Sequence[str] = ()) -> str:
    """Returns msgspec's message with the name of the field, its value, and what it accepts, as far as known.

    :param places: the names of the fields that msgspec calls by number, if a tuple of fields was converted.
    """
    message, _, path = str(error).partition(" - at `")
    if message.startswith("Expected"):
        message = _KINDS.sub(_in_words, message.replace(" | null`", "`"))
    is_key = path.startswith("key` in ")
    steps = [number or name for name, number in _STEP.findall(path)]
    if places:
        steps[0] = places[int(steps[0])]
    value, known = plain, True
    for place, step in enumerate(steps):
        if get_origin(bare(kind)) in (typing.Union, types.UnionType):  # the intended type is not known
            steps = steps[:place]
            break
        kind = _inner(kind, step)
        try:
            keyed = isinstance(value, dict)
            value = value[int(step)] if step.isdigit() else value[step] if keyed else getattr(value, step)
        except (KeyError, AttributeError, TypeError, IndexError):
            known = False  # msgspec does not say which item of a table it was
    name = "".join(f"[{step}]" if step.isdigit() else f".{step}" for step in steps if step != "...")
    name = f"{where}{name}" if where else name.removeprefix(".")
    accepted = _accepted((get_args(bare(kind)) or [None])[0] if is_key else kind)
    if not message.startswith(("Expected", "Invalid", "Number")):  # from a `__post_init__`, or a field is missing
        message = message.replace("Object missing required", "missing")
        if "missing" in message and isinstance(value, dict):
            message = "; ".join([message, *islice(unknown(bare(kind), value), 1)])
        return _below(name, message, bare(kind))
    message = f"{message[0].lower()}{message[1:]}"
    if message == "number out of range" or (", got " not in message and _within(kind).startswith("in ")):
        accepted = accepted or _within(kind)  # msgspec names one bound, or none beyond 64 bits
    rule = f"must be {accepted}" if accepted else message
    if accepted and ", got " in message:
        rule += f" ({message})"
    return f"{name} = {format_value(value)}: {rule}" if known and not is_key else f"{name}: {rule}"


def _below(name: str, message: str, kind: Any) -> str:
    """Returns the message of the type at `name`; if it begins with a field of this type, so that the field has its
    whole name, as in the file."""
    word = re.match(r"\w*", message)
    names_field = dataclasses.is_dataclass(kind) and word is not None and word[0] in hints(kind)  # type: ignore[arg-type]
    return f"{name}{'.' if names_field else ': '}{message}" if name else message


def _in_words(kinds: re.Match[str]) -> str:
    return " or ".join(_WORDS.get(kind, kind) for kind in kinds[1].split(" | "))


_KINDS = re.compile(r"`([\w |]+)`")
_WORDS = {
    "object": "a table",
    "array": "a list",
    "str": "a text",
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "null": "nothing",
    "date": "a date",
    "datetime": "a date with a time",
    "time": "a time",
}
_LONGEST_KEY = 40  # no similar name is searched for longer keys: keys from the network may be very long
_STEP = re.compile(r"\.(\w+)|\[(\d+|\.\.\.)\]")


def bare(kind: Any) -> Any:
    """Returns a type without its constraints, and without its None."""
    if get_origin(kind) is Annotated:
        return bare(get_args(kind)[0])
    if _may_be_none(kind):
        return bare(get_args(kind)[0])
    return kind


def _inner(kind: Any, step: str) -> Any:
    """Returns the type that `step` leads to; None if it is not known."""
    kind = bare(kind)
    if dataclasses.is_dataclass(kind):
        return hints(kind).get(step)  # type: ignore[arg-type]
    if hasattr(kind, "_fields"):
        return [*hints(kind).values()][int(step)]
    arguments = get_args(kind)
    if not arguments:
        return None
    if step.isdigit():
        return arguments[0] if arguments[-1] is Ellipsis else arguments[int(step)]
    return arguments[-1]


def _within(kind: Any) -> str:
    """Describes the bounds of a number: an interval such as `in [0, 1)`, or one bound; empty if there are none."""
    inner = next((each for each in get_args(kind) if each is not type(None)), kind) if _may_be_none(kind) else kind
    metas = [meta for meta in getattr(inner, "__metadata__", ()) if isinstance(meta, Meta)]
    ends = {name: end for meta in metas for name in _SIGNS if (end := getattr(meta, name)) not in (None, MAX_COUNT)}
    # Bounds that are equal may be integers or not: Python caches equal types.
    shown = {name: f"{end:.0f}" if end == end // 1 and abs(end) < 1e15 else f"{end:g}" for name, end in ends.items()}
    if len(shown) < 2:
        return "".join(f"{_SIGNS[name]} {end}" for name, end in shown.items())
    (below, low), (above, high) = shown.items()
    return f"in {'[' if below == 'ge' else '('}{low}, {high}{']' if above == 'le' else ')'}"


_SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


def accepted(kind: Any) -> str:
    """Describes in words what a setting accepts, with its bounds; empty if every value of its type is."""
    return _accepted(kind) or _within(kind)


def _may_be_none(kind: Any) -> bool:
    return type(None) in get_args(kind)


def _accepted(kind: Any) -> str:
    """Describes in words what a type accepts; empty if only msgspec's own message is available."""
    metadata = getattr(kind, "__metadata__", ())
    said = [meta.description for meta in metadata if isinstance(meta, Meta) and meta.description]
    for argument in get_args(kind) if _may_be_none(kind) else ():
        said.append(_accepted(argument))
    if get_origin(bare(kind)) is Literal:
        said.append(f"one of {', '.join(map(repr, get_args(bare(kind))))}")
    return next(filter(None, said), "")
