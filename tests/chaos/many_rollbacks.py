"""Two hundred storms of state folders that are put back, five boards each, some ten minutes: `make chaos` runs it."""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos.rollback import Rollbacks
from support.whole import prepared_digits

TASKS = [prepared_digits(season, rounds=2) for season in ("spring", "summer", "autumn")]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(100, 300))
def test_no_ledger_is_below_the_truth(tmp_path: Path, seed: int) -> None:
    storm = Rollbacks(tmp_path, TASKS, seed, boards=5)
    storm.play()
    assert storm.findings == []
