"""Reads board profiles from the TOML files beside this one into frozen dataclasses.

A profile that mixes data-sheet figures with unmarked guesses would make emulations look more certain than they are, so
each number is a `Quantity`: it has a public source, or is marked as an estimate.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from hushfleet.errors import BadInput, Malformed, format_value
from hushfleet.schema import Checked, Positive, from_plain, parse_toml

_BOARDS = Path(__file__).parent / "boards"
Text = Annotated[str, Meta(min_length=1, description="a text")]


@dataclass(frozen=True)
class Quantity(Checked):
    """A number and its source.

    :param value: in the unit at the end of the field's name.
    :param source: the public document with the number, or None.
    :param estimated: True if there is no such document; exactly one of the two is given.
    :param basis: the basis of an estimate, if there is one.
    """

    value: Positive
    source: Text | None = None
    estimated: bool = False
    basis: Text | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.estimated == (self.source is not None):
            raise ValueError("needs a source or estimated = true, and not both")
        if self.basis is not None and not self.estimated:
            raise ValueError("has a basis, which only an estimate needs")

    def __float__(self) -> float:
        return float(self.value)


@dataclass(frozen=True, kw_only=True)
class Board(Checked):
    """One kind of board: the content of its file, and its name.

    `relative_cpu_speed` compares one core at float32 training with one core of the board `generic-x86`.
    Memory is the installed memory; firmware and a GPU may reserve part of it. The network is the board's own
    link; the network behind it may be slower.
    """

    name: Text
    title: Text
    cpu: Text
    accelerator: Text
    architecture: Text
    os: Text
    first_boot: Text
    python: Text
    glibc: Text
    network: Text
    storage: Text
    notes: tuple[Text, ...] = ()
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
        """Yields every number of the board, with its field's name."""
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Quantity):
                yield field.name, value


def board_names() -> tuple[str, ...]:
    """Returns the names that `load_board` knows, sorted."""
    files = _BOARDS.iterdir()
    return tuple(sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml")))


@cache
def load_board(name: str) -> Board:
    """Returns the profile of one board.

    :raises BadInput: there is no such board (the error suggests similar names), or its profile is invalid.
    """
    known = board_names()
    if name not in known:
        close = difflib.get_close_matches(name[:40].lower().replace(" ", "-"), known, n=4, cutoff=0.4)
        hint = f"did you mean {' or '.join(close)}?" if close else f"the boards are {', '.join(known)}"
        raise BadInput(f"there is no board {format_value(name)}; {hint}")
    return parse_board(name, _BOARDS.joinpath(f"{name}.toml").read_text(encoding="utf-8"))


def parse_board(name: str, text: str) -> Board:
    """Reads a profile's TOML text. Raises `BadInput` for missing and unknown entries, and for those without source."""
    try:
        return from_plain(Board, {"name": name, **parse_toml(text)}, where=f"the board {name}")
    except Malformed as error:
        raise BadInput(str(error)) from error
    except ValueError as error:
        raise BadInput(f"the profile of board {name} is not valid TOML: {error}") from error
