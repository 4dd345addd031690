"""Finds installed packages that are older than Hushfleet needs: the cause of many an error that nobody expected."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, requires, version

_AT_LEAST = re.compile(r"([\w.-]+)>=([\d.]+)(?:.* extra == ['\"]([\w-]+)['\"])?")
_EXTRAS = (None, "edge", "server", "server-without-amqtt")  # those of the commands; others are for one option each


def too_old() -> str:
    """Returns a sentence on the packages that are too old, with what to type; empty if none is."""
    old = []
    for name, least, extra in (match.groups() for match in map(_AT_LEAST.match, _required()) if match):
        found = _installed(name) if extra in _EXTRAS else None
        if found is not None and _numbers(found) < _numbers(least):
            old.append((name, found, least))
    if not old:
        return ""
    there = ", ".join(f"{name} {found} is installed and {least} or newer is needed" for name, found, least in old)
    typed = " ".join(f"'{name}>={least}'" for name, _, least in old)
    return f"{there}; type: pip install {typed}"


def _required() -> list[str]:
    try:
        return requires("hushfleet") or []
    except PackageNotFoundError:  # a board's release, which has its packages with it
        return []


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _numbers(text: str) -> tuple[int, ...]:
    """Returns a version as numbers, without zeros at its end and without its local part, such as `+cpu`."""
    numbers = [int(number) for number in re.findall(r"\d+", text.partition("+")[0])]
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)
