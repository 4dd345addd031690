"""The life of a fleet, from blank boards to a lock-out, through kills at its steps. The long form: `make chaos`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from chaos.life import Life, Releases
from chaos.life_audit import check_life
from chaos.life_plan import KINDS, PARTS, STEPS, draw_life


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1])
def test_a_fleet_lives_through_a_storm(seed: int, library: Path | None, tmp_path: Path) -> None:
    plan = draw_life(seed, kinds=KINDS if library else ("kill",))
    life = Life(plan, tmp_path, Releases(tmp_path), library)
    life.live()
    assert check_life(life) == []
    assert life.played


def test_the_long_form_strikes_every_part_at_every_step() -> None:
    lives = [draw_life(seed) for seed in range(80)]
    struck = Counter((part, life.troubles[0].step) for life in lives for part in life.troubles[0].targets)
    assert struck.keys() == {(part, step) for part in PARTS for step in STEPS}
    assert {trouble.kind for life in lives for trouble in life.troubles} == set(KINDS)
    assert draw_life(3) == draw_life(3)
