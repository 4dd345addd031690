"""Second moments: what one step sends, what the task ends with, and how a device judges by it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import scipy.fft
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from hushfleet.data.samples import Samples
from hushfleet.data.targets import Targets
from hushfleet.errors import BadInput, PrivacyError
from hushfleet.learning.anomaly import Threshold, alarm_rates, errors_of, judging, own_reconstruction, threshold
from hushfleet.learning.graph_session import GradientGraph, InferenceGraph
from hushfleet.methods import make_method
from hushfleet.methods.local import Sgd
from hushfleet.methods.second_moments import GAIN
from hushfleet.models import get_model
from hushfleet.models.export import export_graphs
from hushfleet.models.torch_gradient import TorchGradient
from hushfleet.objectives import Objective
from hushfleet.wire.format.spec import PrivacySpec
from support.methods import trained
from support.moments import errors_by, errors_left_out

ERROR = Objective("reconstruction")
SHAPES = st.tuples(st.integers(1, 4), st.integers(1, 2), st.integers(1, 5))


def samples(shape: tuple[int, int, int], count: int, faults: int = 0, seed: int = 0) -> Samples:
    rng = np.random.default_rng(seed)
    labels = (np.arange(count) >= count - faults).astype(np.float32)[:, None]
    x = rng.normal(2, 1, (count, *shape)).astype(np.float32)
    channels = shape[0]
    return Samples(x, labels, (1.0,) * channels, (2.0,) * channels, Targets("reconstruction", false_alarms=0.05))


def method(layout: Any, **config: Any) -> Any:
    privacy = PrivacySpec("device", "strict", clip_norm=0.5, noise_multiplier=1.0, delta=1e-5)
    return make_method("second-moments", config, privacy, layout, rounds=1)


def frequencies(x: np.ndarray) -> np.ndarray:
    """Samples [n, frequency, series], by SciPy."""
    rows = x.reshape(len(x), -1, x.shape[-1]).astype(np.float64)
    return scipy.fft.dct(rows, axis=-1, norm="ortho").transpose(0, 2, 1)


@settings(max_examples=25)
@given(SHAPES, st.integers(1, 9), st.integers(0, 99))
def test_one_step_sends_the_moments_about_the_own_mean(shape: tuple[int, int, int], count: int, seed: int) -> None:
    model, own = get_model("second-moments", input_shape=shape), samples(shape, count, seed=seed)
    update = trained(method(model.layout), model.init(0), TorchGradient(model, objective=ERROR), own).update
    z = frequencies(own.x)
    z -= z.mean(0)
    moments = np.einsum("ntc,ntd->tcd", z, z) / count
    expected = 2 / (np.prod(shape) * GAIN) * moments
    np.testing.assert_allclose(update.reshape(moments.shape), expected, atol=1e-6)


@settings(max_examples=25)
@given(SHAPES, st.integers(1, 6), st.integers(0, 99))
def test_a_task_ends_with_the_projector_onto_the_leading_directions(
    shape: tuple[int, int, int], count: int, seed: int
) -> None:
    """And an error is by what these leave of a sample: against vectors taken one by one."""
    model, rng = get_model("second-moments", input_shape=shape), np.random.default_rng(seed)
    noised = rng.standard_normal(model.layout.size).astype(np.float32)
    final = method(model.layout, directions=count).server.final({}, noised)
    (blocks,) = model.layout.unflatten(noised.astype(np.float64)).values()
    found = []
    for frequency, block in enumerate(blocks):
        sizes, vectors = np.linalg.eigh((block + block.T) / 2)
        found += [(size, frequency, vector) for size, vector in zip(sizes, vectors.T, strict=True) if size > 0]
    leading = sorted(found, key=lambda each: -each[0])[:count]

    own, gradient = samples(shape, 7, faults=2, seed=seed), TorchGradient(model, objective=ERROR)
    judged_by = judging(own, model.layout, by_content=False)
    network = own_reconstruction(gradient.logits, model.layout, lambda: judged_by)
    rest = frequencies(own.x - own.x[:5].mean(0))
    for _, frequency, vector in leading:
        rest[:, frequency] -= np.outer(rest[:, frequency] @ vector, vector)
    if (abs(rest[:5]) > 1e-4).all():
        np.testing.assert_allclose(errors_of(network, final, own), errors_by(rest[:5], rest), rtol=1e-3)
        logs = np.log(errors_left_out(rest[:5]))
        width = scipy.stats.t.ppf(0.95, 4) * np.sqrt(6 / 5) * logs.std(ddof=1)
        chosen = threshold(network, final, model.layout, judged_by)
        assert chosen == (pytest.approx(np.exp(logs.mean() + width), rel=0.02), 5, 0.05)
        clips = replace(judged_by, clips=np.array([0, 0, 1, 1, 1]))  # each is judged about the mean of the other clip
        together = threshold(network, final, model.layout, clips)
        assert together.error == pytest.approx(chosen.error * (2 / (5 / 4)) ** 2, rel=1e-6)


def test_boards_graphs_give_the_same() -> None:
    model, rng = get_model("second-moments", input_shape=(3, 1, 4)), np.random.default_rng(0)
    graphs, of_torch = export_graphs(model, objective=ERROR), TorchGradient(model, objective=ERROR)
    x, params = rng.standard_normal((5, 3, 1, 4), np.float32), rng.standard_normal(model.layout.size, np.float32)
    gradient = GradientGraph(graphs.gradient, model.layout, objective=ERROR)
    np.testing.assert_allclose(
        gradient(params, x, x.reshape(5, -1))[1], of_torch(params, x, x.reshape(5, -1))[1], atol=1e-6
    )
    np.testing.assert_allclose(
        InferenceGraph(graphs.inference, model.layout)(params, x), of_torch.logits(params, x), atol=1e-5
    )


def test_a_sum_that_is_noise_or_of_another_network_is_no_error() -> None:
    model = get_model("second-moments", input_shape=(3, 1, 4))
    server = method(model.layout).server
    assert not server.final({}, -np.eye(3, dtype=np.float32)[None].repeat(4, 0).ravel()).any()
    other = get_model("autoencoder", input_shape=(3, 1, 4))
    last = other.init(1)
    assert method(other.layout).server.final({}, last) is last
    infinite = PrivacySpec("device", "strict", clip_norm=float("inf"), noise_multiplier=0.0, delta=1e-5)
    with pytest.raises(PrivacyError, match="which must be finite"):
        make_method("second-moments", {}, infinite, model.layout, rounds=1)


def test_with_records_no_sample_moves_the_others() -> None:
    assert Sgd(centred=True).by_record() == Sgd()


@given(st.integers(4, 40), st.sampled_from([0.01, 0.05, 0.2]), st.integers(0, 999))
def test_a_fitted_threshold_is_a_prediction_interval(count: int, wanted: float, seed: int) -> None:
    errors = np.exp(np.random.default_rng(seed).normal(-3, 0.5, count))
    logs = np.log(errors)
    width = scipy.stats.t.ppf(1 - wanted, count - 1) * np.sqrt(1 + 1 / count) * logs.std(ddof=1)
    found = Threshold.fitted(errors, wanted)
    assert np.log(found.error) == pytest.approx(logs.mean() + width, abs=0.04 * width)
    assert found[1:] == (count, wanted)


def test_few_or_equal_samples() -> None:
    with pytest.raises(BadInput, match=r"2 normal samples in data\.path: a threshold needs 3 at least"):
        Threshold.fitted(np.ones(2), 0.01)
    assert Threshold.fitted(np.zeros(5), 0.01).error == pytest.approx(1e-30)
    layout = get_model("second-moments", input_shape=(1, 1, 1)).layout
    nothing = judging(samples((1, 1, 1), 2, faults=2), layout, by_content=False)
    network = object()
    assert own_reconstruction(network, layout, lambda: nothing) is network


def test_the_rates_of_alarms() -> None:
    errors, faults = np.array([1.0, 3.0, 1.5, 4.0, 0.5]), np.array([0, 1, 1, 1, 0], bool)
    assert alarm_rates(errors, faults, Threshold(0.9, 3, 0.1)) == {
        "detected": 1.0, "false_alarms": 0.5, "f1": pytest.approx(6 / 7),
    }  # fmt: skip
    assert np.isnan(alarm_rates(errors, np.ones(5, bool), Threshold(0.9, 3, 0.1))["false_alarms"])
