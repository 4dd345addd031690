"""Every method: devices trained at once, one by one, and on the devices' own graphs, take the same steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
from torch import Tensor
from torch.nn import functional as F

from hushfleet.data.samples import Samples
from hushfleet.edge_client.worker.randomness import SeededRandomness
from hushfleet.learning.draws import Inputs
from hushfleet.learning.graph_session import GradientGraph, InferenceGraph
from hushfleet.methods import METHODS, make_method
from hushfleet.methods.cost import RoundTerms
from hushfleet.methods.heads import HeadFirstConfig
from hushfleet.methods.local_round import Trained
from hushfleet.methods.state import DeviceState
from hushfleet.methods.task_method import TaskMethod
from hushfleet.models.model import Model, layout_of
from hushfleet.models.torch_gradient import TorchGradient
from hushfleet.models.tracing import export_gradient, export_inference
from hushfleet.objectives import Objective
from hushfleet.simulator.engines.fast.vmap.training import CohortTrainer, Member
from hushfleet.wire.format.spec import DropoutSpec, PrivacySpec
from support.methods import WITH_RECORDS, taken, train_round

pytestmark = pytest.mark.slow

USUAL = {"optimizer": "sgd", "momentum": 0.5, "learning_rate": 0.05, "batch_size": 4, "local_epochs": 2}

# What a method's defaults would leave out, one dictionary a case.
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "fedglp-adp": [{"sequential": True, "lambda_1": 5.0, "lambda_2": 5.0}],
    "fedprox": [{"mu": 1.0}],
    "ditto": [{"lambda_": 2.0}],
    "fedrep": [{"head_epochs": 1, "local_epochs": 3}],
    "dp-fedsim": [{"max_stretch": 2.0}],
    "fednova": [{"mu": 1.0}],
    "feddyn": [{"alpha": 1.0}],
    "pfedme": [{"learning_rate": 0.05, "own_steps": 2}],
    "feddpa": [{"lambda_1": 5.0, "lambda_2": 5.0}, {"personal_epochs": 1}],
    "perfreezeclip": [
        {"local_epochs": 3, "freeze_ratio": 0.5, "max_norm": 1.0},
        {"local_epochs": 3, "freeze_ratio": 0.9, "norms": "part", "history": "life"},
    ],
}

PRIVACY = {
    "device": PrivacySpec("device", accounting="as-published", clip_norm=0.5, noise_multiplier=0.1, delta=0.1),
    "record": PrivacySpec(
        "record",
        accounting="as-published",
        clip_norm=0.5,
        noise_multiplier=0.5,
        delta=0.1,
        sample_rate=0.25,
        batches=5,
    ),
}

# In batches of 4: one that is always full, one smaller than a batch, one that ends an epoch with a single sample.
COUNTS = (9, 3, 8)
NEWCOMER = 2


def _forward(t: Mapping[str, Tensor], x: Tensor, dropout: Sequence[Tensor]) -> Tensor:
    hidden = F.conv2d(x, t["conv.weight"], t["conv.bias"], stride=2).flatten(1).relu()
    hidden = F.linear(hidden, t["middle.weight"], t["middle.bias"])
    hidden = F.layer_norm(hidden, (8,), t["norm.weight"], t["norm.bias"]).relu()
    if dropout:
        hidden = hidden * dropout[0]
    return F.linear(hidden, t["head.weight"], t["head.bias"])


LAYOUT = layout_of(conv=(3, 1, 3, 3), middle=(8, 12), norm=(8,), head=(4, 8))
MODEL = Model("tiny", "this test", (1, 6, 6), 4, LAYOUT, (DropoutSpec((8,), 0.25),), _forward)
INPUTS = {"plain": Inputs(), "dropout": Inputs(MODEL.dropout, "flip-crop")}
CASES = [(name, extra) for name in sorted(METHODS) for extra in SETTINGS.get(name, [{}])]
# Exporting an objective takes seconds: tests/models/test_distillation.py has the graph of ACDP-pFSD's.
EXPORTED = [case for case in CASES if case[0] != "acdp-pfsd"]


@cache
def torch_gradient(objective: Objective) -> TorchGradient:
    return TorchGradient(MODEL, objective=objective)


@cache
def graph(objective: Objective) -> bytes:
    return export_gradient(MODEL, objective)


@cache
def inference() -> bytes:
    return export_inference(MODEL)


def method_of(name: str, extra: dict[str, Any], privacy: PrivacySpec) -> TaskMethod:
    return make_method(name, taken(name, {**USUAL, **extra}), privacy, LAYOUT, rounds=4)


def samples_of(index: int, count: int) -> Samples:
    rng = np.random.default_rng(index)
    images = rng.integers(0, 256, (count, *MODEL.input_shape), dtype=np.uint8)
    return Samples(images, rng.integers(0, MODEL.classes, count), (0.1 * (index % 4),), (0.4,))


def terms_of(method: TaskMethod, index: int, round: int) -> RoundTerms:
    """The devices' own preferences differ, where a method asks for them."""
    return RoundTerms(2, method.server.controls(method.server.initial(3), round), preference=1 + index)


def alone(
    method: TaskMethod, state: DeviceState, params: np.ndarray, index: int, count: int, round: int, **training: Any
) -> Trained:
    gradient = torch_gradient(method.training.objective)
    usual = {"gradient": gradient, "logits_of": gradient.logits}
    return train_round(
        method,
        state,
        params,
        samples=samples_of(index, count),
        terms=terms_of(method, index, round),
        rng=SeededRandomness(7, index).order(round),
        noise=SeededRandomness(7, index).noise(round),
        **{**usual, **training},
    )


def returned(method: TaskMethod, index: int, count: int, inputs: Inputs) -> DeviceState:
    """The state of a device that took part in the round before."""
    trained = alone(method, method.init_state(), MODEL.init(1), index, count, 1, inputs=inputs)
    noised = method.privatize(trained.context, trained.update, SeededRandomness(8, index).noise(1))
    return method.advance(trained.context, update=trained.update, trained=trained.own, sent=noised.values)


def together(
    method: TaskMethod,
    states: Sequence[DeviceState],
    params: np.ndarray,
    counts: Sequence[int],
    inputs: Inputs,
    device: str,
) -> list[Trained]:
    members = [
        Member(
            state,
            samples_of(index, count),
            SeededRandomness(7, index).order(2),
            terms_of(method, index, 2),
            SeededRandomness(7, index).noise(2),
        )
        for index, (state, count) in enumerate(zip(states, counts, strict=True))
    ]
    trainer = CohortTrainer(torch_gradient(method.training.objective), device)
    return trainer.train(method, members, params, inputs=inputs)


def assert_same(
    got: Sequence[Trained], expected: Sequence[Trained], tolerance: float, *, start_tolerance: float = 0.0
) -> None:
    """What training has changed is compared, so that the start cannot hide an error.

    :param start_tolerance: of a start that gradients have moved.
    """
    for one, other in zip(got, expected, strict=True):
        start = other.context.start
        np.testing.assert_allclose(one.context.start, start, rtol=0, atol=start_tolerance)
        moved = np.abs(other.end - start).max()
        assert moved > 1e-4
        assert np.abs(one.end - other.end).max() <= tolerance * moved
        assert np.abs(one.own - other.own).max() <= tolerance * np.abs(other.own - start).max()
        assert one.loss == pytest.approx(other.loss, rel=tolerance)
        assert one.context.remembered.keys() == other.context.remembered.keys()
        for key, kept in other.context.remembered.items():
            np.testing.assert_allclose(one.context.remembered[key], kept, rtol=1e-3, atol=1e-4)
        assert (one.context.chosen is None) == (other.context.chosen is None)
        if one.context.chosen is not None:
            np.testing.assert_array_equal(one.context.chosen, other.context.chosen)
        assert (one.context.measured is None) == (other.context.measured is None)
        if one.context.measured is not None:
            np.testing.assert_allclose(one.context.measured[:2], other.context.measured[:2], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize(
    ("name", "extra", "unit"),
    [(*case, unit) for unit in PRIVACY for case in CASES if unit == "device" or case[0] in WITH_RECORDS],
)
def test_a_cohort_trains_as_its_members_do_alone(
    name: str, extra: dict[str, Any], inputs: str, unit: str, device: str
) -> None:
    method, how = method_of(name, extra, PRIVACY[unit]), INPUTS[inputs]
    states = [
        method.init_state() if index == NEWCOMER else returned(method, index, count, how)
        for index, count in enumerate(COUNTS)
    ]
    params = MODEL.init(2)
    params.flags.writeable = False
    got = together(method, states, params, COUNTS, how, device)
    expected = [
        alone(method, state, params, index, count, 2, inputs=how)
        for index, (state, count) in enumerate(zip(states, COUNTS, strict=True))
    ]
    # A noised gradient lies on a grid, and another order of sums may end at the next point of it.
    assert_same(got, expected, tolerance=5e-4 if device == "cuda" and unit == "record" else 1e-4)


@pytest.mark.parametrize(("name", "extra"), EXPORTED)
def test_the_devices_own_graphs_take_the_same_step(name: str, extra: dict[str, Any], device: str) -> None:
    """Or as many as there are epochs, where a method trains by those."""
    steps = {} if issubclass(METHODS[name].config, HeadFirstConfig) else {"local_steps": 1}
    method = method_of(name, {**extra, **steps}, PRIVACY["device"])
    how, counts, params = INPUTS["dropout"], (4, 4), MODEL.init(2)
    states = [returned(method, index, count, how) for index, count in enumerate(counts)]
    got = together(method, states, params, counts, how, device)
    onnx = {
        "gradient": GradientGraph(graph(method.training.objective), LAYOUT),
        "logits_of": InferenceGraph(inference(), LAYOUT),
    }
    expected = [alone(method, state, params, index, 4, 2, inputs=how, **onnx) for index, state in enumerate(states)]
    assert_same(got, expected, tolerance=1e-4, start_tolerance=1e-6 if name == "fedala" else 0.0)
