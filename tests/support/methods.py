"""A method's parts, asked one by one, as devices and executors ask them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from hushfleet.data.samples import Samples
from hushfleet.learning.draws import Inputs
from hushfleet.learning.own_samples import LoadedSamples
from hushfleet.methods import METHODS
from hushfleet.methods.cost import RoundTerms
from hushfleet.methods.local_round import LocalRound, Trained
from hushfleet.methods.method import CountedStepsConfig, PlainSgdConfig
from hushfleet.methods.privatize import NoisedUpdate
from hushfleet.methods.state import DeviceState, PublicState, RoundContext
from hushfleet.methods.task_method import TaskMethod
from hushfleet.privacy.noise import SeededNoise
from support.documents import EXAMPLES

WHITE = Samples(np.full((1, 1, 1, 1), 255, np.uint8), np.zeros(1, np.int64), (0.0,), (1.0,))
BLACK = Samples(np.zeros((1, 1, 1, 1), np.uint8), np.zeros(1, np.int64), (0.0,), (1.0,))


class Constant:
    """A noise source whose values can be foreseen."""

    def __init__(self, value: float = 0.0) -> None:
        self.value = value

    def normal(self, size: int) -> np.ndarray:
        return np.full(size, self.value)


WITH_RECORDS = [name for name in sorted(METHODS) if name != "fedala"]
"""The methods that take the unit `record`."""


class Fisher:
    """A device's samples, of which nothing but these squared gradients and some counts of labels is asked."""

    def __init__(self, values: np.ndarray) -> None:
        self.values, self.asked_at = values, None

    def squared_gradient(self, params: np.ndarray) -> np.ndarray:
        self.asked_at = params
        return self.values

    count = 3

    def gradient(self, params: np.ndarray, indices: np.ndarray) -> tuple[float, np.ndarray]:
        return 0.0, self.values

    def label_counts(self, classes: int) -> np.ndarray:
        return np.arange(classes)


def taken(name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Settings for any method in the form that this one takes: with steps in place of epochs, without momentum."""
    kind, found = METHODS[name].config, dict(settings)
    if issubclass(kind, CountedStepsConfig) and "local_epochs" in found:
        found = {"local_steps": 2 * found.pop("local_epochs"), **found}
    if issubclass(kind, PlainSgdConfig) and name != "fednova":
        found.pop("momentum", None)
    return found


def with_norms(plain: dict[str, Any]) -> dict[str, Any]:
    """A task whose network has normalisation layers, if its method is about them."""
    if plain["method"]["name"] == "fedbn":
        plain["model"] = {"name": f"{EXAMPLES / 'own-cnn' / 'network.py'}:SmallNet"}
    return plain


def context_of(
    method: TaskMethod,
    state: DeviceState | None = None,
    global_params: np.ndarray | None = None,
    terms: RoundTerms | None = None,
    *,
    samples: Any = None,
    **changes: Any,
) -> RoundContext:
    """The beginning of a round: by default a newcomer's, on a global model of zeros."""
    start = np.zeros(method.layout.size, np.float32) if global_params is None else global_params
    begun = LocalRound(method, state or method.init_state(), start, terms or RoundTerms(), samples)
    return replace(begun.context, **changes)


def privatized(
    method: TaskMethod, update: np.ndarray, terms: RoundTerms | None = None, noise: Any = None, **context: Any
) -> NoisedUpdate:
    return method.privatize(context_of(method, terms=terms, **context), update, noise or Constant())


def advanced(
    method: TaskMethod, state: DeviceState, *, update: np.ndarray, trained: np.ndarray, sent: np.ndarray, **context: Any
) -> DeviceState:
    return method.advance(context_of(method, state, **context), update=update, trained=trained, sent=sent)


def penalty(method: TaskMethod, context: RoundContext, params: Any, gradient: Any = None) -> Any:
    """What the method adds to a gradient, of zeros by default, at `params`."""
    if gradient is None:
        gradient = params * 0
    method.training.add_penalties(context, params, gradient)
    return gradient


def stacked(contexts: list[RoundContext]) -> RoundContext:
    """Of several clients, in PyTorch."""

    def stack(arrays: list[Any]) -> torch.Tensor:
        return torch.from_numpy(np.stack(arrays))

    states, first = [each.state for each in contexts], contexts[0]
    own = None if first.state.own is None else stack([state.own for state in states])
    private = {name: stack([state.private[name] for state in states]) for name in first.state.private}
    return replace(
        first,
        state=DeviceState(PublicState(stack([state.public.mask for state in states]), 0), own, private),
        global_params=torch.from_numpy(first.global_params.copy()),
        start=stack([each.start for each in contexts]),
        chosen=None if first.chosen is None else stack([each.chosen for each in contexts]),
        vectors={name: torch.from_numpy(vector) for name, vector in first.vectors.items()},
    )


def no_logits(params: np.ndarray, x: np.ndarray) -> np.ndarray:
    return np.zeros((len(x), 2), np.float32)


def train_round(
    method: TaskMethod,
    state: DeviceState,
    published: Any,
    gradient: Any,
    samples: Any,
    *,
    terms: RoundTerms,
    logits_of: Any,
    **how: Any,
) -> Trained:
    """All that a device does with its data in a round, from `published`."""
    loaded = LoadedSamples(samples, gradient, logits_of, by_record=method.by_record)
    return LocalRound(method, state, published, terms, loaded).train(**how)


def trained(
    method: TaskMethod, start: Any, gradient: Any, samples: Samples = WHITE, *, state: Any = None, **how: Any
) -> Trained:
    """A round's training from the global model `start`."""
    usual = {"terms": RoundTerms(), "logits_of": no_logits, "inputs": Inputs(), "rng": np.random.default_rng(0)}
    begin = np.array(start, np.float32)
    settings = {**usual, "noise": SeededNoise(0, 0, 0), **how}
    return train_round(method, state or method.init_state(), begin, gradient, samples, **settings)
