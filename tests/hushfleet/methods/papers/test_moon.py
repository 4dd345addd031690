"""MOON against a plain loop of PyTorch with the paper's equations."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hushfleet.data.samples import FeatureSamples
from hushfleet.learning.draws import Inputs, shuffled_batches
from hushfleet.methods import make_method
from hushfleet.methods.cost import RoundTerms
from hushfleet.methods.papers.moon import Contrast
from hushfleet.models.module import model_of
from hushfleet.models.torch_gradient import TorchGradient
from hushfleet.wire.format.spec import PrivacySpec
from support.methods import train_round

PLAIN = PrivacySpec("device", "strict", math.inf, 0.0, 0.1)


def algorithm_1(
    network: nn.Module, start: Tensor, last: nn.Module | None, x: Tensor, y: Tensor, batches: list[Tensor], mu: float
) -> nn.Module:
    """PartyLocalTraining(i, w^t), with the logits as representations; the loss of Eqs. (3) and (4)."""
    ours, tau = copy.deepcopy(network), 0.5
    nn.utils.vector_to_parameters(start.clone(), ours.parameters())
    world = copy.deepcopy(ours)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.3, momentum=0.9)
    for batch in batches:
        z = ours(x[batch])
        loss = F.cross_entropy(z, y[batch])
        if last is not None:
            near = torch.exp(torch.cosine_similarity(z, world(x[batch]).detach()) / tau)
            far = torch.exp(torch.cosine_similarity(z, last(x[batch]).detach()) / tau)
            loss = loss + mu * -torch.log(near / (near + far)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return ours


@pytest.mark.parametrize(("mu", "count", "classes", "batch_size"), [(5.0, 11, 4, 4), (1.0, 6, 2, 6), (0.1, 5, 7, 2)])
def test_two_rounds_are_those_of_the_paper(mu: float, count: int, classes: int, batch_size: int) -> None:
    torch.manual_seed(count)
    network = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, classes))
    model = model_of(network, name="small", classes=classes, input_shape=(3, 1, 1))
    config = {"mu": mu, "optimizer": "sgd", "momentum": 0.9, "learning_rate": 0.3, "batch_size": batch_size}
    method = make_method("moon", {**config, "local_epochs": 2}, PLAIN, model.layout, rounds=2)
    gradient, rng = TorchGradient(model, objective=method.objective), np.random.default_rng(count)
    x, y = rng.standard_normal((count, 3, 1, 1), np.float32), rng.integers(0, classes, count)
    state, last = method.init_state(), None
    for round in (1, 2):
        start = model.init(0) + rng.standard_normal(model.layout.size, np.float32) / 4
        how = {"terms": RoundTerms(), "logits_of": gradient.logits, "inputs": Inputs()}
        order, same = np.random.default_rng(round), np.random.default_rng(round)
        done = train_round(method, state, start, gradient, FeatureSamples(x, y), rng=order, **how)
        batches = [torch.from_numpy(each) for _ in range(2) for each in shuffled_batches(count, batch_size, same)]
        given = torch.from_numpy(start.copy()), last, torch.from_numpy(x[:, :, 0, 0]), torch.from_numpy(y)
        last = algorithm_1(network, *given, batches, mu)
        expected = nn.utils.parameters_to_vector(last.parameters()).detach()
        np.testing.assert_allclose(done.end, expected, rtol=1e-4, atol=2e-6)
        state = method.advance(done.context, update=done.update, trained=done.own, sent=done.update)
    assert isinstance(method.training.distillation, Contrast)


def test_its_contrast_matters() -> None:
    """As a check of the test above: without it, the second round ends elsewhere."""
    torch.manual_seed(0)
    network = nn.Linear(2, 2)
    x, y, start = torch.randn(4, 2), torch.tensor([0, 1, 1, 0]), torch.randn(6)
    with_it, without = (algorithm_1(network, start, network, x, y, [torch.arange(4)], mu) for mu in (5.0, 0.0))
    assert not torch.allclose(with_it.weight, without.weight, atol=1e-2)
