"""A year of forty boards with a round a week, two years of their seasons, and a year of fifty boards that hear; `make
chaos` runs all.

The first takes some fifteen seconds on a quiet core, each other some minutes.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos.seasons import SeasonYears, check_seasons
from chaos.sound_year import SoundYear, check_months
from chaos.year import Year
from chaos.year_audit import check_year, play


@pytest.mark.timeout(3600)
def test_a_year_of_forty_boards(tmp_path: Path) -> None:
    year = Year(tmp_path, boards=40, every_days=7)
    play(year, tmp_path)
    check_year(year)
    year.close()


@pytest.mark.timeout(3600)
def test_two_years_of_seasons(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Eight seasons, of which the lifetime limit pays for seven. Two classes are new in the fifth."""
    lifetime = 6.2
    year = SeasonYears(tmp_path, boards=40, there=26, rounds=4, lifetime=lifetime, late=3, lost=3, off=4, new_classes=5)
    year.play(8)
    with capsys.disabled():
        print("", *year.ends, sep="\n")
    assert [end.task for end in year.ends] == ["leaf", *(f"leaf-{n}" for n in range(2, 8)), "leaf-7"]
    assert year.ends[-1].took_part == 0
    assert [end.classes for end in year.ends] == [8] * 4 + [10] * 4
    check_seasons(year, epsilon=2.0, lifetime=lifetime, worse=0.02)
    year.close()


@pytest.mark.needs("espeak-ng")
@pytest.mark.timeout(3600)
def test_a_year_of_boards_that_hear(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Four quarters with two new words each; boards come late, are lost, and are off for half a year."""
    pytest.importorskip("livekit.wakeword")
    year = SoundYear(tmp_path, boards=50, there=32, rounds=2, lifetime=12.0, epsilon=4.0, late=5, lost=5, off=5)
    with capsys.disabled():
        year.play(4)
        print("", *year.ends, sep="\n")
    assert [end.task for end in year.ends] == ["leaf", "leaf-2", "leaf-3", "leaf-4"]
    assert [end.classes for end in year.ends] == [7, 9, 11, 13]
    check_months(year, epsilon=4.0, lifetime=12.0, worse=0.03)
    year.close()
