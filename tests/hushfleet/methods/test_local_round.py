"""The local training loop on toy losses whose every step is known."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hushfleet.data.samples import Samples
from hushfleet.learning.draws import Inputs, draw_dropout, samples_trained, shuffled_batches
from hushfleet.methods import make_method
from hushfleet.methods.cost import RoundTerms
from hushfleet.methods.local import Penalty, Sgd
from hushfleet.methods.local_round import LocalRound
from hushfleet.methods.method import Method
from hushfleet.methods.state import DeviceState, PublicState
from hushfleet.methods.task_method import TaskMethod, bind
from hushfleet.params import ParamLayout
from hushfleet.wire.format.spec import DropoutSpec, PrivacySpec
from support.methods import trained as run

PRIVACY = PrivacySpec(unit="device", accounting="strict", clip_norm=1.0, noise_multiplier=0.0, delta=0.1)
LAYOUT = ParamLayout(("w",), ((1,),))


def method(**config: Any) -> TaskMethod:
    settings = {"optimizer": "sgd", "learning_rate": 0.5, "batch_size": 2, "local_epochs": 1, **config}
    return make_method("fedavg", settings, PRIVACY, LAYOUT, rounds=1)


def samples_of(pixels: list[int]) -> Samples:
    """One pixel each; `x` is the pixel divided by 255, labels count up."""
    images = np.array(pixels, np.uint8).reshape(-1, 1, 1, 1)
    return Samples(images, np.arange(len(pixels)), (0.0,), (1.0,))


class Quadratic:
    """loss = mean over the batch of (w - x)^2 / 2, so its gradient is w - mean(x). Remembers what it was given."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.masks: list[tuple[np.ndarray, ...]] = []

    def __call__(self, params, x, y, dropout=(), out=None):
        self.batches.append(y.tolist())
        self.masks.append(tuple(dropout))
        values = x.reshape(-1)
        out[:] = params - values.mean()
        return float(((params[0] - values) ** 2).mean() / 2), out


def train(samples: Samples, *, seed: int = 0, start: float = 0.0, dropout=(), **config: Any):
    gradient = Quadratic()
    how = {"inputs": Inputs(dropout), "rng": np.random.default_rng(seed)}
    done = run(method(**config), [start], gradient, samples, **how)
    return done.end, done.loss, gradient


def test_three_steps_by_hand() -> None:
    # Towards 1 in halves: 0, 1/2, 3/4, 7/8; losses 1/2, 1/8, 1/32, their mean 7/32.
    trained, loss, _ = train(samples_of([255]), local_epochs=3)
    assert trained.tolist() == [0.875]
    assert trained.dtype == np.float32
    assert loss == 0.21875


def test_the_last_batch_counts_by_its_samples() -> None:
    # Three samples of 1 in batches of two and one: losses 1/2 (twice) and 1/8, the mean (1 + 1/8) / 3.
    trained, loss, gradient = train(samples_of([255, 255, 255]))
    assert [len(batch) for batch in gradient.batches] == [2, 1]
    assert trained.tolist() == [0.75]
    assert loss == pytest.approx(1.125 / 3, rel=1e-12)


def test_training_follows_a_plain_loop_in_the_generators_order() -> None:
    pixels = [3, 50, 100, 150, 200, 250, 255]
    trained, loss, gradient = train(samples_of(pixels), seed=9, local_epochs=2, batch_size=3)
    rng, w, losses = np.random.default_rng(9), 0.0, []
    order = []
    for _ in range(2):
        shuffled = rng.permutation(7).tolist()
        for batch in (shuffled[:3], shuffled[3:6], shuffled[6:]):
            order.append(batch)
            values = [pixels[i] / 255 for i in batch]
            losses += [(w - value) ** 2 / 2 for value in values]
            w -= 0.5 * (w - sum(values) / len(values))
    assert gradient.batches == order
    assert order[:3] != order[3:]
    assert trained[0] == pytest.approx(w, rel=1e-5)
    assert loss == pytest.approx(sum(losses) / 14, rel=1e-5)


def test_adam_is_made_anew_and_used() -> None:
    # One step of Adam is the learning rate against the gradient's sign.
    for _ in range(2):
        trained, _, _ = train(samples_of([255]), optimizer="adam", learning_rate=0.125)
        assert trained[0] == pytest.approx(0.125, rel=1e-5)


def test_order_and_masks_follow_the_generator_alone() -> None:
    samples, dropout = samples_of(list(range(20))), (DropoutSpec((4,), 0.5),)
    _, _, first = train(samples, seed=1, dropout=dropout)
    _, _, again = train(samples, seed=1, dropout=dropout, start=0.5, learning_rate=0.1)
    _, _, other = train(samples, seed=2, dropout=dropout)
    assert first.batches == again.batches
    assert first.batches != other.batches
    np.testing.assert_array_equal(np.stack([m[0] for m in first.masks]), np.stack([m[0] for m in again.masks]))
    assert any((a[0] != b[0]).any() for a, b in zip(first.masks, other.masks, strict=True))
    assert sorted(label for batch in first.batches for label in batch) == list(range(20))


def test_the_start_is_left_as_it_is_and_the_result_is_no_buffer() -> None:
    done = run(method(), [0.0], Quadratic(), samples_of([255]))
    assert done.context.start.tolist() == [0.0]
    assert done.end.tolist() == [0.5]
    assert not np.shares_memory(done.context.start, done.end)


def test_the_method_adds_its_own_part_to_every_gradient() -> None:
    seen = []

    class Pulled(Penalty):
        def add(self, context, params, gradient) -> None:
            seen.append((context.start.tolist(), params.tolist()))
            gradient += 1

    parts = Method(training=Sgd(penalties=(Pulled(),)))
    rule = bind(parts, method(local_epochs=2).config, PRIVACY, LAYOUT)
    # gradients 0 - 1 + 1 = 0, so it never moves
    assert run(rule, [0.0], Quadratic(), samples_of([255])).end.tolist() == [0.0]
    assert seen == [([0.0], [0.0])] * 2


def test_the_sequential_order_of_algorithm_2_takes_a_second_gradient_for_the_shared_part() -> None:
    # FedGLP-ADP, Algorithm 2, lines 6 and 7, without penalties, on loss = v u: dv = u, then du = v at the new v.
    layout = ParamLayout(("w",), ((2,),))
    calls: list[list[float]] = []

    def product(params, x, y, dropout=(), out=None):
        calls.append(params.tolist())
        out[:] = params[::-1]
        return float(params.prod()), out

    def after(mask: list[bool], **config: Any) -> tuple[list[float], float]:
        settings = {"optimizer": "sgd", "learning_rate": 0.5, "lambda_1": 0.0, "lambda_2": 0.0, **config}
        rule = make_method("fedglp-adp", settings, PRIVACY, layout, rounds=1)
        state = replace(rule.init_state(), public=PublicState(np.array(mask), 1))
        calls.clear()
        done = run(rule, [4.0, 1.0], product, samples_of([1]), state=state)
        return done.end.tolist(), done.loss

    assert after([True, False]) == ([3.5, -1.0], 4.0)
    assert len(calls) == 1
    assert after([True, False], sequential=True) == ([3.5, -0.75], 4.0)
    assert calls == [[4.0, 1.0], [3.5, 1.0]]
    # nothing is personal in the first round, so one gradient does
    assert after([False, False], sequential=True) == ([3.5, -1.0], 4.0)
    assert len(calls) == 1
    # Adam keeps its moments apart: each part takes one whole first step, the learning rate against the sign
    stepped, _ = after([True, False], sequential=True, optimizer="adam")
    assert stepped == pytest.approx([3.5, 0.5], rel=1e-5)


@pytest.mark.parametrize("unit", ["device", "record"])
def test_a_gradient_that_takes_parts_is_told_what_moves(unit: str) -> None:
    """Not with noise on records: their bound is on the whole gradient."""
    layout = ParamLayout(("a.weight", "b.weight"), ((2,), (1,)))
    more = {"sample_rate": 1.0, "batches": 2} if unit == "record" else {}
    privacy = PrivacySpec(unit, accounting="strict", clip_norm=1e3, noise_multiplier=0.0, delta=0.1, **more)
    settings = {"optimizer": "sgd", "momentum": 0.5, "learning_rate": 0.5, "local_epochs": 2, "batch_size": 1}
    rule = make_method("fedrep", settings, privacy, layout, rounds=1)
    parts: list[slice] = []

    def by_parts(params, x, y, dropout=(), out=None, part=slice(None)):
        parts.append(part)
        out[:] = np.nan if part == slice(2, 3) else 0  # what is left out may be anything in its own place
        out[part] = np.array([1, 2, 3])[part]
        return 1.0, out

    def whole(params, x, y, dropout=(), out=None):
        return by_parts(params, x, y, dropout, out)

    by_parts.takes_part = True
    ends = []
    for gradient in (by_parts, whole):
        ends.append(run(rule, [0.0] * 3, gradient, samples_of([255])).end.tolist())
    assert ends == [[-0.5, -1.0, -1.5]] * 2
    told = [slice(2, 3), slice(0, 2)] if unit == "device" else [slice(None)] * 2
    assert parts == told + [slice(None)] * 2


@pytest.mark.parametrize(("count", "batch_size", "sizes"), [(7, 3, [3, 3, 1]), (6, 3, [3, 3]), (2, 5, [2]), (0, 4, [])])
def test_an_epoch_holds_every_sample_once(count: int, batch_size: int, sizes: list[int]) -> None:
    batches = list(shuffled_batches(count, batch_size, np.random.default_rng(3)))
    assert [len(batch) for batch in batches] == sizes
    assert sorted(int(i) for batch in batches for i in batch) == list(range(count))


@pytest.mark.parametrize("rate", [0.25, 0.5, 0.9])
def test_dropout_masks_are_zero_or_scaled_up_with_mean_one(rate: float) -> None:
    masks = draw_dropout((DropoutSpec((8, 5, 5), rate), DropoutSpec((128,), rate)), 64, np.random.default_rng(4))
    assert [mask.shape for mask in masks] == [(64, 8, 5, 5), (64, 128)]
    for mask in masks:
        assert mask.dtype == np.float32
        assert np.unique(mask).tolist() == [0.0, np.float32(1) / np.float32(1 - rate)]
        # Each entry is 0 with probability rate, else 1 / (1 - rate): variance rate / (1 - rate).
        standard_error = (rate / (1 - rate) / mask.size) ** 0.5
        assert abs(mask.mean(dtype=np.float64) - 1) < 5 * standard_error
        # Every sample and every unit is drawn on its own.
        assert len({row.tobytes() for row in mask}) == len(mask)


def test_no_rate_drops_nothing_and_no_dropout_gives_no_masks() -> None:
    (mask,) = draw_dropout((DropoutSpec((3,), 0.0),), 5, np.random.default_rng(0))
    assert mask.tolist() == [[1.0] * 3] * 5
    assert draw_dropout((), 5, np.random.default_rng(0)) == ()


def test_steps_in_place_of_epochs_cut_the_last_epoch_short() -> None:
    samples = samples_of([3, 50, 100, 150, 200, 250, 255])
    _, loss, gradient = train(samples, seed=9, local_steps=4, local_epochs=5, batch_size=3)
    rng = np.random.default_rng(9)
    first, second = rng.permutation(7).tolist(), rng.permutation(7).tolist()
    assert gradient.batches == [first[:3], first[3:6], first[6:], second[:3]]
    assert np.isfinite(loss)
    assert samples_trained(7, method(local_steps=4, batch_size=3).config) == 10
    assert samples_trained(7, method(local_steps=2, batch_size=3).config) == 6
    assert samples_trained(7, method(local_epochs=5, batch_size=3).config) == 35


def test_a_device_without_samples_stays_where_it_is_by_steps_as_by_epochs() -> None:
    for config in ({"local_steps": 4}, {"local_epochs": 4}):
        end, _, gradient = train(samples_of([]), start=3.0, **config)
        assert (end.tolist(), gradient.batches) == ([3.0], [])


@pytest.mark.parametrize("unit", ["device", "record"])
def test_a_round_that_cannot_be_released_leaves_a_second_model_as_it_was(unit: str) -> None:
    ditto = make_method("ditto", {}, replace(PRIVACY, unit=unit, noise_multiplier=1.0), LAYOUT, rounds=1)
    own, after, published = (np.full(1, each, np.float32) for each in (2.0, np.inf, 0.0))
    state = DeviceState(PublicState.initial(1), own)
    done = LocalRound(ditto, state, published, RoundTerms(), None).ended(after, after, 0.0, {})
    assert done.without_training().own is own
