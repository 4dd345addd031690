"""SCAFFOLD against the loop of its paper, and what it sends."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hushfleet.errors import Malformed
from hushfleet.methods.cost import RoundTerms
from hushfleet.wire.format.spec import PrivacySpec
from support.quadratics import Fleet, assert_close

RATE, SERVER_RATE, STEPS = 0.1, 0.7, 3
CONFIG = {"learning_rate": RATE, "server_learning_rate": SERVER_RATE, "local_steps": STEPS}
NOISED = {
    "device": PrivacySpec("device", "strict", 0.5, 1.0, 0.1),
    "record": PrivacySpec("record", "strict", 0.5, 1.0, 0.1, sample_rate=0.5, batches=STEPS),
}


@pytest.mark.parametrize("seed", range(6))
def test_rounds_are_the_papers(seed: int) -> None:
    """Algorithm 1, option II."""
    fleet = Fleet(seed)
    x, c, own = fleet.start.astype(float), 0.0, [np.zeros(len(fleet.start)) for _ in range(fleet.devices)]
    for cohort in fleet.cohorts:
        moves, changes = [], []
        for i in cohort:
            y = x.copy()
            for _ in range(STEPS):
                y -= RATE * (fleet.slope(i, y) - own[i] + c)
            after = own[i] - c + (x - y) / (STEPS * RATE)
            moves.append(y - x)
            changes.append(after - own[i])
            own[i] = after
        x = x + SERVER_RATE * np.mean(moves, axis=0)
        c = c + len(cohort) / fleet.devices * np.mean(changes, axis=0)
    found = fleet.played(fleet.method("scaffold", **CONFIG))
    assert_close(found.model, x)
    assert_close(found.server["control"], c)
    for state, expected in zip(found.states, own, strict=True):
        assert_close(state.private.get("control", 0 * expected), expected)


@pytest.mark.parametrize("unit", NOISED)
def test_with_noise_the_servers_control_is_the_mean_of_the_devices(unit: str) -> None:
    """The server computes with nothing but what was sent."""
    fleet = Fleet(3)
    found = fleet.played(fleet.method("scaffold", NOISED[unit], **CONFIG))
    controls = [state.private.get("control", np.zeros_like(found.model)) for state in found.states]
    assert_close(found.server["control"], np.mean(controls, axis=0))


def test_one_release_is_charged() -> None:
    fleet = Fleet(0)
    for privacy in NOISED.values():
        ours, plain = fleet.method("scaffold", privacy, **CONFIG), fleet.method("dp-fedavg", privacy, local_steps=STEPS)
        assert ours.charge(RoundTerms()) == plain.charge(RoundTerms())


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"local_epochs": 3}, "because the server counts"),
        ({"local_steps": 0}, "local_steps"),
        ({"optimizer": "adam"}, "sgd"),
    ],
)
def test_a_number_of_steps_that_follows_the_samples_is_refused(config: dict[str, Any], said: str) -> None:
    with pytest.raises(Malformed, match=said):
        Fleet(0).method("scaffold", **config)
