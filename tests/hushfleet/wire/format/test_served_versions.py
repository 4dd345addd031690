"""A board of a version that is served can be seen and updated: docs/wire.md, "How long a version is served"."""

from __future__ import annotations

import datetime
import json
import re
from pathlib import Path

import pytest
from packaging.version import Version

from hushfleet.wire.format.identity import Identity
from hushfleet.wire.format.messages import decode_message, encode_message

ROOT = Path(__file__).resolve().parents[4]
RELEASED = {path.stem: path for path in (Path(__file__).parent / "released").glob("*.json")}
BOARD = Identity.from_bytes(bytes(range(32)))
YEARS_SERVED = 3


def released_versions() -> dict[str, datetime.date]:
    found = re.findall(r"^## (\S+) \((\S+)\)$", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    return {version: datetime.date.fromisoformat(day) for version, day in found}


def test_each_version_of_the_last_years_has_its_bytes() -> None:
    released = {version: day for version, day in released_versions().items() if Version(version) >= Version("0.3.0")}
    newest = max(released.values())
    served = {version for version, day in released.items() if (newest - day).days <= 365 * YEARS_SERVED}
    assert served <= RELEASED.keys()


@pytest.mark.parametrize("version", sorted(RELEASED))
def test_a_served_board_is_read_and_reads_the_answer(version: str) -> None:
    golden = {name: bytes.fromhex(text) for name, text in json.loads(RELEASED[version].read_text("utf-8")).items()}
    assert golden.keys() >= {"EnrolRequest", "EnrolAnswer", "Health", "ReleaseOffer", "Want"}
    for name, data in golden.items():
        message = decode_message(data, public_key=BOARD.public_key, federation="demo")
        assert type(message).__name__ == name
        assert encode_message(message, BOARD, federation="demo") == data
