"""Losses of one's own: the examples against plain PyTorch, what graphs compute, and what is refused in words."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from hushfleet.errors import BadInput
from hushfleet.learning.batch import ClientBatch
from hushfleet.learning.graph_session import GradientGraph
from hushfleet.learning.linear import LinearGradient
from hushfleet.models import get_model, own_loss
from hushfleet.models.checks import random_batch
from hushfleet.models.export import content_key, export_graphs
from hushfleet.models.module import model_of
from hushfleet.models.native.gradient import NativeGradient
from hushfleet.models.own_loss import checked_digest
from hushfleet.models.torch_gradient import TorchGradient
from hushfleet.objectives import Objective

FILE = Path(__file__).parents[2] / "examples" / "losses.py"
EXAMPLES = ("focal", "weighted", "smoothed")


def example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location("losses", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module if not name else getattr(module, name)


OURS = example("")


def by_torch(name: str, logits: Tensor, y: Tensor) -> Tensor:
    if name == "smoothed":
        return F.cross_entropy(logits, y, label_smoothing=0.1, reduction="none")
    if name == "weighted":
        return F.cross_entropy(logits, y, OURS.WEIGHTS.to(logits)[: logits.shape[1]], reduction="none")
    p = F.softmax(logits, 1)[torch.arange(len(y)), y]
    return -((1 - p) ** 2) * p.log()


def offered(loss: Any, kind: str = "cross-entropy") -> Objective:
    return Objective(kind, own=own_loss.offer(loss))


@pytest.mark.parametrize("name", EXAMPLES)
@settings(max_examples=25, deadline=None)
@given(batch=st.integers(1, 9), classes=st.integers(2, 10), seed=st.integers(0, 1 << 30))
def test_examples_are_what_pytorch_computes(name: str, batch: int, classes: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = (3 * torch.randn(batch, classes, generator=generator)).double().requires_grad_()
    y = torch.randint(classes, (batch,), generator=generator)
    found, expected = getattr(OURS, name)(logits, y), by_torch(name, logits, y)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)
    slopes = [torch.autograd.grad(each.sum(), logits)[0] for each in (found, expected)]
    torch.testing.assert_close(*slopes, rtol=1e-6, atol=1e-9)


def made(classes: int = 10) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Dropout(0.4), nn.Linear(7, classes))


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_graphs_and_runtimes_compute_it(name: str, tmp_path: Path) -> None:
    """Means, single gradients, clipped sums and cohorts, from a network with dropout."""
    model = model_of(made(), name="small", classes=10, input_shape=(5, 1, 1))
    objective, rng = Objective(own=f"{FILE}:{name}"), np.random.default_rng(1)
    graph = GradientGraph(export_graphs(model, objective=objective, cache_dir=tmp_path).gradient, model.layout)
    params, (x, y, masks) = model.init(0), random_batch(model, 6, rng, objective)
    first, tanh, _, last = made()
    outputs = last(tanh(first(torch.from_numpy(x.reshape(6, 5)))) * torch.from_numpy(masks[0]))
    losses, single = by_torch(name, outputs, torch.from_numpy(y)), []
    for each in losses:
        grads = torch.autograd.grad(each, [*first.parameters(), *last.parameters()], retain_graph=True)
        single.append(torch.cat([grad.flatten() for grad in grads]).numpy())
    expected = np.stack(single)
    for run in (TorchGradient(model, objective=objective), graph):
        client = ClientBatch(run, x, y, masks, {}, np.empty_like(params))
        found, each = client.each(params)
        np.testing.assert_allclose(found, losses.detach(), rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(each, expected, atol=1e-4 * np.abs(expected).max())
        loss, mean = client.mean(params)
        assert loss == pytest.approx(losses.mean().item(), rel=1e-4)
        np.testing.assert_allclose(mean, expected.mean(0), atol=1e-4 * np.abs(expected).max())
    many = TorchGradient(model, objective=objective).clients
    weights = np.array([[1] * 6, [1, *[0] * 5]], np.float32)  # the second one's batch is padded
    twice = [np.stack([each, each]) for each in (params, x, y, masks[0])]
    found, grads = many(*twice[:3], [twice[3]], weights=weights)
    np.testing.assert_allclose(found, [losses.mean().item(), losses[0].item()], rtol=1e-4)
    np.testing.assert_allclose(grads[1], expected[0], atol=1e-4 * np.abs(expected).max())


@pytest.mark.slow
def test_targets_may_be_numbers(tmp_path: Path) -> None:
    """A quantile's loss, on a linear model, whose formula is not asked."""

    def pinball(outputs: Tensor, y: Tensor) -> Tensor:
        errors = y - outputs
        return torch.maximum(0.9 * errors, -0.1 * errors).mean(1)

    model, objective = get_model("linear", classes=2, input_shape=(3, 1, 1)), offered(pinball, "squared")
    graphs, rng = export_graphs(model, objective=objective, cache_dir=tmp_path), np.random.default_rng(0)
    params = rng.standard_normal(model.layout.size, np.float32)
    x, y, _ = random_batch(model, 4, rng, objective)
    loss, gradient = GradientGraph(graphs.gradient, model.layout, objective=objective)(params, x, y)
    weight = torch.from_numpy(params[:6].reshape(2, 3)).requires_grad_()
    outputs = F.linear(torch.from_numpy(x.reshape(4, 3)), weight, torch.from_numpy(params[6:]))
    plain = pinball(outputs, torch.from_numpy(y))
    assert loss == pytest.approx(plain.mean().item(), rel=1e-5)
    np.testing.assert_allclose(gradient[:6], torch.autograd.grad(plain.mean(), weight)[0].flatten(), atol=1e-6)


def scalar(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits, y)


def spread_mean(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits, y).expand(len(y))


def centred(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits - logits.mean(0), y, reduction="none")


def infinite(logits: Tensor, y: Tensor) -> Tensor:
    return -torch.log(logits.relu()).mean(1)


def steep_at_zero(logits: Tensor, y: Tensor) -> Tensor:
    return logits.norm(dim=1).sqrt()


def random_numbers(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits, y, reduction="none") * torch.rand(len(y))


def counts(logits: Tensor, y: Tensor) -> Tensor:
    return (logits.argmax(1) != y).float()


def in_two_columns(logits: Tensor, y: Tensor) -> Tensor:
    return logits.square()


def wrong_call(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits, y, reduction="nothing")


def branches(logits: Tensor, y: Tensor) -> Tensor:
    losses = F.cross_entropy(logits, y, reduction="none")
    return losses * 2 if logits.abs().sum() > 1e9 else losses


REFUSED: dict[Callable[[Tensor, Tensor], Any], str] = {
    scalar: "must give one loss for each sample.*gives .* Leave out the mean.*reduction='none'",
    spread_mean: "another loss when other samples are beside it",
    centred: "another loss when other samples are beside it",
    infinite: "NaN or infinite",
    steep_at_zero: "NaN or infinite",
    random_numbers: "draws random numbers",
    counts: r"no gradient comes back to the logits",
    in_two_columns: r"must give one loss for each sample, torch.float32 \[5\] for logits \[5, 3\], and gives \[5, 3\]",
    wrong_call: r"fails on logits \[5, 3\] and targets \[5\] torch.int64: ValueError: .*test_own_loss.py, line \d+$",
    branches: "cannot be traced: .*line .*torch.where",
    nn.CrossEntropyLoss: "fails on logits",
}


@pytest.mark.parametrize("loss", REFUSED, ids=lambda loss: loss.__name__)
def test_what_is_no_loss_of_each_sample_is_refused(loss: Any) -> None:
    objective = offered(loss)
    with pytest.raises(BadInput, match=REFUSED[loss]) as caught:
        checked_digest(objective, 3)
    assert str(caught.value).startswith(f"model.loss = 'python:{loss.__name__}'")


def test_modules_and_partials_are_taken_too() -> None:
    assert checked_digest(offered(nn.CrossEntropyLoss(torch.ones(3), reduction="none")), 3)


def test_what_has_no_name_here_is_refused(tmp_path: Path) -> None:
    for name, why in (
        ("python:gone", "is a loss of a Python program; go on from there"),
        (f"{FILE}:GAMMA", "must be a function of logits and targets"),
        (f"{FILE}:none", "has no 'none'"),
        (f"{tmp_path}/none.py:focal", "cannot read"),
    ):
        with pytest.raises(BadInput, match=why):
            checked_digest(Objective(own=name), 3)


def test_a_graph_belongs_to_what_the_loss_computes(tmp_path: Path) -> None:
    """Not to its name: the cache holds one graph for each."""
    model, file = get_model("linear", classes=3, input_shape=(4, 1, 1)), tmp_path / "mine.py"
    keys = set()
    for factor in (1, 2, 2):
        file.write_text(
            "from torch.nn import functional as F\n"
            f"def mine(logits, y):\n    return {factor} * F.cross_entropy(logits, y, reduction='none')\n"
        )
        keys.add(content_key(model, Objective(own=f"{file}:mine")))
    assert len(keys) == 2
    for weights in (torch.ones(3), torch.tensor([1.0, 2, 1])):
        keys.add(content_key(model, offered(nn.CrossEntropyLoss(weights, reduction="none"))))
    assert len(keys | {content_key(model)}) == 5


def test_what_has_formulas_of_its_own_refuses_it() -> None:
    model, objective = get_model("linear", classes=3, input_shape=(4, 1, 1)), Objective(own="python:mine")
    with pytest.raises(BadInput, match="compiled kernels know no own loss"):
        NativeGradient(model, objective=objective)
    rng = np.random.default_rng(0)
    x, y, _ = random_batch(model, 2, rng)
    with pytest.raises(ValueError, match="without an own loss"):
        LinearGradient(model.layout, objective)(model.init(0), x, y)
    assert not math.isnan(LinearGradient(model.layout)(model.init(0), x, y)[0])
