"""Two seasons of a small fleet (`chaos.seasons`): what a fleet's operator reads at the end of each. And a quarter of
boards that hear (`chaos.sound_year`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos.seasons import SeasonYears, check_seasons
from chaos.sound_year import FIRST_CLIPS, FIRST_OTHERS, HEARD, MORE_CLIPS, NONE, SoundYear, check_months
from hushfleet.data.sound import read_clip
from hushfleet.schema import read_file


@pytest.mark.timeout(300)
def test_a_fleet_learns_in_two_seasons_and_sleeps_in_the_third(tmp_path: Path) -> None:
    """Two seasons of epsilon 20 compose to 32: the third would exceed 40."""
    year = SeasonYears(tmp_path, boards=10, there=8, rounds=2, lifetime=40.0, epsilon=20.0, new_classes=2)
    year.play(3)
    first, second, third = year.ends
    assert [end.task for end in year.ends] == ["leaf", "leaf-2", "leaf-2"]
    assert [end.classes for end in year.ends] == [8, 10, 10]
    assert first.took_part == second.took_part == 10
    assert third.took_part == 0
    assert third.in_all == second.in_all
    assert read_file(year.desk.folder.task)["model"]["start"] == "runs/leaf"
    does, waits, spent, until = first.sentences
    assert does == "leaf-1: all 2 rounds are done; boards predict with their personalized heads"
    assert waits == "next season: tomorrow 01:03 (Europe/Berlin)"
    assert "which has spent most, stands at 20.0 of the 40.0 that its card allows" in spent
    assert until == "season 1 until 1 April 2027; learns until 30 June 2027; then each board goes on alone"
    assert second.sentences[1] == "waits for nothing"
    assert second.sentences[3].startswith("season 2 until 30 June 2027; learns until 30 June 2027")
    assert third.sentences[3] == "season 2 until 30 June 2027; has learned until 30 June 2027; each board goes on alone"
    check_seasons(year, epsilon=20.0, lifetime=40.0, worse=0.06)
    year.close()


@pytest.mark.slow
@pytest.mark.needs("espeak-ng")
def test_boards_hear_for_a_quarter_and_what_they_take_for_a_word_becomes_a_sample_of_none(tmp_path: Path) -> None:
    pytest.importorskip("livekit.wakeword")
    year = SoundYear(tmp_path, boards=4, there=3, rounds=1, lifetime=40.0, epsilon=20.0)
    year.play(1)
    assert [month.number for month in year.months] == [1, 2, 3]
    assert all(month.boards == 4 and month.classes == 7 for month in year.months)
    assert [month.heard for month in year.months] == [0, 4 * HEARD, 4 * HEARD], "at first there is no model"
    for card in year.cards.values():
        none = [clip for word, clip in card.clips if word == NONE]
        files = sorted((card.path.with_name("clips") / NONE).glob("*.wav"))
        assert [read_clip(file, 16000).tolist() for file in files] == [clip.tolist() for clip in none]
        assert len(card.clips) == FIRST_CLIPS + 4 * MORE_CLIPS + len(none)
    marked = sum(month.alarms for month in year.months) + sum(card.marked for card in year.cards.values())
    kept = sum(word == NONE for card in year.cards.values() for word, _ in card.clips)
    assert kept == 4 * FIRST_OTHERS + marked
    check_months(year, epsilon=20.0, lifetime=40.0, worse=1.0)  # four boards are too few to compare
    year.close()
