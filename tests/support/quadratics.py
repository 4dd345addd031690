"""Rounds of a method on devices with quadratic losses, for the loops that papers print to be compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hushfleet.aggregator.rounds.server_half import ServerRound
from hushfleet.learning.draws import Inputs
from hushfleet.methods import make_method
from hushfleet.methods.cost import RoundTerms
from hushfleet.methods.server import ClosedRound, ServerArrays
from hushfleet.methods.state import DeviceState
from hushfleet.params import ParamLayout
from hushfleet.privacy.noise import SeededNoise
from hushfleet.wire.format.spec import PrivacySpec
from support.methods import WHITE, no_logits, train_round

OPEN = PrivacySpec("device", "strict", float("inf"), 0.0, 0.1)
"""No clipping, no noise."""
Slope = Callable[[np.ndarray], np.ndarray]


@dataclass
class Fleet:
    """Devices whose losses are (w - b)^T A (w - b) / 2, on a network of random shapes.

    :param seed: of the shapes, the losses, the first model and the cohorts.
    :param layout: by default up to four layers, with and without biases.
    """

    seed: int
    layout: ParamLayout | None = None
    devices: int = 4
    rounds: int = 4
    cohorts: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        if self.layout is None:
            shapes = [tuple(rng.integers(1, 4, 2).tolist()) for _ in range(rng.integers(2, 5))]
            tensors = [(f"layer{at}.weight", shape) for at, shape in enumerate(shapes)]
            tensors.insert(1, ("layer0.bias", shapes[0][:1]))
            self.layout = ParamLayout(*map(tuple, zip(*tensors, strict=True)))  # type: ignore[arg-type]
        size = self.layout.size
        self.start = rng.normal(size=size).astype(np.float32)
        roots = rng.normal(size=(self.devices, size, size)) / size**0.5
        self.curves, self.minima = roots @ roots.transpose(0, 2, 1), rng.normal(size=(self.devices, size))
        chosen = [rng.permutation(self.devices)[: rng.integers(1, self.devices + 1)] for _ in range(self.rounds)]
        self.cohorts = [sorted(each.tolist()) for each in chosen]

    def slope(self, device: int, at: np.ndarray) -> np.ndarray:
        """The gradient of a device's loss."""
        found: np.ndarray = self.curves[device] @ (at - self.minima[device])
        return found

    def method(self, name: str, privacy: PrivacySpec = OPEN, **config: Any) -> Any:
        assert self.layout is not None
        return make_method(name, {"batch_size": 1, **config}, privacy, self.layout, rounds=self.rounds)

    def played(self, method: Any) -> Played:
        """All rounds with the package's parts."""
        found = Played(self.start, [method.init_state() for _ in range(self.devices)], method.server.initial(0))
        for number, cohort in enumerate(self.cohorts, 1):
            found.round(self, method, number, cohort)
        return found


@dataclass
class Played:
    """What rounds have left: the global model, the states of devices and server, what was sent in the last round."""

    model: np.ndarray
    states: list[DeviceState]
    server: ServerArrays
    sent: dict[int, np.ndarray] = field(default_factory=dict)

    def round(self, fleet: Fleet, method: Any, number: int, cohort: Sequence[int]) -> None:
        size, self.sent = len(self.model), {}
        vectors = [self.server.get(name, np.zeros(size, np.float32)) for name in method.server.vectors]
        published, sums, weights = np.concatenate([self.model, *vectors]), np.zeros(size), np.zeros(size)
        for device in cohort:
            how = {"rng": np.random.default_rng(number), "noise": SeededNoise(9, device, number)}
            done = train_round(
                method,
                self.states[device],
                published,
                _gradient(lambda at, device=device: fleet.slope(device, at)),
                WHITE,
                terms=RoundTerms(len(cohort)),
                logits_of=no_logits,
                inputs=Inputs(),
                **how,
            )
            sent = method.privatize(done.context, done.update, SeededNoise(8, device, number)).values
            self.states[device] = method.advance(done.context, update=done.update, trained=done.own, sent=sent)
            self.sent[device] = sent
            sums += sent
            weights += ~done.context.mask
        half = ServerRound(method, self.model, self.server, fleet.devices)
        after, mean = half.aggregated(sums, weights), half.mean(sums, weights)
        closed = ClosedRound(number, self.model, after, (), None, None, len(cohort), fleet.devices, mean)
        self.server, self.model = method.server.advance(self.server, closed), after


def _gradient(slope: Slope) -> Any:
    def gradient(params: Any, x: Any, y: Any, dropout: Any = (), out: Any = None, **_: Any) -> Any:
        out[:] = slope(params.astype(np.float64))
        return 0.0, out

    return gradient


def assert_close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-5)
