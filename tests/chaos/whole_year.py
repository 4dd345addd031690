"""A year of forty boards with a round a week, some fifteen seconds on a quiet core: `make chaos` runs it."""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos.year import Year
from chaos.year_audit import check_year, play


@pytest.mark.timeout(3600)
def test_a_year_of_forty_boards(tmp_path: Path) -> None:
    year = Year(tmp_path, boards=40, every_days=7)
    play(year, tmp_path)
    check_year(year)
    year.close()
