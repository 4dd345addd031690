"""Board profiles: TOML files beside this one, read into frozen dataclasses.

A profile that quietly mixes data-sheet figures with guesses would make every emulation look more certain
than it is, so each number is a `Quantity`: with a public source, or marked as an estimate.
"""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from importlib import resources
from typing import Any

from hushfleet.errors import BadInput


@dataclass(frozen=True)
class Quantity:
    """A number and how far it can be trusted.

    :param value: in the unit that the field's name ends in.
    :param source: the public document that it was taken from, or None.
    :param estimated: True when there is no such document; exactly one of the two is given.
    :param basis: what an estimate rests on, when there is something to say.
    """

    value: float
    source: str | None = None
    estimated: bool = False
    basis: str | None = None

    def __float__(self) -> float:
        return float(self.value)


@dataclass(frozen=True)
class Board:
    """One kind of board.

    `relative_cpu_speed` compares one core at float32 training with one core of the board `generic-x86`.
    Memory is what is soldered on; firmware and a GPU may keep part of it for themselves. The network is the
    board's own link: what lies behind it may be slower.
    """

    name: str
    title: str
    cpu: str
    accelerator: str
    architecture: str
    os: str
    first_boot: str
    python: str
    glibc: str
    network: str
    storage: str
    notes: tuple[str, ...]
    cores: Quantity
    clock_mhz: Quantity
    relative_cpu_speed: Quantity
    memory_mib: Quantity
    network_down_mbit_s: Quantity
    network_up_mbit_s: Quantity
    network_latency_ms: Quantity
    storage_write_mb_s: Quantity
    power_idle_w: Quantity
    power_active_w: Quantity

    def quantities(self) -> Iterator[tuple[str, Quantity]]:
        """Every number of the board, with its field's name."""
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Quantity):
                yield field.name, value


_TEXTS = {
    "title": ("title",),
    "cpu": ("cpu", "model"),
    "accelerator": ("accelerator", "model"),
    "architecture": ("software", "architecture"),
    "os": ("software", "os"),
    "first_boot": ("software", "first_boot"),
    "python": ("software", "python"),
    "glibc": ("software", "glibc"),
    "network": ("network", "kind"),
    "storage": ("storage", "kind"),
}
_QUANTITIES = {
    "cores": ("cpu", "cores"),
    "clock_mhz": ("cpu", "clock_mhz"),
    "relative_cpu_speed": ("cpu", "relative_speed"),
    "memory_mib": ("memory", "mib"),
    "network_down_mbit_s": ("network", "down_mbit_s"),
    "network_up_mbit_s": ("network", "up_mbit_s"),
    "network_latency_ms": ("network", "latency_ms"),
    "storage_write_mb_s": ("storage", "write_mb_s"),
    "power_idle_w": ("power", "idle_w"),
    "power_active_w": ("power", "active_w"),
}
"""Field of `Board` to its place in the file."""


def board_names() -> tuple[str, ...]:
    """The names that `load_board` knows, sorted."""
    files = resources.files("hushfleet.firmware_profiles").joinpath("boards").iterdir()
    return tuple(sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml")))


def load_board(name: str) -> Board:
    """The profile of one board.

    :raises BadInput: no such board (with the names that come close), or a profile that breaks a rule.
    """
    known = board_names()
    if name not in known:
        close = difflib.get_close_matches(name.lower().replace(" ", "-"), known, n=4, cutoff=0.4)
        hint = f"did you mean {' or '.join(close)}?" if close else f"the boards are {', '.join(known)}"
        raise BadInput(f"there is no board {name!r}; {hint}")
    file = resources.files("hushfleet.firmware_profiles").joinpath("boards", f"{name}.toml")
    return parse_board(name, file.read_text(encoding="utf-8"))


def parse_board(name: str, text: str) -> Board:
    """Reads a profile's TOML text; refuses missing, unknown and unsourced entries with `BadInput`."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BadInput(f"the profile of board {name} is not valid TOML: {error}") from error
    expected = {*_TEXTS.values(), *_QUANTITIES.values(), ("notes",)}
    unknown = sorted(".".join(place) for place in _places(data) if place not in expected)
    if unknown:
        raise BadInput(f"the profile of board {name} has unknown entries: {', '.join(unknown)}")
    notes = data.get("notes", [])
    if not isinstance(notes, list) or not all(isinstance(note, str) for note in notes):
        raise BadInput(f"board {name}: notes must be a list of texts")
    values: dict[str, Any] = {"name": name, "notes": tuple(notes)}
    for field, place in _TEXTS.items():
        value = _lookup(data, place)
        if not isinstance(value, str) or not value:
            raise BadInput(f"board {name}: {'.'.join(place)} must be a text, got {value!r}")
        values[field] = value
    for field, place in _QUANTITIES.items():
        values[field] = _quantity(_lookup(data, place), f"board {name}: {'.'.join(place)}")
    return Board(**values)


def _places(data: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for key, value in data.items():
        if isinstance(value, dict):
            yield from ((key, inner) for inner in value)
        else:
            yield (key,)


def _lookup(data: Mapping[str, Any], place: tuple[str, ...]) -> Any:
    value: Any = data
    for key in place:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _quantity(entry: Any, where: str) -> Quantity:
    if not isinstance(entry, dict) or not set(entry) <= {"value", "source", "estimated", "basis"}:
        raise BadInput(
            f"{where} must be {{ value = ..., source = '...' }} or {{ value = ..., estimated = true }}"
        )
    value, source, basis = entry.get("value"), entry.get("source"), entry.get("basis")
    estimated = entry.get("estimated", False)
    if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
        raise BadInput(f"{where} must have a positive number as its value, got {value!r}")
    if not all(text is None or (isinstance(text, str) and text) for text in (source, basis)):
        raise BadInput(f"{where}: source and basis are texts, got {source!r} and {basis!r}")
    if type(estimated) is not bool or estimated == (source is not None):
        raise BadInput(f"{where} needs a source or estimated = true, and not both")
    if basis is not None and not estimated:
        raise BadInput(f"{where} has a basis, which only an estimate needs")
    return Quantity(value, source, estimated, basis)
