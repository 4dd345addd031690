"""BLUR + LUS and DP-FedSAM against numbers computed by hand, and top-k against sorting by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hushfleet.errors import PrivacyError
from hushfleet.methods import make_method
from hushfleet.methods.cost import RoundTerms
from hushfleet.methods.sparse import KeepLargest
from hushfleet.methods.state import DeviceState, PublicState
from hushfleet.methods.task_method import TaskMethod
from hushfleet.params import ParamLayout
from hushfleet.wire.format.spec import PrivacySpec
from support.methods import BLACK, Constant, context_of, penalty, privatized, stacked
from support.methods import trained as train

LAYOUT = ParamLayout(("a.weight", "b.weight"), ((2,), (2,)))
SETTINGS = {"optimizer": "sgd", "learning_rate": 0.5, "batch_size": 1}


def method_of(name: str, *, unit: str = "device", noise_multiplier: float = 2.0, **config: Any) -> TaskMethod:
    spec = PrivacySpec(
        unit, accounting="as-published", clip_norm=1.0, noise_multiplier=noise_multiplier, delta=0.1, batches=3
    )
    return make_method(name, {**SETTINGS, **config}, spec, LAYOUT, rounds=3)


def keep_largest(update: np.ndarray, share: float, where: np.ndarray) -> np.ndarray:
    layout = ParamLayout(("w",), ((len(update),),))
    method = make_method("dp-fedavg", {}, PrivacySpec("device", "strict", 1.0, 0.0, 0.1), layout, rounds=1)
    state = DeviceState(PublicState(~where, 0))
    return KeepLargest(share).change(context_of(method, state), update, Constant())


@pytest.mark.parametrize(
    ("share", "kept"),
    [(1.0, [1, -3, 2, 0, 3]), (0.6, [0, -3, 2, 0, 3]), (0.2, [0, -3, 0, 0, 0]), (0.21, [0, -3, 0, 0, 3])],
)
def test_the_largest_entries_are_kept_and_the_first_of_equals(share: float, kept: list[float]) -> None:
    update = np.array([1, -3, 2, 0, 3], np.float32)
    assert keep_largest(update, share, np.ones(5, bool)).tolist() == kept
    assert update.tolist() == [1, -3, 2, 0, 3]


def test_what_is_personal_is_neither_kept_nor_counted() -> None:
    update = np.array([9, 1, 2, 3, 4], np.float32)
    shared = np.array([False, True, True, True, True])
    assert keep_largest(update, 0.5, shared).tolist() == [0, 0, 0, 3, 4]
    assert keep_largest(update, 1.0, shared).tolist() == [0, 1, 2, 3, 4]


@settings(max_examples=40)
@given(st.integers(0, 2**31), st.integers(1, 30), st.sampled_from([0.01, 0.1, 0.5, 0.55, 0.9, 1.0]))
def test_the_largest_are_those_of_sorting(seed: int, size: int, share: float) -> None:
    rng = np.random.default_rng(seed)
    update = rng.integers(-4, 5, size).astype(np.float32)  # with ties
    where = rng.random(size) < 0.7
    kept = keep_largest(update, share, where)
    entries = sorted(abs(update[where]), reverse=True)
    count = -(-round(share * 100) * len(entries) // 100)
    assert sorted(abs(kept), reverse=True)[:count] == entries[:count]
    assert not kept[~where].any()
    assert np.count_nonzero(kept) <= count


@pytest.mark.parametrize("name", ["blur-lus", "dp-fedsam"])
def test_the_update_is_thinned_then_clipped_and_every_entry_noised(name: str) -> None:
    method = method_of(name, keep_share=0.5)
    update = np.array([3.0, 1.0, -1.0, -4.0], np.float32)  # thinned to (3, 0, 0, -4), of norm 5
    noised = privatized(method, update, RoundTerms(4), Constant(1.0))
    # noise: sigma C / sqrt(n) = 1
    np.testing.assert_allclose(noised.values, [1.6, 1.0, 1.0, 0.2], atol=2**-10)  # on the noise's grid
    np.testing.assert_allclose(noised.noise_stds, 1.0)
    assert noised.charge.noise_multiplier == 1.0


@pytest.mark.parametrize("broken", [np.nan, np.inf])
@pytest.mark.parametrize("share", [0.25, 1.0])
@pytest.mark.parametrize("name", ["blur-lus", "dp-fedsam"])
def test_what_has_diverged_is_not_thinned_into_something_else(name: str, share: float, broken: float) -> None:
    with pytest.raises(PrivacyError, match="not finite"):
        privatized(method_of(name, keep_share=share), np.array([1, broken, 3, 4], np.float32))


@pytest.mark.parametrize("name", ["blur-lus", "dp-fedsam"])
def test_with_noise_on_records_the_update_is_thinned_and_sent(name: str) -> None:
    method = method_of(name, keep_share=0.5, unit="record")
    update = np.array([3.0, 1.0, -1.0, -4.0], np.float32)
    assert privatized(method, update, RoundTerms(), Constant(1.0)).values.tolist() == [3, 0, 0, -4]


def test_blur_pulls_only_what_has_moved_beyond_the_clip_norm() -> None:
    method = method_of("blur-lus", bound_weight=0.5)
    start = np.array([1.0, 1.0, 1.0, 1.0], np.float32)
    for moved, pull in (([3, 0, 0, -4], [1.5, 0, 0, -2]), ([0.6, 0, 0, -0.8], [0, 0, 0, 0]), ([0] * 4, [0] * 4)):
        gradient = np.full(4, 7.0, np.float32)
        penalty(method, context_of(method, global_params=start), start + np.array(moved, np.float32), gradient)
        np.testing.assert_allclose(gradient - 7, pull, rtol=1e-6)


def test_blur_is_the_same_for_clients_at_once() -> None:
    rng = np.random.default_rng(4)
    layout = ParamLayout(("w",), ((70_001,),))
    spec = PrivacySpec("device", accounting="strict", clip_norm=200.0, noise_multiplier=0.0, delta=0.1)
    method = make_method("blur-lus", {"bound_weight": 0.25}, spec, layout, rounds=1)
    start, gradient = rng.normal(size=(2, 3, 70_001)).astype(np.float32)
    params = start + rng.normal(size=start.shape).astype(np.float32) * np.array([[0.5], [1], [2]], np.float32)
    together, alone = torch.from_numpy(gradient.copy()), gradient.copy()
    contexts = [context_of(method, start=row) for row in start]
    penalty(method, stacked(contexts), torch.from_numpy(params), together)
    for row, context in enumerate(contexts):
        penalty(method, context, params[row], alone[row])
    np.testing.assert_allclose(together.numpy(), alone, rtol=1e-6, atol=1e-6)
    assert [bool((alone[row] != gradient[row]).any()) for row in range(3)] == [False, True, True]


def test_blur_has_no_bound_where_the_clip_norm_is_a_gradients() -> None:
    method = method_of("blur-lus", unit="record")
    assert not penalty(method, context_of(method), np.full(4, 9, np.float32)).any()


class Product:
    """loss = a b on the first two entries, so the gradient is (b, a, 0, 0). Remembers where it was asked."""

    def __init__(self) -> None:
        self.points: list[list[float]] = []

    def __call__(self, params, x, y, dropout=(), out=None):
        self.points.append(params.tolist())
        out[:] = 0
        out[0], out[1] = params[1], params[0]
        return float(params[0] * params[1]), out


def trained(method: TaskMethod, gradient: Product, start: list[float]) -> tuple[list[float], float]:
    done = train(method, start, gradient, BLACK)
    return done.end.tolist(), done.loss


def test_sam_steps_along_the_gradient_uphill() -> None:
    gradient = Product()
    # at (4, 3) the gradient is (3, 4), of norm 5: rho = 5 leads to (7, 7), whose gradient is (7, 7)
    assert trained(method_of("dp-fedsam", rho=5.0), gradient, [4, 3, 1, 1]) == ([0.5, -0.5, 1, 1], 12.0)
    assert gradient.points == [[4, 3, 1, 1], [7, 7, 1, 1]]


def test_sam_without_a_radius_or_a_gradient_is_sgd() -> None:
    gradient = Product()
    assert trained(method_of("dp-fedsam", rho=0.0), gradient, [4, 3, 1, 1])[0] == [2.5, 1, 1, 1]
    assert len(gradient.points) == 1
    assert trained(method_of("dp-fedsam"), Product(), [0, 0, 1, 1])[0] == [0, 0, 1, 1]


def test_both_gradients_of_a_batch_are_charged() -> None:
    pair = method_of("dp-fedsam", unit="record").charge(RoundTerms())
    one = method_of("dp-fedsam", unit="record", rho=0.0).charge(RoundTerms())
    assert pair.steps == one.steps == 3
    assert pair.noise_multiplier == pytest.approx(one.noise_multiplier / 2**0.5)


def test_sam_sees_noised_gradients_only_with_noise_on_records() -> None:
    gradient = Product()
    method = method_of("dp-fedsam", unit="record", noise_multiplier=0.0, rho=5.0)
    # three batches, each gradient clipped to 1: (0.6, 0.8) uphill, then (7, 7) to (0.7, 0.7)
    trained(method, gradient, [4, 3, 1, 1])
    assert len(gradient.points) == 6
    np.testing.assert_allclose(gradient.points[1], [7, 7, 1, 1], rtol=1e-5)
    np.testing.assert_allclose(gradient.points[2][:2], [4 - 0.5 / 2**0.5, 3 - 0.5 / 2**0.5], rtol=1e-5)


class Both:
    """A batch of clients, each with its own gradient at every point."""

    def __init__(self, gradient: Any) -> None:
        self.gradient, self.points = gradient, []

    def mean(self, params: Any) -> tuple[Any, Any]:
        self.points.append(params)
        return params.sum(-1), self.gradient

    def asked(self, method: TaskMethod, params: Any) -> Any:
        method.training.gradient(context_of(method), params, self, ())
        return self.points[1]


def test_clients_at_once_climb_as_one_by_one() -> None:
    rng = np.random.default_rng(3)
    params, gradient = rng.normal(size=(2, 3, 70_001)).astype(np.float32)
    gradient[1] = 0
    method = method_of("dp-fedsam", rho=0.5)
    together = Both(torch.from_numpy(gradient)).asked(method, torch.from_numpy(params))
    for row in range(3):
        alone = Both(gradient[row]).asked(method, params[row])
        np.testing.assert_allclose(together[row].numpy(), alone, rtol=1e-6, atol=1e-6)
        sam_point = np.linalg.norm(alone - params[row])
        assert sam_point == pytest.approx(0 if row == 1 else 0.5, rel=1e-4)
