"""Finds the boards that a command names: by ids, by patterns, and by a file with both."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TypeVar

from hushfleet.errors import BadInput

AnyBoard = TypeVar("AnyBoard")


def chosen_ids(
    boards: Mapping[str, AnyBoard],
    named: Sequence[str] | None,
    file: Path | None,
    *,
    folder: Path,
    fits: Callable[[AnyBoard], object] = lambda _: True,
) -> list[str]:
    """Returns the ids of the named boards, each once. Raises `BadInput` for an id or a pattern that names no board.

    :param boards: all that are known, by id.
    :param named: ids, and patterns such as `gh-*`.
    :param file: more of them, one a line; empty lines and those that begin with # are left out. None: no file.
    :param folder: where the boards are known, for errors.
    :param fits: whether a pattern may match this board; an id names any.
    """
    try:
        lines = [] if file is None else [line.strip() for line in file.read_text("utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise BadInput(f"{file} cannot be read: {error}") from error
    names = [*(named or ()), *(line for line in lines if line and not line.startswith("#"))]
    if not names:
        raise BadInput("name the boards: ids, patterns such as 'greenhouse-0*', or --file FILE with one a line")
    found: dict[str, None] = {}
    for name in names:
        if set(name) & set("*?["):
            matched = [each for each, board in boards.items() if fnmatchcase(each, name) and fits(board)]
            if not matched:
                raise BadInput(f"{name!r} matches no board of {folder} that this is for; {_see(folder)}")
            found |= dict.fromkeys(matched)
        elif name in boards:
            found[name] = None
        else:
            close = difflib.get_close_matches(name, boards, n=3)
            meant = f"did you mean {' or '.join(close)}? " if close else ""
            raise BadInput(f"there is no board {name!r} in {folder}; {meant}{_see(folder)}")
    return list(found)


def _see(folder: Path) -> str:
    return f"see: hushfleet fleet status {folder}"
