"""FedADDP by hand: each parameter's room and noise, what is charged for them, and what strict accounting changes."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from hushfleet.config.spec import PrivacySpec
from hushfleet.methods import make_method
from hushfleet.methods.fisher import GLOBAL, PERSONAL
from hushfleet.methods.state import DeviceState, PublicState, RoundTerms
from hushfleet.model.params import ParamLayout
from hushfleet.privacy.noise import SeededNoise

LAYOUT = ParamLayout(("a.weight", "a.bias", "b.weight"), ((2, 2), (2,), (4,)))  # 3 tensors, 2 layers
GLOBAL_PARAMS = np.array([2, 2, 2, 2, 0, 0, 3, 0, 0, 0], np.float32)  # layers of norm 4 and 3


class Foreseen:
    def __init__(self, value: float) -> None:
        self.value = value

    def normal(self, size: int) -> np.ndarray:
        return np.full(size, self.value)


class Fisher:
    def __init__(self, values: np.ndarray) -> None:
        self.values = values

    def squared_gradient(self, params: np.ndarray) -> np.ndarray:
        return self.values


def privacy(**changes: object) -> PrivacySpec:
    usual = PrivacySpec("device", accounting="as-published", clip_norm=2.0, noise_multiplier=2.0, delta=0.1)
    return replace(usual, **changes)


def fedaddp(*, spec: PrivacySpec | None = None, **config: object):
    return make_method("fedaddp", config, spec or privacy(), LAYOUT, rounds=4)


def vector(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


FISHER = vector(1, 0, 0, 0, 0, 0, 0, 0, 0, 1)  # personal: the first and the last


def returning(method, own: float = 10.0) -> DeviceState:
    state = DeviceState(PublicState.initial(10), np.full(10, own, np.float32))
    return method.prepare(state, GLOBAL_PARAMS, Fisher(FISHER))


def test_each_parameter_has_room_and_noise_by_its_own_size() -> None:
    method = fedaddp(beta=0.2)
    # start: 10, 2, 2, 2, 0, 0, 3, 0, 0, 10; trained: 11, 2.1, 4, 2, 0, 0, 0, 0, 5, 8; q is a tenth of that
    update = vector(1, 0.1, 2, 0, 0, 0, -3, 0, 5, -2)
    room = np.array([1.1, 0.21, 0.4, 0.2, 0, 0, 0, 0, 0.5, 0.8])
    clamped = np.array([1, 0.1, 0.4, 0, 0, 0, 0, 0, 0.5, -0.8])
    against_global = clamped + np.array([8, 0, 0, 0, 0, 0, 0, 0, 0, 10])
    noise = math.sqrt(3) * 2.0 * 2 * room  # sqrt(M) sigma 2 q, not divided by the four devices
    release = method.release(returning(method), update, RoundTerms(4), noise=Foreseen(1.0))
    np.testing.assert_allclose(release.values, against_global + noise, atol=2**-10 * noise.max())


def test_as_published_nothing_is_promised() -> None:
    method = fedaddp()
    release = method.release(returning(method), np.zeros(10, np.float32), RoundTerms(4), noise=Foreseen(1.0))
    assert release.charge.mechanism == "none"
    assert release.charge.noise_multiplier == 0
    assert method.multiplier_release(RoundTerms(4), participants=4) == 0
    np.testing.assert_array_equal(release.noise_stds, 0)  # a declared width would be a function of the data
    assert np.isinf(release.clip_norms).all()
    assert not method.clips


def test_without_a_clip_norm_the_model_is_sent_as_it_is() -> None:
    method = fedaddp(spec=privacy(clip_norm=math.inf, noise_multiplier=0.0))
    update = vector(0, 100, 0, 0, 0, 0, 0, 0, 0, 0)
    release = method.release(returning(method), update, RoundTerms(4), noise=Foreseen(1.0))
    np.testing.assert_array_equal(release.values, vector(8, 100, 0, 0, 0, 0, 0, 0, 0, 10))


def test_the_second_penalty_pulls_towards_the_last_rounds_thresholds() -> None:
    method = fedaddp(lambda_2=2.0, beta=0.2)
    first = returning(method)
    moved = GLOBAL_PARAMS + vector(0, 0.5, 0, 0, 0, 0, 0, 0, 0, 0)
    before, after = np.zeros(10, np.float32), np.zeros(10, np.float32)
    method.local_gradient(first, method.start(first, GLOBAL_PARAMS), moved, before)
    assert before[1] == pytest.approx(1.0)  # length 0 in the first round: any change is too long
    # |2 q| by tensors of a trained model of tens: 0.2 (20 + sqrt(200) + 20), longer than the change
    second = method.advance(first, update=moved, trained=np.full(10, 10, np.float32), sent=moved)
    assert float(second.private["length"]) == pytest.approx(0.2 * (40 + math.sqrt(200)))
    second = method.prepare(second, GLOBAL_PARAMS, Fisher(FISHER))
    method.local_gradient(second, method.start(second, GLOBAL_PARAMS), moved, after)
    assert after[1] == pytest.approx(-1.0)


def test_strict_layers_share_the_clip_norm_as_the_global_model_is_divided() -> None:
    method = fedaddp(spec=privacy(accounting="strict"))
    update = vector(0, 1e4, 0, 0, 0, 0, 1e4, 0, 0, 0)
    release = method.release(returning(method, own=0.0), update, RoundTerms(4), noise=Foreseen(0.0))
    bounds = 2.0 * np.array([4, 3]) / 5
    np.testing.assert_allclose(release.clip_norms, bounds, rtol=1e-6)
    np.testing.assert_allclose(release.noise_stds, math.sqrt(2) * 2.0 * bounds, rtol=1e-6)
    assert np.linalg.norm(release.values[:6]) == pytest.approx(bounds[0], rel=1e-2)
    assert np.linalg.norm(release.values) <= 2.0 + 10**0.5 * 2**-10 * release.noise_stds.max()
    assert release.charge.noise_multiplier == 2.0
    assert method.clips


def test_strict_noise_and_bounds_do_not_follow_the_devices_own_model() -> None:
    strict, published = fedaddp(spec=privacy(accounting="strict")), fedaddp()
    update = np.zeros(10, np.float32)

    def spread(method, own: float) -> np.ndarray:
        state = returning(method, own)
        loud, quiet = (method.release(state, update, RoundTerms(4), noise=Foreseen(v)).values for v in (1.0, 0.0))
        return loud - quiet

    np.testing.assert_allclose(spread(strict, 1.0), spread(strict, 5.0), rtol=2**-9)
    assert not np.allclose(spread(published, 1.0), spread(published, 5.0))


def test_a_layer_of_zeros_keeps_a_little_of_the_clip_norm() -> None:
    method = fedaddp(spec=privacy(accounting="strict"))
    state = method.prepare(method.init_state(), vector(*[1] * 6, *[0] * 4), Fisher(FISHER))
    release = method.release(state, np.zeros(10, np.float32), RoundTerms(1), noise=Foreseen(0.0))
    np.testing.assert_allclose(release.clip_norms, 2 * np.sqrt(np.array([1, 0.001]) / 1.001), rtol=1e-6)


@pytest.mark.parametrize("accounting", ["as-published", "strict"])
def test_numpy_one_by_one_equals_torch_all_at_once(accounting: str) -> None:
    clients, method, rng = 3, fedaddp(spec=privacy(accounting=accounting)), np.random.default_rng(3)
    own, moves, fisher = (rng.normal(size=(clients, 10)).astype(np.float32) for _ in range(3))
    states = [
        method.prepare(DeviceState(PublicState.initial(10), own[i]), GLOBAL_PARAMS, Fisher(fisher[i] ** 2))
        for i in range(clients)
    ]
    stacked = DeviceState(
        PublicState(torch.zeros(clients, 10, dtype=torch.bool), 0),
        torch.from_numpy(own),
        {name: torch.from_numpy(np.stack([s.private[name] for s in states])) for name in (PERSONAL, GLOBAL)},
    )
    noise = [SeededNoise(1, i, 1) for i in range(clients)]
    release = method.release(stacked, torch.from_numpy(moves), RoundTerms(clients), noise=noise)
    after = method.advance(stacked, update=release.values, trained=torch.from_numpy(own + moves), sent=release.values)
    for i in range(clients):
        alone = method.release(states[i], moves[i], RoundTerms(clients), noise=SeededNoise(1, i, 1))
        np.testing.assert_allclose(release.values[i].numpy(), alone.values, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(release.noise_stds[i].numpy(), alone.noise_stds, rtol=1e-6)
        one = method.advance(states[i], update=alone.values, trained=own[i] + moves[i], sent=alone.values)
        for name, value in one.private.items():
            np.testing.assert_allclose(after.private[name][i].numpy(), value, rtol=1e-6)
            assert isinstance(value, np.ndarray)
