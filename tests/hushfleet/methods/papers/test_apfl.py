"""APFL against the loop of its paper."""

from __future__ import annotations

import numpy as np
import pytest

from support.quadratics import Fleet, assert_close

ETA, STEPS, ALPHA = 0.1, 3, 0.3


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("adaptive", [False, True])
def test_rounds_are_the_papers(seed: int, adaptive: bool) -> None:
    """Algorithm 1 and Eq. (10)."""
    fleet = Fleet(seed)
    w, local, alpha, mixed = fleet.start.astype(float), {}, dict.fromkeys(range(fleet.devices), ALPHA), {}
    for cohort in fleet.cohorts:
        ends = []
        for i in cohort:
            at, v = w, local.get(i, w)
            for _ in range(STEPS):
                of_mixture = fleet.slope(i, alpha[i] * v + (1 - alpha[i]) * at)
                towards = (v - at) @ of_mixture
                at, v = at - ETA * fleet.slope(i, at), v - ETA * alpha[i] * of_mixture
                if adaptive:
                    alpha[i] = float(np.clip(alpha[i] - ETA * towards, 0, 1))
            local[i], mixed[i] = v, alpha[i] * v + (1 - alpha[i]) * at
            ends.append(at)
        w = np.mean(ends, axis=0)
    method = fleet.method("apfl", learning_rate=ETA, local_epochs=STEPS, alpha=ALPHA, adaptive=adaptive)
    found = fleet.played(method)
    assert_close(found.model, w)
    for device, expected in mixed.items():
        state = found.states[device]
        assert_close(state.own, expected)
        assert_close(state.private["local"], local[device])
        assert_close(state.private["alpha"], [alpha[device]])
    assert not adaptive or any(abs(each - ALPHA) > 0.01 for each in alpha.values())


def test_the_shared_model_is_fedavgs() -> None:
    fleet, config = Fleet(1), {"optimizer": "sgd", "learning_rate": ETA, "local_epochs": STEPS}
    ours, plain = (fleet.played(fleet.method(name, **config)).model for name in ("apfl", "fedavg"))
    np.testing.assert_array_equal(ours, plain)
