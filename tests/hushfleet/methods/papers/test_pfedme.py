"""pFedMe against the loop of its paper."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hushfleet.methods.cost import RoundTerms
from hushfleet.wire.format.spec import PrivacySpec
from support.quadratics import Fleet, assert_close

LAMBDA, ETA, BETA, PERSONAL, K, R = 3.0, 0.1, 0.8, 0.05, 4, 3
CONFIG = {
    "lambda_": LAMBDA,
    "learning_rate": ETA,
    "server_learning_rate": BETA,
    "own_learning_rate": PERSONAL,
    "own_steps": K,
    "local_epochs": R,
}


@pytest.mark.parametrize("seed", range(6))
def test_rounds_are_the_papers(seed: int) -> None:
    fleet = Fleet(seed)
    w, own = fleet.start.astype(float), {}
    for cohort in fleet.cohorts:
        copies = []
        for i in cohort:
            copy = theta = w
            for _ in range(R):
                for _ in range(K):
                    theta = theta - PERSONAL * (fleet.slope(i, theta) + LAMBDA * (theta - copy))
                copy = copy - ETA * LAMBDA * (copy - theta)
            own[i] = theta
            copies.append(copy)
        w = (1 - BETA) * w + BETA * np.mean(copies, axis=0)
    found = fleet.played(fleet.method("pfedme", **CONFIG))
    assert_close(found.model, w)
    for device, theta in own.items():
        assert_close(found.states[device].own, theta)
        assert found.states[device].private == {}


def test_with_noise_on_records_each_step_is_charged() -> None:
    fleet, privacy = Fleet(0), PrivacySpec("record", "strict", 1.0, 1.0, 0.1, sample_rate=0.5, batches=2)
    one, more = (fleet.method("pfedme", privacy, **{**CONFIG, "own_steps": steps}) for steps in (1, K))
    charge = one.charge(RoundTerms())
    assert more.charge(RoundTerms()) == replace(charge, noise_multiplier=charge.noise_multiplier / K**0.5)
