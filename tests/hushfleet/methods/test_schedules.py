"""The learning rate of a round, against the schedulers of PyTorch with one step a round."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim import lr_scheduler

from hushfleet.methods import make_method
from hushfleet.methods.method import TrainingConfig
from hushfleet.params import ParamLayout
from hushfleet.wire.format.spec import PrivacySpec

RATE = 0.3
LAYOUT = ParamLayout(("w",), ((3,),))
PRIVACY = PrivacySpec("device", "strict", 1.0, 0.0, 0.1)


def of_torch(schedule: str, rounds: int, warmup: int, step_rounds: int, factor: float) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=RATE)
    after: lr_scheduler.LRScheduler
    if schedule == "cosine":
        after = lr_scheduler.CosineAnnealingLR(optimizer, T_max=rounds - warmup)
    elif schedule == "step":
        after = lr_scheduler.StepLR(optimizer, step_rounds, gamma=factor)
    else:
        after = lr_scheduler.ConstantLR(optimizer, factor=1)
    scheduler = after
    if warmup:
        rising = lr_scheduler.LinearLR(optimizer, 1 / (warmup + 1), total_iters=warmup)
        scheduler = lr_scheduler.SequentialLR(optimizer, [rising, after], milestones=[warmup])
    rates = []
    for _ in range(rounds):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.filterwarnings("ignore:The epoch parameter")
@settings(max_examples=30, deadline=None)
@given(
    schedule=st.sampled_from(["constant", "cosine", "step"]),
    rounds=st.integers(1, 40),
    warmup=st.integers(0, 39),
    step_rounds=st.integers(1, 9),
    factor=st.floats(0.05, 1),
)
def test_the_rates_are_those_of_pytorch(
    schedule: str, rounds: int, warmup: int, step_rounds: int, factor: float
) -> None:
    warmup %= rounds
    steps = {"step_rounds": step_rounds, "step_factor": factor} if schedule == "step" else {}
    config = TrainingConfig(learning_rate=RATE, schedule=schedule, warmup_rounds=warmup, **steps)  # type: ignore[arg-type]
    found = [config.rate_in(round, rounds) for round in range(1, rounds + 1)]
    np.testing.assert_allclose(found, of_torch(schedule, rounds, warmup, step_rounds, factor), rtol=1e-6)
    assert all(0 < rate <= RATE for rate in found)


def test_a_round_has_the_rate_of_its_own_number_in_the_task() -> None:
    method = make_method("fedavg", {"schedule": "cosine", "learning_rate": RATE}, PRIVACY, LAYOUT, rounds=4)
    assert method.config_in(1) is method.config
    assert [method.config_in(round).learning_rate for round in (4, 3)] == pytest.approx([RATE * 0.1464466, RATE / 2])


def test_a_schedule_lowers_what_a_value_can_move() -> None:
    """With the unit `record` and Adam, checks of updates rely on the largest learning rate."""
    config = TrainingConfig(schedule="step", step_rounds=1, step_factor=1.0, warmup_rounds=2)
    assert max(config.rate_in(round, 9) for round in range(1, 10)) == config.learning_rate
