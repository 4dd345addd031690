"""FedDPA by hand: which parameters stay, both penalties, and that the change against the global model is sent."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from hushfleet.config.spec import PrivacySpec
from hushfleet.errors import Malformed
from hushfleet.methods import make_method
from hushfleet.methods.fisher import GLOBAL, MOVED, PERSONAL
from hushfleet.methods.state import DeviceState, PublicState, RoundTerms
from hushfleet.model.params import ParamLayout
from hushfleet.privacy.noise import SeededNoise

LAYOUT = ParamLayout(("a.weight", "a.bias", "b.weight"), ((2, 2), (2,), (4,)))  # tensors of 4, 2 and 4
GLOBAL_PARAMS = np.full(10, -1, np.float32)


class Foreseen:
    def __init__(self, value: float) -> None:
        self.value = value

    def normal(self, size: int) -> np.ndarray:
        return np.full(size, self.value)


class Fisher:
    def __init__(self, values: np.ndarray) -> None:
        self.values, self.asked_at = values, None

    def squared_gradient(self, params: np.ndarray) -> np.ndarray:
        self.asked_at = params
        return self.values


def privacy(**changes: object) -> PrivacySpec:
    usual = PrivacySpec("device", accounting="as-published", clip_norm=2.0, noise_multiplier=2.0, delta=0.1)
    return replace(usual, **changes)


def feddpa(*, spec: PrivacySpec | None = None, **config: object):
    return make_method("feddpa", config, spec or privacy(), LAYOUT, rounds=4)


def vector(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


FISHER = vector(0, 2, 4, 5, 3, 3, 10, 0, 0, 5)  # by tensors: 0, 0.4, 0.8, 1 | 0, 0 | 1, 0, 0, 0.5
KEPT = [2, 3, 6, 9]


def returning(method) -> DeviceState:
    """A device whose own model is 0, 1, ..., 9, prepared for a round."""
    state = DeviceState(PublicState.initial(10), np.arange(10, dtype=np.float32))
    return method.prepare(state, GLOBAL_PARAMS, Fisher(FISHER))


def test_above_the_threshold_in_its_tensor_a_parameter_is_the_devices_own() -> None:
    method = feddpa()
    state = returning(method)
    np.testing.assert_array_equal(np.flatnonzero(state.private[PERSONAL]), KEPT)  # 0.4 itself is not above
    np.testing.assert_array_equal(method.start(state, GLOBAL_PARAMS), [-1, -1, 2, 3, -1, -1, 6, -1, -1, 9])


def test_the_first_round_divides_the_global_model() -> None:
    method, data = feddpa(), Fisher(FISHER)
    state = method.prepare(method.init_state(), GLOBAL_PARAMS, data)
    assert data.asked_at is GLOBAL_PARAMS
    np.testing.assert_array_equal(method.start(state, GLOBAL_PARAMS), GLOBAL_PARAMS)
    personal, shared = method.passes(state)
    np.testing.assert_array_equal(np.flatnonzero(personal), KEPT)
    np.testing.assert_array_equal(shared, ~personal)


def test_parts_are_trained_batch_by_batch_or_epoch_by_epoch() -> None:
    assert [list(feddpa().active_passes(epoch, 2)) for epoch in range(2)] == [[0, 1], [0, 1]]
    phases = feddpa(personal_epochs=1, local_epochs=3)
    assert [list(phases.active_passes(epoch, 2)) for epoch in range(3)] == [[0], [1], [1]]
    assert feddpa().gradients_per_batch(feddpa().config) == 2
    assert phases.gradients_per_batch(phases.config) == 1


@pytest.mark.parametrize("scale", [0.01, 1.0])  # shorter and longer than C
def test_penalties_against_automatic_differentiation(scale: float) -> None:
    method = feddpa(lambda_1=0.7, lambda_2=0.3)
    state = returning(method)
    params = (GLOBAL_PARAMS + scale * np.random.default_rng(1).normal(size=10)).astype(np.float64)
    gradient = np.zeros(10)
    method.local_gradient(state, method.start(state, GLOBAL_PARAMS), params, gradient)

    w = torch.tensor(params, requires_grad=True)
    moved = w - torch.tensor(GLOBAL_PARAMS)
    lengths = sum(moved[part].norm() for part in LAYOUT.slices.values())
    (first,) = torch.autograd.grad(0.7 / 2 * lengths, w, retain_graph=True)
    (second,) = torch.autograd.grad(0.3 / 2 * (lengths - 2.0).abs(), w)
    expected = torch.where(torch.tensor(state.private[PERSONAL]), first, second)
    np.testing.assert_allclose(gradient, expected.numpy(), rtol=1e-6)


def test_what_has_not_moved_is_not_pulled_and_no_clip_norm_pulls_nothing() -> None:
    gradient = np.zeros(10, np.float32)
    method = feddpa()
    state = method.prepare(method.init_state(), GLOBAL_PARAMS, Fisher(FISHER))
    method.local_gradient(state, GLOBAL_PARAMS, GLOBAL_PARAMS.copy(), gradient)
    np.testing.assert_array_equal(gradient, 0)
    plain = feddpa(spec=privacy(clip_norm=math.inf, noise_multiplier=0.0))
    plain.local_gradient(state, GLOBAL_PARAMS, GLOBAL_PARAMS + 1, gradient)
    np.testing.assert_array_equal(gradient[~state.private[PERSONAL]], 0)
    assert (gradient[KEPT] > 0).all()


def test_the_change_against_the_global_model_is_clipped_whole_and_noised() -> None:
    method = feddpa()
    state = returning(method)
    update = vector(0, 0, 0, 0, 1, 0, 0, 0, 0, 0)
    change = vector(0, 0, 3, 4, 1, 0, 7, 0, 0, 10)  # own minus global on the personal parameters, the update elsewhere
    release = method.release(state, update, RoundTerms(4), noise=Foreseen(1.0))
    noise = 2.0 * 2.0 / math.sqrt(4)
    np.testing.assert_allclose(release.values, 2 * change / np.linalg.norm(change) + noise, atol=noise * 2**-10)
    np.testing.assert_allclose(release.noise_stds, noise)
    assert release.charge.noise_multiplier == 1.0
    assert method.multiplier_release(RoundTerms(4), participants=4) == 2.0


def test_strict_accounting_does_not_split_the_noise() -> None:
    method = feddpa(spec=privacy(accounting="strict"))
    release = method.release(returning(method), np.zeros(10, np.float32), RoundTerms(4), noise=Foreseen(0.0))
    np.testing.assert_allclose(release.noise_stds, 4.0)
    assert release.charge.noise_multiplier == 2.0


def test_with_the_unit_record_the_last_update_stands_for_fisher_values() -> None:
    method = feddpa(spec=privacy(unit="record", sample_rate=0.1, batches=3))
    data, own = Fisher(FISHER), np.arange(10, dtype=np.float32)
    first = method.prepare(method.init_state(), GLOBAL_PARAMS, data)
    assert not first.private[PERSONAL].any()
    state = method.advance(first, update=np.sqrt(FISHER), trained=own, sent=own)
    assert list(state.private) == [MOVED]
    ready = method.prepare(state, GLOBAL_PARAMS, data)
    assert data.asked_at is None
    np.testing.assert_array_equal(np.flatnonzero(ready.private[PERSONAL]), KEPT)
    release = method.release(ready, np.zeros(10, np.float32), RoundTerms(4), noise=Foreseen(1.0))
    np.testing.assert_array_equal(release.values[KEPT], [3, 4, 7, 10])
    assert release.charge.steps == 3
    assert release.charge.noise_multiplier == pytest.approx(2.0 / math.sqrt(2))  # both parts of each batch


def test_numpy_one_by_one_equals_torch_all_at_once() -> None:
    clients, method, rng = 3, feddpa(), np.random.default_rng(3)
    own, moves, fisher = (rng.normal(size=(clients, 10)).astype(np.float32) for _ in range(3))
    states = [
        method.prepare(DeviceState(PublicState.initial(10), own[i]), GLOBAL_PARAMS, Fisher(fisher[i] ** 2))
        for i in range(clients)
    ]
    stacked = DeviceState(
        PublicState(torch.zeros(clients, 10, dtype=torch.bool), torch.zeros(clients)),
        torch.from_numpy(own),
        {name: torch.from_numpy(np.stack([s.private[name] for s in states])) for name in (PERSONAL, GLOBAL)},
    )
    starts = method.start(stacked, torch.from_numpy(GLOBAL_PARAMS))
    gradients = torch.zeros(clients, 10)
    method.local_gradient(stacked, starts, starts + torch.from_numpy(moves), gradients)
    noise = [SeededNoise(1, i, 1) for i in range(clients)]
    release = method.release(stacked, torch.from_numpy(moves), RoundTerms(clients), noise=noise)
    for i in range(clients):
        start, gradient = method.start(states[i], GLOBAL_PARAMS), np.zeros(10, np.float32)
        np.testing.assert_array_equal(starts[i].numpy(), start)
        method.local_gradient(states[i], start, start + moves[i], gradient)
        np.testing.assert_allclose(gradients[i].numpy(), gradient, rtol=1e-5, atol=1e-7)
        alone = method.release(states[i], moves[i], RoundTerms(clients), noise=SeededNoise(1, i, 1))
        np.testing.assert_allclose(release.values[i].numpy(), alone.values, rtol=1e-5, atol=1e-6)
        for part, both in zip(method.passes(states[i]), method.passes(stacked), strict=True):
            np.testing.assert_array_equal(both[i].numpy(), part)


def test_a_phase_that_leaves_the_shared_part_untrained_is_refused() -> None:
    with pytest.raises(Malformed, match="personal_epochs"):
        feddpa(personal_epochs=2, local_epochs=2)
