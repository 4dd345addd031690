"""`benchmarks/births.py`: a tiny run."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import births


def test_it_measures_what_it_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    births.main(["--births", "300", "--known", "10", "--folder", str(tmp_path)])
    shown = capsys.readouterr().out
    assert "strangers" in shown
    assert "times cheaper" in shown
    assert births.measure(tmp_path / "again", births=250, known=6)["known, together"]["births"] == 3
