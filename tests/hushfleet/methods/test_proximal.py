"""FedProx and Ditto on the loss (w - 1)^2 / 2, by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from hushfleet.methods import make_method
from hushfleet.methods.local import Pull, Sgd
from hushfleet.methods.local_round import Trained
from hushfleet.methods.method import CLIP_AND_NOISE, Method, TrainingConfig
from hushfleet.methods.personal import Head
from hushfleet.methods.stages import Transform
from hushfleet.methods.state import DeviceState
from hushfleet.methods.task_method import TaskMethod, bind
from hushfleet.params import ParamLayout
from hushfleet.privacy.noise import SeededNoise
from hushfleet.wire.format.spec import PrivacySpec
from support.methods import context_of, privatized, trained

LAYOUT = ParamLayout(("w",), ((1,),))
SETTINGS = {"optimizer": "sgd", "learning_rate": 0.5, "batch_size": 1, "local_epochs": 2}


def method_of(name: str, *, unit: str = "device", noise_multiplier: float = 0.0, **config: Any) -> TaskMethod:
    spec = PrivacySpec(
        unit, accounting="strict", clip_norm=10.0, noise_multiplier=noise_multiplier, delta=0.1, batches=2
    )
    return make_method(name, {**SETTINGS, **config}, spec, LAYOUT, rounds=3)


def quadratic(params, x, y, dropout=(), out=None):
    out[:] = params - x.mean()
    return float(((params[0] - x) ** 2).mean() / 2), out


def round_of(method: TaskMethod, state: DeviceState, start: float, *, seed: int = 0) -> Trained:
    how = {"rng": np.random.default_rng(seed), "noise": SeededNoise(seed, 0, 0)}
    return trained(method, [start], quadratic, state=state, **how)


def test_fedprox_pulls_back_to_where_it_began() -> None:
    # 3: gradient 2, no pull yet: 2. Gradient 1, pull mu (2 - 3) = -0.5: 2 - 0.25.
    method = method_of("fedprox", mu=0.5)
    assert round_of(method, method.init_state(), 3.0).end.tolist() == [1.75]
    plain = method_of("fedprox", mu=0.0)
    assert round_of(plain, plain.init_state(), 3.0).end.tolist() == [1.5]


@pytest.mark.parametrize("weight", [0.0, 0.25])
def test_a_pull_is_the_same_for_clients_at_once(weight: float) -> None:
    rng = np.random.default_rng(1)
    gradient, params, reference = rng.normal(size=(3, 4, 70_001)).astype(np.float32)
    expected = gradient + np.float32(weight) * (params - reference)
    rows, method = gradient.copy(), method_of("fedavg")
    for row in range(4):
        Pull(weight).add(context_of(method, global_params=reference[row]), params[row], rows[row])
    together, context = torch.from_numpy(gradient.copy()), context_of(method)
    context = replace(context, global_params=torch.from_numpy(reference))
    Pull(weight).add(context, torch.from_numpy(params), together)
    np.testing.assert_array_equal(rows, expected)
    np.testing.assert_allclose(together.numpy(), expected, rtol=1e-6, atol=1e-7)


def test_dittos_shared_model_is_fedavgs_and_its_own_is_pulled_to_the_global_one() -> None:
    method = method_of("ditto", lambda_=0.5)
    first = round_of(method, method.init_state(), 3.0)
    assert first.context.start.tolist() == [3.0]
    assert first.end.tolist() == [1.5]  # as FedAvg
    assert first.own.tolist() == [1.75]  # as FedProx, since it begins at the global model

    state = method.advance(first.context, update=first.update, trained=first.own, sent=first.end)
    again = round_of(method, state, 2.0)
    assert again.context.start.tolist() == [2.0]  # the shared model begins at the global one
    assert again.end.tolist() == [1.25]
    # 1.75: gradient 0.75, pull (1.75 - 2) / 2: 1.4375. Gradient 0.4375, pull -0.28125: 1.359375.
    assert again.own.tolist() == [1.359375]


def test_dittos_shared_model_alone_is_sent() -> None:
    method = method_of("ditto")
    noised = privatized(method, np.array([4.0], np.float32))
    assert noised.values.tolist() == [4.0]
    assert not method.init_state().public.mask.any()


def test_with_noise_on_records_dittos_personalized_model_has_none() -> None:
    method = method_of("ditto", unit="record", noise_multiplier=1.0, lambda_=0.5)
    one, other = (round_of(method, method.init_state(), 3.0, seed=seed) for seed in (1, 2))
    assert one.end.tolist() != other.end.tolist()
    assert one.own.tolist() == other.own.tolist() == [1.75]


class RemembersTrained(Transform):
    def change(self, context, update, noise):
        return update

    def remember(self, context, *, update, trained, sent):
        return {"trained": trained}


def test_with_noise_on_records_the_shared_model_sees_nothing_of_an_own_one_that_has_none() -> None:
    spec = PrivacySpec("record", accounting="strict", clip_norm=10.0, noise_multiplier=1.0, delta=0.1, batches=2)
    layout = ParamLayout(("body.w", "head.w"), ((1,), (1,)))
    parts = Method(Head(), stages=(RemembersTrained(), *CLIP_AND_NOISE), own_training=Sgd())
    method = bind(parts, TrainingConfig(**SETTINGS), spec, layout)

    def together(params, x, y, dropout=(), out=None):
        out[:] = params.sum() - x.mean()
        return 0.0, out

    updates = []
    for head in (0.0, 5.0):  # of two devices' data
        state = replace(method.init_state(), own=np.array([0.0, head], np.float32))
        how = {"rng": np.random.default_rng(0), "noise": SeededNoise(0, 0, 0)}
        done = trained(method, [1.0, 1.0], together, state=state, **how)
        after = method.advance(done.context, update=done.update, trained=done.own, sent=done.update)
        assert after.own is done.own
        assert after.private["trained"].tolist() == done.end.tolist() != done.own.tolist()
        updates.append(done.update.tolist())
    assert updates[0] == updates[1]
