"""The pages of the boards say what the profiles say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hushfleet.firmware_profiles import Board, Quantity, board_names, load_board

DOCS = Path(__file__).parents[2] / "docs"
PAGES = {page.name: page.read_text("utf-8") for page in (DOCS / "boards").glob("*.md")}
BENCH = {row["model"]: row for row in json.loads((DOCS / "figures" / "board.json").read_text("utf-8"))["models"]}
# Of a client that trains this network by DP-FedAvg, measured on x86: its peak, and the processor time of a round.
MEASURED = BENCH["fashion-mnist-cnn"]["methods"]["dp-fedavg"]
CLIENT_MIB, ROUND_S = round(MEASURED["round_peak_mib"]), round(MEASURED["round"]["cpu_ms"] / 1000, 2)


def number(quantity: Quantity) -> str:
    return f"{'about ' if quantity.estimated else ''}{quantity.value:g}"


def row(board: Board) -> str:
    return (
        f"| `{board.name}` | {number(board.memory_mib)} MiB | {board.network} | {board.storage} | "
        f"{number(board.power_idle_w)} W, {number(board.power_active_w)} W |"
    )


@pytest.mark.parametrize("name", sorted(set(board_names()) - {"generic-x86"}))
def test_each_board_stands_on_one_page(name: str) -> None:
    assert sum(row(load_board(name)) in text for text in PAGES.values()) == 1


@pytest.mark.parametrize("page", sorted(PAGES.keys() - {"index.md"}))
def test_a_page_is_of_its_first_board(page: str) -> None:
    text = PAGES[page]
    board = load_board(text.partition("|---|---|---|---|---|\n| `")[2].partition("`")[0])
    speed = float(board.relative_cpu_speed)
    for said in (
        f"{board.cpu}, {number(board.cores)} cores at {number(board.clock_mhz)} MHz.",
        f"{board.os}: Python {board.python}, glibc {board.glibc}. First configuration: {board.first_boot}.",
        f" --board {board.name}",
        f"{CLIENT_MIB} MiB at most with `fashion-mnist-cnn` (measured on x86): "
        f"{100 * CLIENT_MIB / float(board.memory_mib):.0f} % of what it has",
        f"about {speed:g} of a 3 GHz AVX2 core (estimated)",
        f"about {ROUND_S / speed:.0f} s (estimated; measured on x86: {ROUND_S} s)",
        *(f"- {note}" for note in board.notes),
    ):
        assert said in text
