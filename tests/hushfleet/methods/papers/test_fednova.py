"""FedNova against the normalised averaging of its paper, with the vector a_i taken from unit gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hushfleet.errors import Malformed
from hushfleet.methods.papers.fednova import length
from support.quadratics import Fleet, assert_close

RATE, STEPS = 0.1, 4


def papers_a(momentum: float, pull: float) -> np.ndarray:
    """a_i as section 3 of the paper prints it: for momentum alone, and for a proximal term alone."""
    left = np.arange(STEPS, 0, -1)
    return (1 - momentum**left) / (1 - momentum) if momentum else (1 - pull) ** (left - 1)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("momentum", "mu"), [(0.0, 0.0), (0.6, 0.0), (0.0, 2.0), (0.6, 2.0)])
def test_rounds_are_the_papers(seed: int, momentum: float, mu: float) -> None:
    fleet = Fleet(seed)
    x = fleet.start.astype(float)
    norm = length(STEPS, momentum, RATE * mu) if momentum and mu else np.abs(papers_a(momentum, RATE * mu)).sum()
    for cohort in fleet.cohorts:
        directions = []
        for i in cohort:
            y, velocity = x.copy(), np.zeros_like(x)
            for _ in range(STEPS):
                velocity = momentum * velocity + fleet.slope(i, y) + mu * (y - x)
                y -= RATE * velocity
            directions.append((x - y) / (RATE * norm))  # d_i = G_i a_i / |a_i|_1
        effective = STEPS if mu else norm
        x = x - effective * RATE * np.mean(directions, axis=0)
    config = {"learning_rate": RATE, "local_steps": STEPS, "momentum": momentum, "mu": mu}
    assert_close(fleet.played(fleet.method("fednova", **config)).model, x)


@pytest.mark.parametrize(("momentum", "pull"), [(0.0, 0.0), (0.9, 0.0), (0.0, 0.3)])
def test_the_length_is_the_papers(momentum: float, pull: float) -> None:
    assert length(STEPS, momentum, pull) == pytest.approx(np.abs(papers_a(momentum, pull)).sum())


def test_with_plain_steps_it_is_fedavg() -> None:
    fleet, config = Fleet(1), {"optimizer": "sgd", "learning_rate": RATE, "local_steps": STEPS}
    nova, plain = (fleet.played(fleet.method(name, **config)).model for name in ("fednova", "fedavg"))
    np.testing.assert_array_equal(nova, plain)


@pytest.mark.parametrize("config", [{"local_epochs": 2}, {"local_steps": 0}, {"learning_rate": 0.5, "mu": 2.0}])
def test_what_has_no_common_length_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(Malformed):
        Fleet(0).method("fednova", **config)
