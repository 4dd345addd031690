"""FedDyn against the loop of its paper."""

from __future__ import annotations

import numpy as np
import pytest

from hushfleet.wire.format.spec import PrivacySpec
from support.quadratics import Fleet, assert_close

ALPHA, RATE, STEPS = 0.3, 0.1, 3
CONFIG = {"alpha": ALPHA, "optimizer": "sgd", "learning_rate": RATE, "local_epochs": STEPS}


@pytest.mark.parametrize("seed", range(6))
def test_rounds_are_the_papers(seed: int) -> None:
    """Algorithm 1, with some steps in place of the argmin."""
    fleet = Fleet(seed)
    server, h = fleet.start.astype(float), 0.0
    remembered = [np.zeros(len(server)) for _ in range(fleet.devices)]
    for cohort in fleet.cohorts:
        ends = []
        for k in cohort:
            theta = server.copy()
            for _ in range(STEPS):
                theta -= RATE * (fleet.slope(k, theta) - remembered[k] + ALPHA * (theta - server))
            remembered[k] = remembered[k] - ALPHA * (theta - server)
            ends.append(theta)
        h = h - ALPHA / fleet.devices * sum(theta - server for theta in ends)
        server = np.mean(ends, axis=0) - h / ALPHA
    found = fleet.played(fleet.method("feddyn", **CONFIG))
    assert_close(found.model, server)
    assert_close(found.server["h"], h)
    for state, expected in zip(found.states, remembered, strict=True):
        assert_close(state.private.get("gradient", 0 * expected), expected)


@pytest.mark.parametrize("unit", ["device", "record"])
def test_with_noise_h_is_the_mean_of_what_devices_remember(unit: str) -> None:
    fleet, privacy = Fleet(2), PrivacySpec(unit, "strict", 0.5, 1.0, 0.1, sample_rate=0.5, batches=2)
    found = fleet.played(fleet.method("feddyn", privacy, **CONFIG))
    kept = [state.private.get("gradient", np.zeros_like(found.model)) for state in found.states]
    assert_close(found.server["h"], np.mean(kept, axis=0))
