"""FedADDP by hand: each parameter's room and noise, what is charged for them, and what strict accounting changes."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from hushfleet.methods import make_method
from hushfleet.methods.cost import RoundTerms
from hushfleet.methods.state import DeviceState, PublicState, RoundContext
from hushfleet.params import ParamLayout
from hushfleet.wire.format.spec import PrivacySpec
from support.methods import Constant, Fisher, context_of, penalty, stacked

LAYOUT = ParamLayout(("a.weight", "a.bias", "b.weight"), ((2, 2), (2,), (4,)))  # 3 tensors, 2 layers
GLOBAL_PARAMS = np.array([2, 2, 2, 2, 0, 0, 3, 0, 0, 0], np.float32)  # layers of norm 4 and 3


def privacy(**changes: object) -> PrivacySpec:
    usual = PrivacySpec("device", accounting="as-published", clip_norm=2.0, noise_multiplier=2.0, delta=0.1)
    return replace(usual, **changes)


def fedaddp(*, spec: PrivacySpec | None = None, **config: object):
    return make_method("fedaddp", config, spec or privacy(), LAYOUT, rounds=4)


def vector(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


FISHER = vector(1, 0, 0, 0, 0, 0, 0, 0, 0, 1)  # personal: the first and the last


def returning(method, own: float = 10.0) -> RoundContext:
    state = DeviceState(PublicState.initial(10), np.full(10, own, np.float32))
    return context_of(method, state, GLOBAL_PARAMS, RoundTerms(4), samples=Fisher(FISHER))


def test_each_parameter_has_room_and_noise_by_its_own_size() -> None:
    method = fedaddp(beta=0.2)
    # start: 10, 2, 2, 2, 0, 0, 3, 0, 0, 10; trained: 11, 2.1, 4, 2, 0, 0, 0, 0, 5, 8; q is a tenth of that
    update = vector(1, 0.1, 2, 0, 0, 0, -3, 0, 5, -2)
    room = np.array([1.1, 0.21, 0.4, 0.2, 0, 0, 0, 0, 0.5, 0.8])
    clamped = np.array([1, 0.1, 0.4, 0, 0, 0, 0, 0, 0.5, -0.8])
    against_global = clamped + np.array([8, 0, 0, 0, 0, 0, 0, 0, 0, 10])
    noise = math.sqrt(3) * 2.0 * 2 * room  # sqrt(M) sigma 2 q, not divided by the four devices
    noised = method.privatize(returning(method), update, Constant(1.0))
    np.testing.assert_allclose(noised.values, against_global + noise, atol=2**-10 * noise.max())


def test_as_published_nothing_is_promised() -> None:
    method = fedaddp()
    noised = method.privatize(returning(method), np.zeros(10, np.float32), Constant(1.0))
    assert noised.charge.mechanism == "none"
    assert noised.charge.noise_multiplier == 0
    assert method.multiplier_release(RoundTerms(4), participants=4) == 0
    np.testing.assert_array_equal(noised.noise_stds, 0)  # a declared width would be a function of the data
    assert np.isinf(noised.clip_norms).all()
    assert math.isinf(method.cost(RoundTerms(4)).bound)


def test_without_a_clip_norm_the_model_is_sent_as_it_is() -> None:
    method = fedaddp(spec=privacy(clip_norm=math.inf, noise_multiplier=0.0))
    update = vector(0, 100, 0, 0, 0, 0, 0, 0, 0, 0)
    noised = method.privatize(returning(method), update, Constant(1.0))
    np.testing.assert_array_equal(noised.values, vector(8, 100, 0, 0, 0, 0, 0, 0, 0, 10))


def test_the_second_penalty_pulls_towards_the_last_rounds_thresholds() -> None:
    method = fedaddp(lambda_2=2.0, beta=0.2)
    first = returning(method)
    moved = GLOBAL_PARAMS + vector(0, 0.5, 0, 0, 0, 0, 0, 0, 0, 0)
    before = penalty(method, first, moved)
    assert before[1] == pytest.approx(1.0)  # length 0 in the first round: any change is too long
    # |2 q| by tensors of a trained model of tens: 0.2 (20 + sqrt(200) + 20), longer than the change
    state = method.advance(first, update=moved, trained=np.full(10, 10, np.float32), sent=moved)
    assert float(state.private["length"]) == pytest.approx(0.2 * (40 + math.sqrt(200)))
    after = penalty(method, context_of(method, state, GLOBAL_PARAMS, samples=Fisher(FISHER)), moved)
    assert after[1] == pytest.approx(-1.0)


def test_strict_layers_share_the_clip_norm_as_the_global_model_is_divided() -> None:
    method = fedaddp(spec=privacy(accounting="strict"))
    update = vector(0, 1e4, 0, 0, 0, 0, 1e4, 0, 0, 0)
    noised = method.privatize(returning(method, own=0.0), update, Constant(0.0))
    bounds = 2.0 * np.array([4, 3]) / 5
    np.testing.assert_allclose(noised.clip_norms, bounds, rtol=1e-6)
    np.testing.assert_allclose(noised.noise_stds, math.sqrt(2) * 2.0 * bounds, rtol=1e-6)
    assert np.linalg.norm(noised.values[:6]) == pytest.approx(bounds[0], rel=1e-2)
    assert np.linalg.norm(noised.values) <= 2.0 + 10**0.5 * 2**-10 * noised.noise_stds.max()
    assert noised.charge.noise_multiplier == 2.0
    assert method.cost(RoundTerms(4)).bound == 2.0


def test_strict_noise_and_bounds_do_not_follow_the_devices_personalized_model() -> None:
    strict, published = fedaddp(spec=privacy(accounting="strict")), fedaddp()
    update = np.zeros(10, np.float32)

    def spread(method, own: float) -> np.ndarray:
        context = returning(method, own)
        loud, quiet = (method.privatize(context, update, Constant(v)).values for v in (1.0, 0.0))
        return loud - quiet

    np.testing.assert_allclose(spread(strict, 1.0), spread(strict, 5.0), rtol=2**-9)
    assert not np.allclose(spread(published, 1.0), spread(published, 5.0))


def test_a_layer_of_zeros_keeps_a_little_of_the_clip_norm() -> None:
    method = fedaddp(spec=privacy(accounting="strict"))
    context = context_of(method, None, vector(*[1] * 6, *[0] * 4), samples=Fisher(FISHER))
    noised = method.privatize(context, np.zeros(10, np.float32), Constant(0.0))
    np.testing.assert_allclose(noised.clip_norms, 2 * np.sqrt(np.array([1, 0.001]) / 1.001), rtol=1e-6)


@pytest.mark.parametrize("accounting", ["as-published", "strict"])
def test_clients_at_once_are_pulled_as_one_by_one(accounting: str) -> None:
    method, rng = fedaddp(spec=privacy(accounting=accounting), lambda_1=0.7, lambda_2=0.3), np.random.default_rng(3)
    own, moves, fisher = (rng.normal(size=(3, 10)).astype(np.float32) for _ in range(3))
    contexts = []
    for index in range(3):
        state = DeviceState(PublicState.initial(10), own[index], {"length": np.float64(10.0 * index)})
        contexts.append(context_of(method, state, GLOBAL_PARAMS, samples=Fisher(fisher[index] ** 2)))
    together = stacked(contexts)
    gradients = penalty(method, together, together.start + torch.from_numpy(moves))
    for index, context in enumerate(contexts):
        alone = penalty(method, context, context.start + moves[index])
        np.testing.assert_allclose(gradients[index].numpy(), alone, rtol=1e-5, atol=1e-7)
