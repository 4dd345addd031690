"""Local training with every optimizer, in every runtime, against a plain loop of torch.optim."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hushfleet.data.samples import FeatureSamples
from hushfleet.learning.draws import Inputs, shuffled_batches
from hushfleet.learning.linear import LinearGradient
from hushfleet.learning.own_samples import LoadedSamples
from hushfleet.methods import make_method
from hushfleet.methods.cost import RoundTerms
from hushfleet.methods.local import Sgd, SharedOnly
from hushfleet.methods.local_round import LocalRound
from hushfleet.methods.state import DeviceState, PublicState
from hushfleet.methods.task_method import TaskMethod
from hushfleet.models import get_model
from hushfleet.models.native import make_native_optimizer
from hushfleet.models.native.gradient import NativeGradient
from hushfleet.models.torch_gradient import TorchGradient
from hushfleet.simulator.engines.fast.vmap.training import CohortTrainer, Member
from hushfleet.wire.format.spec import PrivacySpec
from support.methods import no_logits

MODEL = get_model("linear", classes=3, input_shape=(4, 1, 1))
PRIVACY = PrivacySpec("device", "strict", 1.0, 0.0, 0.1)
ROUNDS, ROUND = 5, 4
FORMS: dict[str, dict[str, Any]] = {
    "adamw": {"optimizer": "adamw", "weight_decay": 0.3},
    "adam": {"optimizer": "adam", "weight_decay": 0.3},
    "sgd": {"optimizer": "sgd", "weight_decay": 0.3},
    "momentum": {"optimizer": "sgd", "momentum": 0.9, "weight_decay": 0.3},
    "accumulated": {"optimizer": "sgd", "momentum": 0.9, "accumulate": 3},
    "all": {"optimizer": "adamw", "weight_decay": 0.3, "accumulate": 2, "schedule": "cosine", "warmup_rounds": 1},
}
RUNTIMES = ["numpy", "native", "vmap"]
COUNTS = (11, 5, 8)  # of several devices, which finish one after the other


def samples_of(count: int) -> FeatureSamples:
    rng = np.random.default_rng(count)
    return FeatureSamples(rng.standard_normal((count, 4, 1, 1), np.float32), rng.integers(0, 3, count))


def by_torch(start: np.ndarray, samples: FeatureSamples, config: Any, kept: np.ndarray | None = None) -> np.ndarray:
    """The loop that everybody writes, with the optimizers of torch.optim and `loss / n` summed over small batches.

    :param kept: entries that do not train, each a parameter of its own without a gradient.
    """
    values = [nn.Parameter(torch.tensor([value], dtype=torch.float64)) for value in start]
    trained = [value for place, value in enumerate(values) if kept is None or not kept[place]]
    kinds = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    given: dict[str, Any] = {"lr": config.learning_rate, "weight_decay": config.weight_decay}
    if config.optimizer == "sgd":
        optimizer: Any = torch.optim.SGD(trained, momentum=config.momentum, **given)
    else:
        optimizer = kinds[config.optimizer](trained, **given)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, ROUNDS - config.warmup_rounds)
    if config.schedule == "cosine":
        for _ in range(ROUND - config.warmup_rounds - 1):
            optimizer.step()  # without a gradient: nothing moves
            scheduler.step()
    x, y = torch.from_numpy(samples.x[:, :, 0, 0]).double(), torch.from_numpy(samples.labels)
    rng = np.random.default_rng(0)
    for _ in range(config.local_epochs):
        for batch in shuffled_batches(len(x), config.batch_size * config.accumulate, rng):
            optimizer.zero_grad()
            for part in torch.from_numpy(batch).split(config.batch_size):
                flat = torch.cat(values)
                logits = F.linear(x[part], flat[:12].view(3, 4), flat[12:])
                (F.cross_entropy(logits, y[part], reduction="sum") / len(batch)).backward()
            optimizer.step()
    return torch.cat(values).detach().numpy()


def trained(method: TaskMethod, runtime: str, start: np.ndarray, state: DeviceState) -> list[np.ndarray]:
    if runtime == "vmap":
        gradient = TorchGradient(MODEL)
        members = [Member(state, samples_of(count), np.random.default_rng(0), number=ROUND) for count in COUNTS]
        return [each.end for each in CohortTrainer(gradient, "cpu").train(method, members, start, inputs=Inputs())]
    how: dict[str, Any] = {"make_optimizer": make_native_optimizer} if runtime == "native" else {}
    run: Any = NativeGradient(MODEL) if runtime == "native" else LinearGradient(MODEL.layout)
    ends = []
    for count in COUNTS:
        begun = LocalRound(method, state, start, RoundTerms(), LoadedSamples(samples_of(count), run, no_logits), ROUND)
        ends.append(begun.train(inputs=Inputs(), rng=np.random.default_rng(0), **how).end)
    return ends


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("form", FORMS)
def test_steps_are_those_of_torch(form: str, runtime: str, need_compiler: Any) -> None:
    if runtime == "native":
        need_compiler()
    config = {"learning_rate": 0.05, "batch_size": 2, "local_epochs": 2, **FORMS[form]}
    method = make_method("fedavg", config, PRIVACY, MODEL.layout, rounds=ROUNDS)
    start = np.random.default_rng(1).standard_normal(MODEL.layout.size).astype(np.float32)
    for count, end in zip(COUNTS, trained(method, runtime, start, method.init_state()), strict=True):
        expected = by_torch(start, samples_of(count), method.config)
        np.testing.assert_allclose(end, expected, rtol=0, atol=1e-6)
        assert np.abs(expected - start).max() > 0.01


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("form", ["adamw", "momentum"])
def test_decay_moves_only_what_trains(form: str, runtime: str, need_compiler: Any) -> None:
    """The personal entries of a method that trains the shared ones alone, here scattered over the vector."""
    if runtime == "native":
        need_compiler()
    config = {"learning_rate": 0.05, "batch_size": 2, **FORMS[form]}
    method = make_method("fedavg", config, PRIVACY, MODEL.layout, rounds=ROUNDS)
    method.parts = replace(method.parts, training=Sgd(order=SharedOnly()))
    rng = np.random.default_rng(1)
    start = rng.standard_normal(MODEL.layout.size).astype(np.float32)
    kept = rng.random(len(start)) < 0.4
    for count, end in zip(COUNTS, trained(method, runtime, start, DeviceState(PublicState(kept, 1))), strict=True):
        assert end[kept].tobytes() == start[kept].tobytes()
        np.testing.assert_allclose(end, by_torch(start, samples_of(count), method.config, kept), rtol=0, atol=1e-6)


def test_accumulated_batches_are_computed_one_after_the_other() -> None:
    """So a board needs the memory of one; an epoch's last step has what is left."""
    sizes, run = [], LinearGradient(MODEL.layout)

    def gradient(params: Any, x: Any, y: Any, *arguments: Any, **named: Any) -> Any:
        sizes.append(len(y))
        return run(params, x, y, *arguments, **named)

    config = {"batch_size": 3, "accumulate": 2, "local_steps": 3}
    method = make_method("fedavg", config, PRIVACY, MODEL.layout, rounds=1)
    loaded = LoadedSamples(samples_of(8), gradient, no_logits)
    begun = LocalRound(method, method.init_state(), np.zeros(MODEL.layout.size, np.float32), RoundTerms(), loaded)
    done = begun.train(inputs=Inputs(), rng=np.random.default_rng(0))
    assert sizes == [3, 3, 2, 3, 3]
    assert done.loss < np.log(3)
