"""The table of states: its diagram is the one in the documents, and its actions exist."""

from __future__ import annotations

from pathlib import Path

import pytest

from hushfleet.aggregator.rounds.cycle import RoundCycle
from hushfleet.aggregator.rounds.protocol import ROUNDS
from hushfleet.edge_client.protocol import ROUND
from hushfleet.state_table import StateTable, Transition

PAGE = Path(__file__).parents[3] / "docs" / "architecture.md"


@pytest.mark.parametrize("table", [ROUNDS, ROUND])
def test_the_diagrams_in_the_documents_are_the_tables(table: StateTable) -> None:
    assert f"```mermaid\n{table.diagram()}\n```" in PAGE.read_text()


def test_each_action_is_a_method_and_each_state_can_be_left_and_entered() -> None:
    for row in ROUNDS.rows:
        assert callable(getattr(RoundCycle, f"_{row.action}"))
    left, entered = {row.state for row in ROUNDS.rows}, {row.then for row in ROUNDS.rows}
    assert entered - left == {"ended"}
    assert left <= entered


def test_a_state_has_one_row_for_an_event() -> None:
    with pytest.raises(ValueError, match="two rows"):
        StateTable([Transition("a", "x", "go", "b"), Transition("a", "x", "stay", "a")])
    with pytest.raises(KeyError):
        ROUNDS.row("ended", "over")
