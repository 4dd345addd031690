"""Makes the list of boards to add, by a count or from a CSV file. Everything is checked before anything is written."""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from hushfleet.aggregator.fleet.trust.folder import AGGREGATOR_NAME, HOME_ASSISTANT_NAME, SERVICE_NAME
from hushfleet.aggregator.storage.board import Board
from hushfleet.aggregator.storage.devices_file import parse_key
from hushfleet.errors import BadInput
from hushfleet.firmware_profiles import load_board
from hushfleet.wire.format.topics import check_new_name

COLUMNS = ("id", "board", "place", "wifi", "labels", "key")
MAX_BOARDS = 100_000


def check_board_name(name: str) -> str:
    """Checks a board's id and returns it.

    Raises `BadInput` also for the names that the fleet's own certificates have.
    """
    if name in (AGGREGATOR_NAME, SERVICE_NAME, HOME_ASSISTANT_NAME):
        raise BadInput(f"a board cannot be called {name!r}: the broker uses this name itself")
    return check_new_name(name, "the board's id")


def counted(
    prefix: str, count: int, *, known: Iterable[str], board: str, place: str = "", wifi: str = ""
) -> list[Board]:
    """Returns the next `count` boards: PREFIX-01, PREFIX-02, ..., after the highest number in use."""
    if not 1 <= count <= MAX_BOARDS:
        raise BadInput(f"--count {count}: must be 1 to {MAX_BOARDS}")
    load_board(board)
    numbers = [int(match[1]) for name in known if (match := re.fullmatch(rf"{re.escape(prefix)}-(\d{{1,6}})", name))]
    first = max(numbers, default=0) + 1
    names = [check_board_name(f"{prefix}-{number:02d}") for number in range(first, first + count)]
    return [Board(name, board, place, wifi) for name in names]


def named(names: Sequence[str], *, board: str, place: str, wifi: str, key: bytes | None) -> list[Board]:
    """Returns boards with these ids.

    :param key: of the only one; None: they get a card.
    """
    load_board(board)
    return [Board(check_board_name(each), board, place, wifi, {}, key) for each in names]


def from_csv(file: Path, *, board: str | None, wifi: str = "") -> list[Board]:
    """Reads boards from a CSV file. Raises `BadInput` that names the line.

    :param board: profile for rows that name none.
    """
    try:
        text = file.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{file} cannot be read: {error}") from error
    reader = csv.DictReader(io.StringIO(text), skipinitialspace=True)
    unknown = [name for name in reader.fieldnames or [] if name not in COLUMNS]
    if "id" not in (reader.fieldnames or []) or unknown:
        raise BadInput(
            f"{file}: the first line must name columns of {', '.join(COLUMNS)}, with id; not {unknown or 'none'}"
        )
    boards: list[Board] = []
    try:
        for row in reader:
            boards.append(_from_row({name: (value or "").strip() for name, value in row.items() if name}, board, wifi))
    except BadInput as error:
        raise BadInput(f"{file}, line {reader.line_num}: {error}") from error
    except csv.Error as error:
        raise BadInput(f"{file}, line {reader.line_num}: {error}; is a quotation mark not closed?") from error
    _check_distinct(file, [each.device for each in boards])
    return boards


def _from_row(row: dict[str, str], board: str | None, wifi: str) -> Board:
    profile = row.get("board") or board
    if not profile:
        raise BadInput("no board is named, and --board is not given; `hushfleet boards` lists them")
    load_board(profile)
    labels = dict(_label(part) for part in row.get("labels", "").split(";") if part.strip())
    key = parse_key(row["key"], "the key") if row.get("key") else None
    return Board(
        check_board_name(row.get("id", "")), profile, row.get("place", ""), row.get("wifi") or wifi, labels, key
    )


def _label(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise BadInput(f"labels are written as name=value;name=value, not {text!r}")
    return name.strip(), value.strip()


def _check_distinct(file: Path, names: Sequence[str]) -> None:
    if not names:
        raise BadInput(f"{file} names no board")
    name, count = Counter(names).most_common(1)[0]
    if count > 1:
        raise BadInput(f"{file} names {name} {count} times")
