"""Rounds of secure sums without a network: two phases, late updates, members that lie or are silent, and restarts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hushfleet.secure.field import PRIMES, add_into
from support.secure import SecureFleet

Make = Callable[..., SecureFleet]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[SecureFleet] = []

    def one(**settings: Any) -> SecureFleet:
        made.append(SecureFleet(tmp_path / str(len(made)), **settings))
        return made[-1]

    yield one
    for fleet in made:
        fleet.store.close()


def unmasked_mean(fleet: SecureFleet, names: list[str]) -> np.ndarray:
    """By an oracle that sees every update."""
    total = np.zeros(256, np.uint32)
    for name in names:
        add_into(total, fleet.integers(name), PRIMES[16])
    return fleet.ring.decode(total) / len(names)


def test_the_model_moves_by_the_mean_of_updates_that_nobody_saw(make: Make) -> None:
    fleet = make()
    before = fleet.engine.global_params.astype(np.float64)
    fleet.engine.open_round(())
    assert not fleet.plan.cohort, "a plan names nobody"
    fleet.send(fleet.names)
    expected = unmasked_mean(fleet, fleet.names)
    assert not fleet.engine.should_close(fleet.now)
    assert fleet.plan.phase == "unmask"
    for member in fleet.round.members:
        assert not fleet.engine.should_close(fleet.now)
        assert fleet.engine.accept(member, fleet.answer(member)).code == "accepted"
    assert fleet.engine.should_close(fleet.now)
    summary = fleet.engine.close()
    assert np.array_equal(fleet.engine.global_params, (before + expected).astype(np.float32))
    assert summary.participants == 10
    assert [row.device for row in fleet.store.charges()] == fleet.names


def test_without_masks_the_models_are_the_same_bit_for_bit(make: Make) -> None:
    with_masks, without = make(), make(masked=False)
    for missing in ([], ["dev-3"], ["dev-7"]):
        for fleet in (with_masks, without):
            fleet.run_round(missing=missing)
        assert with_masks.engine.global_digest == without.engine.global_digest
    assert with_masks.engine.finished
