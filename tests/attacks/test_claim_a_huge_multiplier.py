"""Wanted, by a device that may choose its noise: any norm at all, and an epsilon_release of 0 for everybody.

APDP-FL lets devices add more noise than the standard, and the aggregator knows the noise from the update's own header.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hushfleet.aggregator.results.metrics import privacy_tables
from hushfleet.errors import PrivacyError
from hushfleet.methods.cost import RoundTerms
from support.fleet import CLIP_NORM, LAYOUT

MakeFleet = Callable[..., Any]
LIAR = "dev-0"
TASK = {"method": "apdp-fl", "multiplier": 2.0, "accounting": "strict", "wire": {"codec": "float32"}}


def claimed(fleet: Any, times: float, *, unit: str = "device", **changes: Any) -> Any:
    """What is said of an update whose header names so many times the standard noise, and has values to match."""
    update = fleet.update(LIAR, advance=False)
    multiplier = times * update.header.multiplier_server
    if unit == "device":
        std = CLIP_NORM * multiplier
        changes |= {"noise_stds": (std, std), "steps": tuple(times * step for step in update.header.steps)}
        values = np.random.default_rng(3).normal(0, min(std, 1e5), LAYOUT.size).astype(np.float32)
    else:
        values = update.values
    signed = fleet.devices.sign(LIAR, update.header, values, update.counts, multiplier_server=multiplier, **changes)
    return fleet.engine.accept(LIAR, signed.data)


@pytest.mark.parametrize("times", [1e30, 5.01])
def test_for_room_in_which_any_value_fits(make_fleet: MakeFleet, times: float) -> None:
    fleet = make_fleet(**TASK)
    fleet.open()
    verdict = claimed(fleet, times)
    assert (verdict.code, "devices may choose up to 10" in verdict.reason) == ("out-of-bounds", True)


def test_for_an_epsilon_that_counts_it(make_fleet: MakeFleet) -> None:
    """As loud as the task allows is allowed, but others' epsilon_release counts the standard noise of it."""
    epsilons = []
    for times in (5.0, 1.0):
        fleet = make_fleet(**TASK)
        fleet.open()
        assert claimed(fleet, times).code == "accepted"
        for name in fleet.names[1:]:
            assert fleet.engine.accept(name, fleet.update(name).data).code == "accepted"
        assert fleet.engine.close().multiplier_release == pytest.approx(2.0 * 3**0.5)
        (table,) = privacy_tables(fleet.store, [1], delta=0.01, accountant="rdp")
        epsilons.append([row.epsilon_release for row in table.values()])
    assert epsilons[0] == epsilons[1]


def test_for_an_epsilon_of_its_own_records(make_fleet: MakeFleet) -> None:
    """With the unit `record` it would be the liar's own number: it, too, is no better than the standard's."""
    unit = {"unit": "record", "sample_rate": 0.1, "delta": 1e-5}
    fleet = make_fleet(**{**TASK, "unit": unit})
    fleet.open()
    assert claimed(fleet, 1e30, unit="record").code == "out-of-bounds"
    assert claimed(fleet, 5.0, unit="record").code == "accepted"
    honest = fleet.names[1]
    assert fleet.engine.accept(honest, fleet.update(honest).data).code == "accepted"
    fleet.engine.close()
    (table,) = privacy_tables(fleet.store, [1], delta=1e-5, accountant="rdp")
    liar, other, *_ = (row.epsilon_release for row in table.values())
    assert liar == pytest.approx(other)


@pytest.mark.parametrize(("wire", "release"), [({"codec": "float32"}, (1 + 4 + 4) ** 0.5), ({"step": 1.5}, 1.0)])
def test_less_noise_than_the_standard_is_its_owners_choice_and_is_counted(
    make_fleet: MakeFleet, wire: dict[str, Any], release: float
) -> None:
    """Where a coarse code may remove the others' noise, nobody is promised more than the least."""
    fleet = make_fleet(**TASK | {"wire": wire})
    fleet.open()
    assert claimed(fleet, 0.5).code == "accepted"
    for name in fleet.names[1:]:
        assert fleet.engine.accept(name, fleet.update(name).data).code == "accepted"
    assert fleet.engine.close().multiplier_release == pytest.approx(release)


def test_an_owner_who_wants_more_than_the_task_allows_declines_before_training(make_fleet: MakeFleet) -> None:
    method = make_fleet(**TASK).prepared.method
    terms = RoundTerms(preference=5.0)
    assert method.charge(terms).noise_multiplier == pytest.approx(10.0)
    with pytest.raises(PrivacyError, match="max_preference"):
        method.charge(replace(terms, preference=6.0))
