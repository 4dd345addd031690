"""FedALA's start against the loop of its public code, in plain PyTorch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from hushfleet.data.samples import Samples
from hushfleet.errors import PrivacyError
from hushfleet.learning.own_samples import LoadedSamples
from hushfleet.methods import make_method
from hushfleet.methods.state import DeviceState, PublicState
from hushfleet.models.model import Model, layout_of
from hushfleet.models.torch_gradient import TorchGradient
from hushfleet.privacy.noise import SeededNoise
from hushfleet.wire.format.spec import PrivacySpec
from support.methods import trained

PRIVACY = PrivacySpec("device", accounting="strict", clip_norm=1e6, noise_multiplier=0.0, delta=0.1)
LAYOUT = layout_of(body=(5, 6), head=(3, 5))


def forward(t: dict[str, Tensor], x: Tensor, dropout: object = ()) -> Tensor:
    hidden = F.linear(x.flatten(1), t["body.weight"], t["body.bias"]).tanh()
    return F.linear(hidden, t["head.weight"], t["head.bias"])


GRADIENT = TorchGradient(Model("tiny", "this test", (1, 2, 3), 3, LAYOUT, (), forward))


def samples_of(rng: np.random.Generator, count: int) -> Samples:
    return Samples(rng.normal(size=(count, 1, 2, 3)).astype(np.float32), rng.integers(0, 3, count), (0.0,), (1.0,))


def ala(own, shared, weights, x, y, *, layers, eta, batch, places, first_passes):
    """The code of the paper, `adaptive_local_aggregation`, on flat tensors by layer."""
    names = [("body.weight", "body.bias"), ("head.weight", "head.bias")]
    weighed = [name for layer in names[-layers:] for name in layer]
    model = {name: shared[name].clone() for name in shared}
    first = weights is None
    weights = {name: torch.ones_like(own[name]) for name in weighed} if first else dict(weights)
    for name in weighed:
        model[name] = own[name] + (shared[name] - own[name]) * weights[name]
    losses = []
    while True:
        for begin in range(0, len(places), batch):
            part = places[begin : begin + batch]
            at = {name: value.clone().requires_grad_() for name, value in model.items()}
            loss = F.cross_entropy(forward(at, x[part]), y[part])
            loss.backward()
            for name in weighed:
                apart = shared[name] - own[name]
                weights[name] = torch.clamp(weights[name] - eta * (at[name].grad * apart), 0, 1)
                model[name] = own[name] + apart * weights[name]
        losses.append(loss.item())
        if not first or (len(losses) > 10 and np.std(losses[-10:]) < 0.1) or len(losses) == first_passes:
            return model, weights


@given(
    seed=st.integers(0, 10_000),
    count=st.integers(1, 12),
    layers=st.integers(1, 3),
    batch=st.integers(1, 5),
    eta=st.sampled_from([0.1, 1.0]),
    passes=st.sampled_from([1, 3, 14]),
)
@settings(max_examples=30, deadline=None)
def test_it_starts_as_the_public_code(seed: int, count: int, layers: int, batch: int, eta: float, passes: int) -> None:
    rng = np.random.default_rng(seed)
    samples = samples_of(rng, count)
    config = {"layers": layers, "weights_learning_rate": eta, "batch_size": batch, "first_passes": passes, "share": 0.6}
    personal = make_method("fedala", config, PRIVACY, LAYOUT, rounds=2).parts.personal
    loaded = LoadedSamples(samples, GRADIENT, GRADIENT.logits)
    vector = lambda: rng.normal(size=LAYOUT.size).astype(np.float32)  # noqa: E731
    tensors = lambda flat: {n: torch.from_numpy(a.copy()) for n, a in LAYOUT.unflatten(flat).items()}  # noqa: E731
    x, y, slow, private = torch.from_numpy(samples.x), torch.from_numpy(samples.labels), None, {}
    for round in (1, 2, 3):
        own, shared = vector(), vector()
        state = DeviceState(PublicState(np.zeros(LAYOUT.size, bool), round), own, private)
        start, private = personal.begin(state, shared, None, loaded, LAYOUT)
        taken = max(1, int(0.6 * count))
        places = [(round * taken + each) % count for each in range(taken)]
        how = {"layers": min(layers, 2), "eta": eta, "batch": batch, "places": places, "first_passes": passes}
        model, slow = ala(tensors(own), tensors(shared), slow, x, y, **how)
        expected = np.concatenate([model[name].numpy().ravel() for name in LAYOUT.names])
        np.testing.assert_allclose(start, expected, rtol=1e-3, atol=1e-3)
        assert private["weights"].min() >= 0
        assert private["weights"].max() <= 1


def test_a_newcomer_starts_from_the_global_model_and_all_of_the_change_is_sent() -> None:
    rng = np.random.default_rng(1)
    samples, config = samples_of(rng, 9), {"optimizer": "sgd", "learning_rate": 0.1, "batch_size": 4}
    method = make_method("fedala", config, PRIVACY, LAYOUT, rounds=2)
    shared, state = rng.normal(size=LAYOUT.size).astype(np.float32), method.init_state()
    for participations in (0, 1, 2):
        done = trained(method, shared, GRADIENT, samples, state=state, logits_of=GRADIENT.logits)
        assert (done.context.start is shared or np.array_equal(done.context.start, shared)) == (participations == 0)
        sent = method.privatize(done.context, done.update, SeededNoise(0, 0, 0)).values
        np.testing.assert_allclose(sent, done.end - shared, atol=1e-6)
        state = method.advance(done.context, update=done.update, trained=done.own, sent=sent)
        assert sorted(state.private) == (["weights"] if participations else [])
        shared = shared + sent / 3


def test_with_records_it_is_refused() -> None:
    record = replace(PRIVACY, unit="record", clip_norm=1.0, noise_multiplier=1.0, sample_rate=0.1, batches=2)
    with pytest.raises(PrivacyError, match=r"fedala.* learns its start by gradients without noise"):
        make_method("fedala", {}, record, LAYOUT, rounds=2)
