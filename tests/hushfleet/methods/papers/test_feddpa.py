"""FedDPA by hand: which parameters stay, both penalties, and that the change against the global model is sent."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from hushfleet.errors import Malformed
from hushfleet.methods import make_method
from hushfleet.methods.cost import RoundTerms
from hushfleet.methods.papers.fisher import MOVED
from hushfleet.methods.state import DeviceState, PublicState, RoundContext
from hushfleet.params import ParamLayout
from hushfleet.wire.format.spec import PrivacySpec
from support.methods import Constant, Fisher, context_of, penalty, stacked

LAYOUT = ParamLayout(("a.weight", "a.bias", "b.weight"), ((2, 2), (2,), (4,)))  # tensors of 4, 2 and 4
GLOBAL_PARAMS = np.full(10, -1, np.float32)


def privacy(**changes: object) -> PrivacySpec:
    usual = PrivacySpec("device", accounting="as-published", clip_norm=2.0, noise_multiplier=2.0, delta=0.1)
    return replace(usual, **changes)


def feddpa(*, spec: PrivacySpec | None = None, **config: object):
    return make_method("feddpa", config, spec or privacy(), LAYOUT, rounds=4)


def vector(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


FISHER = vector(0, 2, 4, 5, 3, 3, 10, 0, 0, 5)  # by tensors: 0, 0.4, 0.8, 1 | 0, 0 | 1, 0, 0, 0.5
KEPT = [2, 3, 6, 9]


def returning(method, terms: RoundTerms | None = None) -> RoundContext:
    """A device whose personalized model is 0, 1, ..., 9, at the beginning of a round."""
    state = DeviceState(PublicState.initial(10), np.arange(10, dtype=np.float32))
    return context_of(method, state, GLOBAL_PARAMS, terms, samples=Fisher(FISHER))


def test_above_the_threshold_in_its_tensor_a_parameter_is_the_devices_own() -> None:
    context = returning(feddpa())
    np.testing.assert_array_equal(np.flatnonzero(context.chosen), KEPT)  # 0.4 itself is not above
    np.testing.assert_array_equal(context.start, [-1, -1, 2, 3, -1, -1, 6, -1, -1, 9])


def test_the_first_round_divides_the_global_model() -> None:
    method, data = feddpa(), Fisher(FISHER)
    context = context_of(method, None, GLOBAL_PARAMS, samples=data)
    assert data.asked_at is GLOBAL_PARAMS
    np.testing.assert_array_equal(context.start, GLOBAL_PARAMS)
    personal, shared = method.training.order.masks(context)
    np.testing.assert_array_equal(np.flatnonzero(personal), KEPT)
    np.testing.assert_array_equal(shared, ~personal)


def test_parts_are_trained_batch_by_batch_or_epoch_by_epoch() -> None:
    plain, phases = feddpa().training, feddpa(personal_epochs=1, local_epochs=3).training
    assert [list(plain.order.active(epoch, 2)) for epoch in range(2)] == [[0, 1], [0, 1]]
    assert [list(phases.order.active(epoch, 2)) for epoch in range(3)] == [[0], [1], [1]]
    assert plain.gradients_per_batch == 2
    assert phases.gradients_per_batch == 1


@pytest.mark.parametrize("scale", [0.01, 1.0])  # shorter and longer than C
def test_penalties_against_automatic_differentiation(scale: float) -> None:
    method = feddpa(lambda_1=0.7, lambda_2=0.3)
    context = returning(method)
    params = (GLOBAL_PARAMS + scale * np.random.default_rng(1).normal(size=10)).astype(np.float64)
    gradient = penalty(method, context, params)

    w = torch.tensor(params, requires_grad=True)
    moved = w - torch.tensor(GLOBAL_PARAMS)
    lengths = sum(moved[part].norm() for part in LAYOUT.slices.values())
    (first,) = torch.autograd.grad(0.7 / 2 * lengths, w, retain_graph=True)
    (second,) = torch.autograd.grad(0.3 / 2 * (lengths - 2.0).abs(), w)
    expected = torch.where(torch.tensor(context.chosen), first, second)
    np.testing.assert_allclose(gradient, expected.numpy(), rtol=1e-6)


def test_what_has_not_moved_is_not_pulled_and_no_clip_norm_pulls_nothing() -> None:
    method = feddpa()
    context = context_of(method, None, GLOBAL_PARAMS, samples=Fisher(FISHER))
    np.testing.assert_array_equal(penalty(method, context, GLOBAL_PARAMS.copy()), 0)
    plain = feddpa(spec=privacy(clip_norm=math.inf, noise_multiplier=0.0))
    context = context_of(plain, None, GLOBAL_PARAMS, samples=Fisher(FISHER))
    gradient = penalty(plain, context, GLOBAL_PARAMS + 1)
    np.testing.assert_array_equal(gradient[~context.chosen], 0)
    assert (gradient[KEPT] > 0).all()


def test_the_change_against_the_global_model_is_clipped_whole_and_noised() -> None:
    method = feddpa()
    update = vector(0, 0, 0, 0, 1, 0, 0, 0, 0, 0)
    change = vector(0, 0, 3, 4, 1, 0, 7, 0, 0, 10)  # own minus global on the personal parameters, the update elsewhere
    noised = method.privatize(returning(method, RoundTerms(4)), update, Constant(1.0))
    noise = 2.0 * 2.0 / math.sqrt(4)
    np.testing.assert_allclose(noised.values, 2 * change / np.linalg.norm(change) + noise, atol=noise * 2**-10)
    np.testing.assert_allclose(noised.noise_stds, noise)
    assert noised.charge.noise_multiplier == 1.0
    assert method.multiplier_release(RoundTerms(4), participants=4) == 2.0


def test_strict_accounting_does_not_split_the_noise() -> None:
    method = feddpa(spec=privacy(accounting="strict"))
    noised = method.privatize(returning(method, RoundTerms(4)), np.zeros(10, np.float32), Constant(0.0))
    np.testing.assert_allclose(noised.noise_stds, 4.0)
    assert noised.charge.noise_multiplier == 2.0


def test_with_the_unit_record_the_last_update_stands_for_fisher_values() -> None:
    method = feddpa(spec=privacy(unit="record", sample_rate=0.1, batches=3))
    data, own = Fisher(FISHER), np.arange(10, dtype=np.float32)
    first = context_of(method, None, GLOBAL_PARAMS, samples=data)
    assert not first.chosen.any()
    state = method.advance(first, update=np.sqrt(FISHER), trained=own, sent=own)
    assert list(state.private) == [MOVED]
    context = context_of(method, state, GLOBAL_PARAMS, samples=data)
    assert data.asked_at is None
    np.testing.assert_array_equal(np.flatnonzero(context.chosen), KEPT)
    noised = method.privatize(context, np.zeros(10, np.float32), Constant(1.0))
    np.testing.assert_array_equal(noised.values[KEPT], [3, 4, 7, 10])
    assert noised.charge.steps == 3
    assert noised.charge.noise_multiplier == pytest.approx(2.0 / math.sqrt(2))  # both parts of each batch


def test_clients_at_once_train_their_parts_as_one_by_one() -> None:
    method, rng = feddpa(), np.random.default_rng(3)
    own, moves, fisher = (rng.normal(size=(3, 10)).astype(np.float32) for _ in range(3))
    contexts = [
        context_of(method, DeviceState(PublicState.initial(10), own[i]), GLOBAL_PARAMS, samples=Fisher(fisher[i] ** 2))
        for i in range(3)
    ]
    together = stacked(contexts)
    gradients = penalty(method, together, together.start + torch.from_numpy(moves))
    for index, context in enumerate(contexts):
        alone = penalty(method, context, context.start + moves[index])
        np.testing.assert_allclose(gradients[index].numpy(), alone, rtol=1e-5, atol=1e-7)
        order = method.training.order
        for part, both in zip(order.masks(context), order.masks(together), strict=True):
            np.testing.assert_array_equal(both[index].numpy(), part)


def test_a_phase_that_leaves_the_shared_part_untrained_is_refused() -> None:
    with pytest.raises(Malformed, match="personal_epochs"):
        feddpa(personal_epochs=2, local_epochs=2)
