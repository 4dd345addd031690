"""The benchmark of a board's ledger, on a few rounds."""

from __future__ import annotations

import pytest

from benchmarks import ledger


def test_a_row_for_each_round(capsys: pytest.CaptureFixture[str]) -> None:
    ledger.main(["--rounds", "1,3"])
    assert "A round's work of a board's ledger" in capsys.readouterr().out
