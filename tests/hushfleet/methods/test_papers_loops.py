"""FedProx and FedRep against the loops of their papers, with several devices and rounds."""

from __future__ import annotations

import numpy as np
import pytest

from support.quadratics import Fleet, assert_close

RATE = 0.1


@pytest.mark.parametrize("seed", range(6))
def test_fedprox(seed: int) -> None:
    """Algorithm 2, with some steps in place of an inexact solver."""
    fleet, mu, steps = Fleet(seed), 1.5, 3
    w = fleet.start.astype(float)
    for cohort in fleet.cohorts:
        ends = []
        for k in cohort:
            at = w.copy()
            for _ in range(steps):
                at -= RATE * (fleet.slope(k, at) + mu * (at - w))
            ends.append(at)
        w = np.mean(ends, axis=0)
    method = fleet.method("fedprox", mu=mu, optimizer="sgd", learning_rate=RATE, local_epochs=steps)
    assert_close(fleet.played(method).model, w)


@pytest.mark.parametrize("seed", range(6))
def test_fedrep(seed: int) -> None:
    """Algorithm 1: tau steps of the head with the representation of the server, then steps of the representation."""
    fleet, tau, steps = Fleet(seed), 2, 3
    assert fleet.layout is not None
    head = slice(fleet.layout.layers[-1].start, None)
    body = slice(0, head.start)
    models = [fleet.start.astype(float) for _ in range(fleet.devices)]
    shared = fleet.start.astype(float)[body]
    for cohort in fleet.cohorts:
        for i in cohort:
            models[i][body] = shared
            for part, count in ((head, tau), (body, steps)):
                for _ in range(count):
                    models[i][part] -= RATE * fleet.slope(i, models[i])[part]
        shared = np.mean([models[i][body] for i in cohort], axis=0)
    config = {"optimizer": "sgd", "learning_rate": RATE, "head_epochs": tau, "local_epochs": tau + steps}
    found = fleet.played(fleet.method("fedrep", **config))
    assert_close(found.model[body], shared)
    for device in {device for cohort in fleet.cohorts for device in cohort}:
        assert_close(found.states[device].own, models[device])
