"""A fleet's year, from the first card to December (`chaos.year`): afterwards every ledger is exact."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from chaos.year import Year
from chaos.year_audit import check_year, play


@pytest.fixture(scope="module")
def small_year(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Year]:
    folder = tmp_path_factory.mktemp("year")
    year = Year(folder, boards=5, every_days=14)
    play(year, folder)
    yield year
    year.close()


def test_after_a_year_every_ledger_is_exact_and_nobody_is_over_a_limit(small_year: Year) -> None:
    check_year(small_year)
