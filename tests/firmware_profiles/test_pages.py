"""The page of each board is what its profile says now."""

from __future__ import annotations

from pathlib import Path

from hushfleet.firmware_profiles import board_names
from hushfleet.firmware_profiles.pages import PAGES, write_pages

DOCS = Path(__file__).parents[2] / "docs" / "boards"


def test_pages_are_up_to_date(tmp_path: Path) -> None:
    """Else: python3 -m hushfleet.firmware_profiles.pages docs/boards"""
    write_pages(tmp_path)
    for page in tmp_path.iterdir():
        assert (DOCS / page.name).read_text("utf-8") == page.read_text("utf-8"), page.name


def test_each_board_has_a_page() -> None:
    assert {board for _, boards in PAGES.values() for board in boards} == set(board_names()) - {"generic-x86"}
