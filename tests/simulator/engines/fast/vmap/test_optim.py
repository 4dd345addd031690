"""The one-kernel optimizers against those of hushfleet, with clients that leave."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hushfleet.learning.optim import make_optimizer
from hushfleet.methods.method import TrainingConfig
from hushfleet.simulator.engines.fast.vmap.optim import make_cohort_optimizer

CLIENTS_AT = [3, 3, 3, 2, 2, 1, 1, 1]


@pytest.mark.parametrize("size", [1, 7, 1031])
@pytest.mark.parametrize(("name", "momentum"), [("adam", 0.0), ("sgd", 0.0), ("sgd", 0.9)])
def test_every_client_steps_as_it_would_alone(name: str, momentum: float, size: int, device: str) -> None:
    rng = np.random.default_rng(size)
    start = rng.standard_normal((3, size)).astype(np.float32)
    gradients = (rng.standard_normal((8, 3, size)) * 10.0 ** rng.uniform(-5, 1, (3, size))).astype(np.float32)
    gradients[:, :, rng.random(size) < 0.05] = 0
    config = TrainingConfig(optimizer=name, momentum=momentum)
    together, cohort = torch.tensor(start, device=device), make_cohort_optimizer(config)
    for step, clients in enumerate(CLIENTS_AT):
        kept = gradients[step].copy()
        cohort.step(together[:clients], torch.tensor(gradients[step, :clients], device=device))
        np.testing.assert_array_equal(gradients[step], kept)
    for client, steps in enumerate((8, 5, 3)):
        alone, optimizer = start[client].copy(), make_optimizer(name, 1e-3, momentum)
        for step in range(steps):
            optimizer.step(alone, gradients[step, client])
        np.testing.assert_allclose(together[client].cpu(), alone, rtol=1e-6, atol=2e-7)
    assert (together.cpu().numpy() != start).any()
