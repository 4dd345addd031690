"""Every runtime on targets that are no classes, sample by sample, against PyTorch's automatic differentiation."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from hushfleet.errors import GraphRefused
from hushfleet.learning.batch import ClientBatch
from hushfleet.learning.graph_session import GradientGraph
from hushfleet.models import get_model
from hushfleet.models.checks import random_batch
from hushfleet.models.export import export_graphs
from hushfleet.models.model import Model
from hushfleet.models.module import model_of
from hushfleet.models.native.gradient import NativeGradient
from hushfleet.models.torch_gradient import TorchGradient
from hushfleet.objectives import Objective

pytestmark = pytest.mark.slow
LOSSES: dict[str, Any] = {
    "binary": F.binary_cross_entropy_with_logits, "squared": F.mse_loss, "huber": F.huber_loss
}  # fmt: skip
FEATURES = 5


def network(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 7), nn.Tanh(), nn.Dropout(0.4), nn.Linear(7, outputs))


@cache
def made(outputs: int) -> Model:
    return model_of(lambda: network(outputs), name="small", classes=outputs, input_shape=(FEATURES, 1, 1))


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def export(kind: Any, outputs: int) -> GradientGraph:
        folder = tmp_path_factory.mktemp("graphs")
        found = export_graphs(made(outputs), objective=Objective(kind), cache_dir=folder)
        return GradientGraph(found.gradient, made(outputs).layout, objective=Objective(kind))

    return export


@pytest.mark.parametrize(("kind", "outputs"), [("binary", 3), ("squared", 1), ("huber", 3)])
@settings(max_examples=15, deadline=None)
@given(batch=st.integers(1, 9), seed=st.integers(0, 2**32 - 1))
def test_single_gradients(graphs: Any, kind: Any, outputs: int, batch: int, seed: int) -> None:
    model, rng, objective = made(outputs), np.random.default_rng(seed), Objective(kind)
    params = rng.standard_normal(model.layout.size, np.float32)
    x, y, masks = random_batch(model, batch, rng, objective)
    expected = np.stack([by_autograd(model, kind, params, x[[i]], y[[i]], masks[0][[i]]) for i in range(batch)])
    for run in (TorchGradient(model, objective=objective), graphs(kind, outputs)):
        client = ClientBatch(run, x, y, masks, {}, np.empty_like(params))
        _, each = client.each(params)
        check(each, expected)
        _, mean = client.mean(params)
        check(mean, expected.mean(0))
        bound, summed = 0.7, np.empty_like(params)
        client.clipped_sum(params, bound, summed)
        norms = np.linalg.norm(expected, axis=1, keepdims=True)
        check(summed, (expected * np.minimum(1, bound / norms)).sum(0))
    many = TorchGradient(model, objective=objective).clients
    weights = np.array([[1] * batch, [1, *[0] * (batch - 1)]], np.float32)  # the second one's batch is padded
    twice = [np.stack([each, each]) for each in (params, x, y, masks[0])]
    _, grads = many(*twice[:3], [twice[3]], weights=weights)
    check(grads, np.stack([expected.mean(0), expected[0]]))


def check(found: Any, expected: np.ndarray) -> None:
    """As exports are: by the largest entry, since runtimes round a saturated tanh in their own ways."""
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4 * float(np.abs(expected).max()) + 1e-6)


def by_autograd(model: Model, kind: str, params: Any, x: Any, y: Any, mask: Any) -> np.ndarray:
    """Of plain PyTorch modules, without anything of ours but the mask in place of dropout."""
    module = network(y.shape[1])
    nn.utils.vector_to_parameters(torch.from_numpy(params), module.parameters())
    first, tanh, _, last = module
    outputs = last(tanh(first(torch.from_numpy(x.reshape(1, -1)))) * torch.from_numpy(mask))
    LOSSES[kind](outputs, torch.from_numpy(y)).backward()
    return torch.cat([each.grad.flatten() for each in module.parameters()]).numpy()


@pytest.mark.parametrize("kind", LOSSES)
def test_a_graph_is_told_its_loss(tmp_path: Path, kind: Any) -> None:
    """A linear layer's closed form follows the loss, and a graph of other targets is refused when it is loaded."""
    model, objective = get_model("linear", classes=2, input_shape=(3, 1, 1)), Objective(kind)
    graph = export_graphs(model, objective=objective, cache_dir=tmp_path).gradient
    with pytest.raises(GraphRefused, match="not fit the targets of the loss 'cross-entropy'"):
        GradientGraph(graph, model.layout)
    run, rng = GradientGraph(graph, model.layout, objective=objective), np.random.default_rng(0)
    x, y, _ = random_batch(model, 4, rng, objective)
    for params in (model.init(0), rng.standard_normal(model.layout.size, np.float32)):  # at first zeros: a kink
        client = ClientBatch(run, x, y, (), {}, np.empty_like(params))
        losses, each = client.each(params)
        found = np.empty_like(params)
        assert client.clipped_sum(params, 1e9, found) == pytest.approx(losses.mean(), rel=1e-5)
        np.testing.assert_allclose(found, each.sum(0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", LOSSES)
def test_compiled_kernels_follow_the_loss(kind: Any, need_compiler: Any) -> None:
    need_compiler()
    model, objective, rng = get_model("digits-cnn"), Objective(kind), np.random.default_rng(3)
    params, (x, y, masks) = model.init(0), random_batch(model, 5, rng, objective)
    expected_loss, expected = TorchGradient(model, objective=objective)(params, x, y, masks)
    loss, found = NativeGradient(model, objective=objective)(params, x, y, masks)
    assert loss == pytest.approx(expected_loss, rel=1e-4)
    check(found, expected)
    losses, _ = NativeGradient(model, objective=objective).clipped_sum(params, x, y, masks, np.inf, found)
    assert losses.mean() == pytest.approx(expected_loss, rel=1e-4)
    check(found / len(x), expected)
