"""An aggregator wants functions of a device's data that no noise covers: losses, norms, what else a header has."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hushfleet.data.samples import Samples
from hushfleet.edge_client.board.config import DeviceConfig
from hushfleet.learning.draws import Inputs
from hushfleet.methods import METHODS, make_method
from hushfleet.methods.cost import RoundTerms
from hushfleet.methods.privatize import NoisedUpdate
from hushfleet.methods.state import RoundContext
from hushfleet.methods.task_method import TaskMethod
from hushfleet.params import ParamLayout
from hushfleet.privacy.clipping import layer_norms
from hushfleet.privacy.noise import NoiseSource, SeededNoise
from hushfleet.wire.format.spec import PrivacySpec
from support.edge import Bench, Package
from support.methods import WITH_RECORDS, taken, train_round

_SHAPES = {
    "one.weight": (6, 4),
    "one.bias": (6,),
    "norm.weight": (6,),
    "two.weight": (5, 6),
    "two.bias": (5,),
    "three.weight": (3, 5),
}
LAYOUT = ParamLayout((*_SHAPES, "three.bias"), (*_SHAPES.values(), (3,)))
ROUNDS = 4
_DIRECTIONS = np.random.default_rng(0).normal(size=(4, LAYOUT.size)).astype(np.float32)


def gradient(params: Any, x: Any, y: Any, dropout: Any = (), out: Any = None, **distilled: Any) -> tuple[float, Any]:
    """Pulls to a point that follows the images."""
    moved = params - x.reshape(len(x), -1).mean(axis=0) @ _DIRECTIONS
    out[...] = moved
    return float(moved @ moved) / 2, out


def logits(params: np.ndarray, x: np.ndarray) -> np.ndarray:
    return x.reshape(len(x), -1)[:, :3] + params[:3]


def data(seed: int) -> Samples:
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (12, 1, 2, 2), dtype=np.uint8)
    return Samples(images, rng.integers(0, 3, 12), (0.5,), (0.25,))


class World:
    """A device with its data, round by round."""

    def __init__(self, method: TaskMethod, samples: Samples) -> None:
        self.method, self.samples, self.state = method, samples, method.init_state()

    def round(self, number: int, *, noise: int) -> NoisedUpdate:
        self.done = train_round(
            self.method,
            self.state,
            np.zeros(LAYOUT.size, np.float32),
            gradient,
            self.samples,
            terms=RoundTerms(),
            logits_of=logits,
            inputs=Inputs(),
            rng=np.random.default_rng(number),
            noise=SeededNoise(noise, 0, number),
        )
        return self.method.privatize(self.done.context, self.done.update, SeededNoise(noise, 1, number))

    def go_on(self, sent: np.ndarray) -> None:
        done = self.done
        self.state = self.method.advance(done.context, update=done.update, trained=done.own, sent=sent)


def raw_in_headers(method: TaskMethod) -> set[str]:
    """Fields that differ between two devices of which everybody has seen the same so far.

    What was sent is taken to be the same in both worlds, so a field that follows it is the same too. A report may
    differ if it is noised: with other noise it must be another.
    """
    found = set()
    one, other = World(method, data(1)), World(method, data(2))
    for number in range(1, ROUNDS + 1):
        renoised = one.round(number, noise=8).report
        seen, beside = (world.round(number, noise=7) for world in (one, other))
        for name in ("clip_norms", "noise_stds"):
            if not np.array_equal(getattr(seen, name), getattr(beside, name)):
                found.add(name)
        if seen.report != beside.report and any(a == b for a, b in zip(seen.report, renoised, strict=True)):
            found.add("report")
        for world in (one, other):
            world.go_on(seen.values)
    return found


def method_of(name: str, unit: str, accounting: str, **settings: Any) -> TaskMethod:
    # a wide clip norm, so that what a method adapts has room
    record = {"sample_rate": 0.5, "batches": 4} if unit == "record" else {}
    privacy = PrivacySpec(unit, accounting, 1.0, 1.5, 1e-5, **record)
    settings = {"optimizer": "sgd", "learning_rate": 0.2, "batch_size": 4, "local_epochs": 2, **settings}
    return make_method(name, taken(name, settings), privacy, LAYOUT, rounds=ROUNDS)


@pytest.mark.parametrize(
    ("name", "unit"), [*((name, "device") for name in sorted(METHODS)), *((name, "record") for name in WITH_RECORDS)]
)
def test_strict_accounting_sends_no_raw_value(name: str, unit: str) -> None:
    method = method_of(name, unit, "strict")
    assert raw_in_headers(method) == set()
    assert method.cost(RoundTerms()).raw == method.charge(RoundTerms()).raw == ()


VARIANTS = [
    *((name, {}) for name in sorted(METHODS)),
    ("acdp-pfsd", {"clipping": "fixed"}),
    ("acdp-pfsd", {"clipping": "quantile"}),
    ("fedglp-adp", {"acndp": False}),
    ("fedglp-adp", {"gamma": 0.0}),
]


@pytest.mark.parametrize(
    ("name", "settings", "unit"),
    [
        (*each, unit)
        for unit in ("device", "record")
        for each in VARIANTS
        if unit == "device" or each[0] in WITH_RECORDS
    ],
)
def test_what_is_raw_as_published_is_named_and_costs_infinity(name: str, settings: dict[str, Any], unit: str) -> None:
    method = method_of(name, unit, "as-published", **settings)
    named = method.cost(RoundTerms()).raw
    assert bool(raw_in_headers(method)) <= bool(named)
    assert method.charge(RoundTerms()).raw == named
    expected = unit == "device" and name in ("acdp-pfsd", "fedaddp", "fedglp-adp") and not settings
    assert bool(named) == expected


class LeaksNorms(TaskMethod):
    def privatize(self, context: RoundContext, update: Any, noise: NoiseSource) -> NoisedUpdate:
        return replace(super().privatize(context, update, noise), clip_norms=layer_norms(update, self.layout))


class LeaksItsLoss(TaskMethod):
    def privatize(self, context: RoundContext, update: Any, noise: NoiseSource) -> NoisedUpdate:
        return replace(super().privatize(context, update, noise), report=(float(np.abs(update).sum()),))


@pytest.mark.parametrize(("leaky", "field"), [(LeaksNorms, "clip_norms"), (LeaksItsLoss, "report")])
def test_a_method_that_does_not_say_so_is_found(leaky: type[TaskMethod], field: str) -> None:
    usual = method_of("dp-fedavg", "device", "strict")
    assert raw_in_headers(leaky(usual.parts, usual.config, usual.privacy, LAYOUT)) == {field}


@pytest.fixture
def published(package: Package) -> Package:
    privacy = PrivacySpec("device", "as-published", 1.0, 2.0, 1e-5)
    return package.with_spec(method="fedglp-adp", privacy=privacy, task="published")


def bench_with(make: Callable[..., Bench], task: Package, config: DeviceConfig, **limits: Any) -> Bench:
    bench = make(task, replace(config, limits=replace(config.limits, **limits)))
    bench.until(lambda: bool(bench.server.births))
    bench.server.open_round(1)
    bench.until(lambda: bool(bench.server.declines or bench.server.updates))
    return bench


@pytest.mark.parametrize(
    ("limits", "code", "words"),
    [
        ({}, "no-privacy", 'limits.accounting is "strict"'),
        ({"accounting": "secure", "epsilon_server": math.inf}, "no-privacy", 'limits.accounting is "secure"'),
        ({"accounting": "as-published"}, "budget", "no finite limit allows it"),
    ],
)
def test_a_board_declines_before_it_trains(
    make_bench: Callable[..., Bench],
    published: Package,
    config: DeviceConfig,
    limits: dict[str, Any],
    code: str,
    words: str,
) -> None:
    bench = bench_with(make_bench, published, config, **limits)
    (decline,) = bench.server.declines
    assert decline.code == code
    assert words in decline.reason
    assert "clip norms that follow the norms of raw updates" in decline.reason
    assert bench.store.ledger.entries() == []


def test_an_owner_who_allows_it_reads_infinity_and_what_for(
    make_bench: Callable[..., Bench], published: Package, config: DeviceConfig
) -> None:
    bench = bench_with(make_bench, published, config, accounting="as-published", epsilon_server=math.inf)
    ledger = bench.store.ledger
    assert ledger.raw_values() == ("clip norms that follow the norms of raw updates",)
    assert ledger.epsilon_server(delta=1e-5) == math.inf
    assert 0 < ledger.epsilon_noised(delta=1e-5) < 10


def test_the_three_are_the_only_ones_that_say_so() -> None:
    """A method that is added with raw values has to be added here, and in docs/privacy.md."""
    said = {name for name in METHODS if method_of(name, "device", "as-published").cost(RoundTerms()).raw}
    assert said == {"acdp-pfsd", "fedaddp", "fedglp-adp"}
