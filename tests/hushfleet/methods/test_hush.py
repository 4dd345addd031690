"""Hush against its pseudocode in NumPy: local steps in their dual form, the scaled update, the mean of iterates."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from hushfleet.aggregator.config.task import parse_task
from hushfleet.data.samples import Samples
from hushfleet.errors import BadInput, Malformed, PrivacyError
from hushfleet.learning.graph_session import GradientGraph, InferenceGraph
from hushfleet.learning.own_samples import HiddenSamples
from hushfleet.methods import make_method
from hushfleet.methods.cost import RoundTerms
from hushfleet.methods.hush import TailMean
from hushfleet.methods.hush_rule import rule, signal
from hushfleet.methods.method import Steps
from hushfleet.methods.server import ClosedRound
from hushfleet.methods.task_method import TaskMethod
from hushfleet.models import get_model
from hushfleet.models.export import export_graphs
from hushfleet.models.torch_gradient import TorchGradient
from hushfleet.params import ParamLayout
from hushfleet.privacy.accountant import Step, epsilon
from hushfleet.privacy.noise import SeededNoise
from hushfleet.wire.format.spec import PrivacySpec
from support.methods import Constant, context_of, privatized
from support.methods import trained as train

CLASSES, SHAPE = 4, (5, 2, 1)
MODEL = get_model("linear", classes=CLASSES, input_shape=SHAPE)
PRIVACY = PrivacySpec("device", accounting="as-published", clip_norm=1.5, noise_multiplier=2.0, delta=1e-5)


@pytest.fixture(scope="module")
def runtimes() -> dict[str, tuple[Any, Any]]:
    graphs, layout, ours = export_graphs(MODEL), MODEL.layout, TorchGradient(MODEL)
    return {
        "onnx": (GradientGraph(graphs.gradient, layout), InferenceGraph(graphs.inference, layout)),
        "torch": (ours, ours.logits),
    }


def method_of(privacy: PrivacySpec = PRIVACY, *, rounds: int = 3, **config: Any) -> TaskMethod:
    return make_method("hush", config, privacy, MODEL.layout, rounds=rounds)


def samples_of(seed: int, count: int) -> Samples:
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (count, *SHAPE), dtype=np.uint8)
    return Samples(images, rng.integers(0, CLASSES, count), (0.5,) * 5, (0.5,) * 5)


def softmax(logits: np.ndarray) -> np.ndarray:
    shares = np.exp(logits - logits.max(1, keepdims=True))
    return shares / shares.sum(1, keepdims=True)


def oracle_update(head: np.ndarray, samples: Samples, clip_norm: float) -> np.ndarray:
    """Local steps on all images by their inner products, float64 `[C, F]`; `head [C, F]` is the global one."""
    phi = samples.x.reshape(len(samples), -1).astype(np.float64)
    labels = np.eye(CLASSES)[samples.labels]
    counts = labels.sum(0) + 1
    offsets = phi @ head.T + np.log(counts / counts.sum())
    weights = np.zeros((len(samples), CLASSES))
    for _ in range(5):
        weights -= 16 * (softmax(offsets + phi @ phi.T @ weights) - labels) / len(samples)
    update = weights.T @ phi
    return clip_norm * update / np.linalg.norm(update)


@pytest.mark.parametrize("runtime", ["onnx", "torch"])
def test_a_round_is_that_of_the_pseudocode(runtimes: dict[str, Any], runtime: str) -> None:
    # without noise, since that would put the values on a grid
    method, rng = method_of(replace(PRIVACY, noise_multiplier=0.0)), np.random.default_rng(0)
    gradient, logits_of = runtimes[runtime]
    state = method.init_state()
    for round, count in enumerate((1, 3, 40), start=1):
        samples, start = samples_of(round, count), rng.normal(size=MODEL.layout.size).astype(np.float32)
        start[-CLASSES:] = 0
        done = train(method, start, gradient, samples, state=state, logits_of=logits_of)
        seen = method.privatize(done.context, done.update, Constant())
        expected = oracle_update(MODEL.layout.unflatten(start)["head.weight"].astype(np.float64), samples, 1.5)
        np.testing.assert_allclose(seen.values[:-CLASSES], expected.ravel(), rtol=0, atol=2e-4)
        assert not seen.values[-CLASSES:].any()
        # the next round begins with the new global head, and with the prior of the labels that are then there
        state = method.advance(done.context, update=done.update, trained=done.own, sent=seen.values)
        counts = np.bincount(samples.labels, minlength=CLASSES) + 1
        np.testing.assert_allclose(done.own[-CLASSES:], np.log(counts / counts.sum()), rtol=1e-6)


def test_a_device_without_images_sends_noise_alone(runtimes: dict[str, Any]) -> None:
    method = method_of()
    assert method.parts.takes_empty
    gradient, logits_of = runtimes["onnx"]
    done = train(method, MODEL.init(0), gradient, samples_of(0, 0), logits_of=logits_of)
    assert not done.update.any()
    noised = method.privatize(done.context, done.update, SeededNoise(1, 2, 3)).values[:-CLASSES]
    assert np.std(noised) == pytest.approx(3.0, rel=0.5)
    assert not method.privatize(done.context, done.update, Constant()).values.any()


@pytest.mark.parametrize("rounds", [1, 2, 5, 20])
def test_later_rounds_cost_less_and_all_of_them_as_much_as_equal_ones(rounds: int) -> None:
    method = method_of(replace(PRIVACY, delta=1e-5), rounds=rounds)
    told = [method.server.controls({}, round) for round in range(1, rounds + 1)]
    costs = [method.cost(RoundTerms(controls=controls)) for controls in told]
    steps = [Step(cost.charge().noise_multiplier, 1.0, 1) for cost in costs]
    spent, equal = epsilon(steps, delta=1e-5), epsilon([Step(2.0, 1.0, rounds)], delta=1e-5)
    assert equal * (1 - 1e-9) < spent <= equal
    clip_norms, noises = [each.bound for each in costs], [each.bound * each.noise_multiplier for each in costs]
    assert np.sum(clip_norms) == pytest.approx(1.5 * rounds)
    np.testing.assert_allclose(noises, noises[0])
    assert all(before >= after for before, after in pairwise(clip_norms))
    last = clip_norms[-1] / clip_norms[0]
    assert last == pytest.approx(math.ceil(rounds / 3) ** -0.5)


def test_without_noise_and_with_the_unit_record_all_rounds_are_alike() -> None:
    record = PrivacySpec("record", "strict", 1.0, 1.0, 1e-5, sample_rate=0.5, batches=2)
    for privacy in (replace(PRIVACY, noise_multiplier=0.0), record):
        assert method_of(privacy, local_epochs=1).server.controls({}, 3) == {}


def test_an_update_that_is_not_finite_is_refused() -> None:
    for value in (np.nan, np.inf):
        with pytest.raises(PrivacyError, match="not finite"):
            privatized(method_of(), np.full(MODEL.layout.size, value, np.float32), samples=Labels())


def test_it_needs_a_finite_clip_norm_and_a_bias() -> None:
    with pytest.raises(PrivacyError, match="must be finite"):
        method_of(PrivacySpec("device", "strict", clip_norm=np.inf, noise_multiplier=0.0, delta=0.1))
    with pytest.raises(Malformed, match="one bias for each class"):
        make_method("hush", {}, PRIVACY, ParamLayout(("a.bias", "a.weight"), ((2,), (2, 3))), rounds=1)


class Labels:
    """Samples of which only the labels are asked."""

    def label_counts(self, classes: int) -> np.ndarray:
        return np.arange(classes)


@pytest.mark.parametrize(("rounds", "averaged"), [(1, 1), (2, 1), (3, 1), (5, 2), (20, 7)])
def test_the_task_ends_with_the_mean_of_the_last_third(rounds: int, averaged: int) -> None:
    server, rng = TailMean(rounds), np.random.default_rng(rounds)
    iterates = [rng.normal(size=6).astype(np.float32) for _ in range(rounds)]
    state = server.initial(0)
    for round, iterate in enumerate(iterates[:-1], start=1):
        np.testing.assert_array_equal(
            server.aggregate(state, np.zeros(6), 2.0 * iterate, np.full(6, 2.0)).astype(np.float32), iterate
        )
        state = server.advance(state, ClosedRound(round, iterate, iterate, (), None, None))
    expected = np.mean(np.array(iterates[-averaged:], np.float64), axis=0)
    np.testing.assert_allclose(server.final(state, iterates[-1]), expected, rtol=1e-6)


def test_the_server_moves_as_nesterov_does() -> None:
    """Against PyTorch's optimizer, whose gradients are what devices send, the other way round."""
    rng, server = np.random.default_rng(0), TailMean(4, momentum=0.9)
    weights = torch.zeros(5, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([weights], lr=1.0, momentum=0.9, nesterov=True)
    state, at = server.initial(0), np.zeros(5)
    for round in range(1, 5):
        sent = rng.normal(size=5)
        weights.grad = torch.from_numpy(-sent)
        optimizer.step()
        after = server.aggregate(state, at, 3 * sent, np.full(5, 3.0))
        np.testing.assert_allclose(after, weights.detach().numpy(), rtol=1e-12)
        state = server.advance(state, ClosedRound(round, at, after, (), None, None))
        at = after


def test_with_the_unit_record_no_label_is_counted() -> None:
    privacy = PrivacySpec("record", "strict", 1.0, 1.0, 1e-5, sample_rate=0.5, batches=2)
    method = method_of(privacy, local_epochs=1)
    start = np.arange(MODEL.layout.size, dtype=np.float32)
    np.testing.assert_array_equal(context_of(method, global_params=start, samples=Labels()).start, start)
    with pytest.raises(PrivacyError):
        HiddenSamples().label_counts(CLASSES)


@pytest.mark.parametrize("runtime", ["onnx", "torch"])
def test_with_the_unit_record_the_bound_is_on_what_moves(runtimes: Any, runtime: str) -> None:
    """One step without noise: the biases stay, and their gradients count for no norm."""
    privacy = PrivacySpec("record", "strict", 0.7, 0.0, 1e-5, sample_rate=1.0, batches=1)
    method, data = method_of(privacy, local_epochs=1, batch_size=9, learning_rate=2.0), samples_of(3, 9)
    start = np.random.default_rng(1).normal(size=MODEL.layout.size).astype(np.float32)
    gradient, logits_of = runtimes[runtime]
    done = train(method, start, gradient, data, logits_of=logits_of)
    weight, bias = MODEL.layout.unflatten(start).values()
    x = data.x.reshape(9, -1)
    slopes = softmax(x @ weight.T + bias) - np.eye(CLASSES)[data.y]
    norms = np.linalg.norm(slopes, axis=1) * np.linalg.norm(x, axis=1)
    assert (norms > 0.7).any()
    expected = (slopes * np.minimum(1, 0.7 / norms)[:, None]).T @ x
    moved, unmoved = MODEL.layout.unflatten(done.end - start).values()
    np.testing.assert_allclose(moved, -2.0 / 9 * expected, rtol=1e-4, atol=1e-5)
    assert not unmoved.any()


@pytest.mark.parametrize(
    ("devices", "epsilon", "expected"),
    [
        (8, 2, Steps(20, 0.301, 32)),
        (30, 2, Steps(20, 1.13, 40)),
        (50, 2, Steps(20, 1.88, 64)),
        (100, 2, Steps(20, 3.76, 128)),
        (200, 2, Steps(20, 7.52, 248)),
        (1000, 2, Steps(20, 9.0, 1256)),
        (100, 8, Steps(20, 9.0, 416)),
    ],
)
def test_the_rule_follows_devices_over_noise(devices: int, epsilon: float, expected: Steps) -> None:
    assert rule(devices=devices, epsilon=epsilon, delta=1e-5) == expected


def test_the_signal_is_that_of_one_release() -> None:
    """z of one release as Balle and Wang's closed form has it."""
    for target, multiplier in ((1, 3.731), (2, 1.994), (4, 1.081), (8, 0.600)):
        assert signal(devices=1, epsilon=target, delta=1e-5) == pytest.approx(1 / multiplier, rel=1e-3)


def task(**sections: Any) -> Any:
    plain = {"data": {"name": "digits", "devices": 100}, "model": {"name": "linear"}, "method": {"name": "hush"}}
    return parse_task({"name": "t", **plain, **sections})


def test_directions_are_those_of_features_with_an_order(tmp_path: Any) -> None:
    privacy = {"accounting": "as-published", "epsilon": 2.0, "delta": 1e-5}
    model = {"name": "linear", "features": "filters"}
    by_rule = task(privacy=privacy, model=model)
    assert (by_rule.model.directions, parse_task(by_rule.to_plain())) == (128, by_rule)
    assert task(privacy=privacy, model={**model, "directions": 40}).model.directions == 40
    assert task(privacy={**privacy, "unit": "record", "accounting": "strict"}, model=model).model.directions is None
    assert task(privacy=privacy, model={**model, "features": "net.onnx"}).model.directions is None
    with pytest.raises(BadInput, match="no other inputs have an order"):
        task(privacy=privacy, model={**model, "features": None, "directions": 40})
    with pytest.raises(BadInput, match="no other inputs have an order"):
        task(privacy=privacy, model={**model, "features": "unit-norm", "directions": 40})


def test_a_linear_model_without_features_takes_samples_of_norm_1() -> None:
    """The rate and the personalized heads assume it. Other methods and other networks stay as they are."""
    privacy = {"accounting": "as-published", "epsilon": 2.0, "delta": 1e-5}
    left = task(privacy=privacy)
    assert left.model.features == "unit-norm"
    assert parse_task(left.to_plain()) == left
    assert task(privacy={**privacy, "unit": "record", "accounting": "strict"}).model.features == "unit-norm"
    assert task(privacy=privacy, model={"name": "linear", "features": "filters"}).model.features == "filters"
    assert task(privacy=privacy, method={"name": "dp-fedavg"}).model.features is None
    assert task(privacy=privacy, model={"name": "digits-cnn", "share": "head"}).model.features is None
    asked = {"statistic": {"kind": "counts"}, "round": {"rounds": 1}}
    assert task(privacy={**privacy, "accounting": "secure"}, **asked).model.features is None
    with pytest.raises(BadInput, match=r"with model.features = 'unit-norm' each image's features are computed once"):
        task(privacy=privacy, data={"name": "digits", "devices": 100, "augment": "flip-crop"})


def test_no_fleet_falls_over_a_cliff() -> None:
    """A device more or less changes hardly anything."""
    steps = [rule(devices=n, epsilon=2.0, delta=1e-5) for n in range(8, 400)]
    for fewer, more in pairwise(steps):
        assert more.rounds == fewer.rounds
        assert 0 <= more.clip_norm - fewer.clip_norm < 0.06
        assert 0 <= more.directions - fewer.directions <= 8


def test_a_task_that_leaves_them_out_has_rounds_and_clip_norm_by_the_rule() -> None:
    privacy = {"accounting": "as-published", "epsilon": 2.0, "delta": 1e-5}
    left = task(privacy=privacy)
    assert (left.round.rounds, left.privacy.clip_norm, left.model.directions) == (20, 3.76, None)
    given = task(privacy={**privacy, "clip_norm": 0.7}, round={"rounds": 3})
    assert (given.round.rounds, given.privacy.clip_norm) == (3, 0.7)
    fewer = task(privacy=privacy, round={"rounds": 5})  # the way in all rounds stays
    assert (fewer.round.rounds, fewer.privacy.clip_norm) == (5, 15.0)
    # Where each device adds all the noise, a hundred are worth ten.
    alone = task(privacy={"epsilon": 2.0, "delta": 1e-5})
    assert (alone.round.rounds, alone.privacy.clip_norm) == (20, 0.376)
    assert parse_task(left.to_plain()) == left
    with pytest.raises(BadInput, match="clip_norm"):
        task(privacy={**privacy, "clip_norm": -1})
