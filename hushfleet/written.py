"""Reads TOML that a person wrote, and reports all mistakes at once, with their lines."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from hushfleet.at_need import at_need
from hushfleet.errors import Malformed
from hushfleet.schema import from_plain, read_file

if TYPE_CHECKING:
    from hushfleet import faults
else:
    faults = at_need("hushfleet.faults")

T = TypeVar("T")


def read_written(kind: type[T], path: Path) -> T:
    """Returns the file's content, see `hushfleet.schema`. Raises `BadInput` that lists all mistakes."""
    plain = read_file(path)
    try:
        return from_plain(kind, plain)
    except Malformed:
        raise faults.refusal(path, faults.with_lines(path, faults.faults(kind, plain))) from None
