"""No list of stages is charged less than what leaves it costs: random lists, and stages that lie, against an oracle."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hushfleet.errors import PrivacyError
from hushfleet.methods import task_method
from hushfleet.methods.cost import RoundTerms
from hushfleet.methods.method import Method, TrainingConfig
from hushfleet.methods.privatize import NoisedUpdate
from hushfleet.methods.sparse import KeepLargest
from hushfleet.methods.stages import (
    ClipLayers,
    ClipWhole,
    EvenBounds,
    Gaussian,
    LayerBounds,
    NumberReport,
    OneStep,
    ScaleWhole,
    Transform,
    costs,
)
from hushfleet.methods.state import DeviceState, PublicState
from hushfleet.methods.task_method import TaskMethod, bind
from hushfleet.params import ParamLayout
from hushfleet.wire.format.spec import PrivacySpec
from support.methods import Constant, context_of

LAYOUT = ParamLayout(("a.weight", "b.weight", "c.weight"), ((3,), (4,), (2,)))
TRIED = 6  # updates, of which the worst counts
GRID = 2.0**-8


class Louder(Transform):
    """Makes an update a thousand times as large."""

    def change(self, context: Any, update: np.ndarray, noise: Any) -> np.ndarray:
        return update * np.float32(1000)


@dataclass(frozen=True)
class Shares(LayerBounds):
    """Bounds that say that their norm is 1; `factor` above 1 makes that a lie."""

    weights: tuple[float, float, float]
    factor: float = 1.0

    def bounds(self, memory: Any, global_params: Any, layout: ParamLayout) -> np.ndarray:
        squares = np.array(self.weights)
        return self.factor * (squares / squares.sum()) ** 0.5


def loud(context: Any, update: np.ndarray) -> list[float]:
    """A report that is as large as it can be made."""
    return [1e6 * float(update.sum()), -math.inf]


def method_of(stages: tuple[Any, ...], *, sigma: float = 1.5, accounting: str = "as-published") -> TaskMethod:
    privacy = PrivacySpec("device", accounting, clip_norm=0.7, noise_multiplier=sigma, delta=0.1)
    return bind(Method(stages=stages), TrainingConfig(), privacy, LAYOUT)


@dataclass
class Recorder:
    """Noise of zero, which notes nothing: the oracle reads the deviations that noise would have had."""

    def normal(self, size: int) -> np.ndarray:
        return np.zeros(size)


def leaves(method: TaskMethod, update: np.ndarray, terms: RoundTerms) -> NoisedUpdate:
    return method.privatize(context_of(method, masked(), terms=terms), update, Recorder())


def masked() -> DeviceState:
    return DeviceState(PublicState(np.arange(LAYOUT.size) == 1, 1))


def cost_by_oracle(method: TaskMethod, terms: RoundTerms, rng: np.random.Generator) -> float:
    """The noise multiplier that is really there: distance of two neighbours' releases in units of their noise.

    Neighbours are an update and none at all. Where something that differs has no noise it is 0.
    """
    setting = method.setting(terms)
    report_stds = [
        stage.bound * stage.noise_multiplier(setting) / math.sqrt(setting.noise_split)
        for stage in method.parts.stages
        if isinstance(stage, NumberReport)
        for _ in range(stage.count)
    ]
    nothing, worst = leaves(method, np.zeros(LAYOUT.size, np.float32), terms), math.inf
    for _ in range(TRIED):
        scale = 10.0 ** rng.integers(-1, 6)
        update = (scale * rng.normal(size=LAYOUT.size) * (rng.random(LAYOUT.size) < 0.6)).astype(np.float32)
        seen = leaves(method, update, terms)
        stds = np.concatenate(
            [np.full(span.size, std) for span, std in zip(LAYOUT.layers, seen.noise_stds, strict=True)]
        )
        moved = np.abs((seen.values - nothing.values).astype(np.float64)) - GRID * stds  # sums are on a grid
        moved = np.concatenate([np.clip(moved, 0, None), np.abs(np.subtract(seen.report, nothing.report))])
        stds = np.concatenate([stds, report_stds])
        if np.any((stds == 0) & (moved > 0)):
            return 0.0
        distance = math.sqrt(float(np.sum((moved[stds > 0] / stds[stds > 0]) ** 2)))
        worst = min(worst, 1 / distance if distance else math.inf)
    return worst


BIT = NumberReport(2, "two numbers", loud, multiplier=lambda setting: 3 * setting.noise_multiplier, adds_up=True)
LAYERS = [ClipLayers(EvenBounds(2.0)), ClipLayers(Shares((1, 2, 3)))]
CHANGES = [KeepLargest(0.4), Louder(), ClipWhole(), ScaleWhole(), *LAYERS]
NOISES = [(), (Gaussian(),), (Gaussian(scaled_to_clip_norm=True),), (Gaussian(beside=BIT), BIT), (Gaussian(), BIT)]


@given(
    st.lists(st.sampled_from(CHANGES), max_size=4),
    st.sampled_from(NOISES),
    st.sampled_from(["as-published", "strict"]),
    st.integers(1, 9),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=150, deadline=None)
def test_no_list_is_charged_less_than_it_costs(
    changes: list[Any], noises: tuple[Any, ...], accounting: str, split: int, seed: int
) -> None:
    method, terms = method_of((*changes, *noises), accounting=accounting), RoundTerms(split)
    charge = method.charge(terms)
    assert charge.noise_multiplier <= cost_by_oracle(method, terms, np.random.default_rng(seed)) * (1 + 1e-6)
    bounded = bool(changes) and isinstance(changes[-1], (ClipWhole, ScaleWhole, ClipLayers))
    assert (charge.noise_multiplier > 0) == (bounded and bool(noises))


def test_the_oracle_finds_what_is_charged_to_a_few_percent() -> None:
    """Or it could be blind."""
    for stages in ((ClipWhole(), Gaussian()), (ScaleWhole(), Gaussian()), (ClipLayers(Shares((1, 2, 3))), Gaussian())):
        method = method_of(stages)
        found = cost_by_oracle(method, RoundTerms(4), np.random.default_rng(0))
        assert found == pytest.approx(method.charge(RoundTerms(4)).noise_multiplier, rel=0.05)
        assert found == pytest.approx(1.5 / 2, rel=0.05)


def test_a_report_and_the_values_are_one_mechanism() -> None:
    """1/z^2 adds: a report that no part of the noise was kept for makes a round cost more."""
    paid, unpaid = (method_of((ClipWhole(), Gaussian(beside=beside), BIT)) for beside in (BIT, None))
    assert paid.charge(RoundTerms()).noise_multiplier == pytest.approx(1.5, rel=1e-12)
    assert unpaid.charge(RoundTerms()).noise_multiplier == pytest.approx((1.5**-2 + 4.5**-2) ** -0.5, rel=1e-12)


class Undone(Transform):
    """Puts the raw update on top of what is noised already."""

    def change(self, context: Any, update: np.ndarray, noise: Any) -> np.ndarray:
        return update + 7


class FreeClip(ClipWhole):
    """Says that it clips, and does not."""

    def apply(self, context: Any, noised: NoisedUpdate) -> NoisedUpdate:
        return noised


class FreeScale(ScaleWhole):
    """Says that it scales, and does not."""

    def apply(self, context: Any, noised: NoisedUpdate) -> NoisedUpdate:
        return noised


class FreeNoise(Gaussian):
    """Says that it adds noise, and does not."""

    def apply(self, context: Any, noised: NoisedUpdate, cost: Any, noise: Any) -> NoisedUpdate:
        return noised


class FreeTransform(Transform):
    """Says that it costs nothing."""

    def change(self, context: Any, update: np.ndarray, noise: Any) -> np.ndarray:
        return update

    def cost(self, setting: Any, cost: Any) -> Any:
        return replace(cost, norm=1.0, noise_multiplier=100.0)


class Impostor:
    """No stage at all."""

    def cost(self, setting: Any, cost: Any) -> Any:
        return replace(cost, norm=1.0, noise_multiplier=100.0)


@pytest.mark.parametrize(
    "stages",
    [
        (ClipWhole(), Gaussian(), Undone()),
        (ClipWhole(), Gaussian(), ClipWhole()),
        (ClipWhole(), Gaussian(), Gaussian()),
        (FreeClip(), Gaussian()),
        (FreeScale(), Gaussian()),
        (ClipWhole(), FreeNoise()),
        (Impostor(),),
    ],
)
def test_a_list_that_lies_is_no_method(stages: tuple[Any, ...]) -> None:
    with pytest.raises(PrivacyError, match=r"is no stage|is the last thing"):
        Method(stages=stages)


@pytest.mark.parametrize("stages", [(OneStep(1.0, 1),), (ClipWhole(), OneStep(1.0, 1)), (OneStep(1.0, 9), *NOISES[1])])
@pytest.mark.parametrize("accounting", ["as-published", "strict"])
def test_a_step_whose_noise_is_that_of_a_sum_is_refused_where_none_is_made(
    stages: tuple[Any, ...], accounting: str
) -> None:
    with pytest.raises(PrivacyError, match="secure aggregation over records"):
        method_of(stages, accounting=accounting).charge(RoundTerms())


@pytest.mark.parametrize("stages", [(FreeTransform(),), (ClipWhole(), FreeTransform(), Gaussian()), (Gaussian(),)])
def test_what_a_transform_says_of_its_cost_is_not_asked(stages: tuple[Any, ...]) -> None:
    charge = method_of(stages).charge(RoundTerms())
    assert charge.mechanism == "none"
    assert charge.noise_multiplier == 0


def test_bounds_above_what_they_declare_are_refused_before_anything_leaves() -> None:
    method = method_of((ClipLayers(Shares((1, 1, 1), factor=1.01)), Gaussian()))
    with pytest.raises(PrivacyError, match="Shares gives bounds above the norm 1"):
        method.privatize(context_of(method), np.ones(LAYOUT.size, np.float32), Constant())


def test_a_report_of_another_length_is_refused() -> None:
    method = method_of((ClipWhole(), Gaussian(), replace(BIT, count=1)))
    with pytest.raises(PrivacyError, match=r"a report of 1 numbers has the shape \(2,\)"):
        method.privatize(context_of(method), np.ones(LAYOUT.size, np.float32), Constant())


def test_with_the_unit_record_the_list_is_rewritten_once() -> None:
    privacy = PrivacySpec("record", "strict", 0.7, 1.5, 1e-5, sample_rate=0.1, batches=3)
    listed = Method(stages=(KeepLargest(0.5), ClipWhole(), Gaussian(max_preference=2.0, beside=BIT), BIT))
    method = bind(listed, TrainingConfig(batch_size=1), privacy, LAYOUT)
    assert method.parts.stages == (KeepLargest(0.5),)
    charge = method.charge(RoundTerms(preference=2.0))
    assert (charge.unit, charge.noise_multiplier, charge.steps, charge.raw) == ("record", 3.0, 3, ())
    with pytest.raises(PrivacyError, match="allows 2 times"):
        method.charge(RoundTerms(preference=2.1))


def test_with_the_unit_record_no_part_may_look_at_the_samples() -> None:
    from hushfleet.methods.personal import Personal

    class Curious(Personal):
        def choose(self, state: Any, global_params: Any, samples: Any, layout: Any) -> Any:
            return samples.squared_gradient(global_params) > 0

    privacy = PrivacySpec("record", "strict", 0.7, 1.5, 1e-5, sample_rate=0.1, batches=3)
    method = bind(Method(Curious()), TrainingConfig(), privacy, LAYOUT)
    with pytest.raises(PrivacyError, match="outside of noised gradients"):
        context_of(method, samples=object())


def test_what_terms_cost_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    method, calls, controls = method_of((ClipWhole(), Gaussian(max_preference=3.0))), [], {"noise_multiplier": 2.0}
    monkeypatch.setattr(task_method, "costs", lambda *given: calls.append(given) or costs(*given))
    for _ in range(20):
        assert method.charge(RoundTerms()).noise_multiplier == method.cost(RoundTerms()).noise_multiplier == 1.5
        assert method.charge(RoundTerms(1, dict(controls))).noise_multiplier == 2.0
        assert method.charge(RoundTerms(4)).noise_multiplier == 0.75
        assert method.charge(RoundTerms(preference=2.0)).noise_multiplier == 3.0
    assert len(calls) == 4
    terms = RoundTerms(1, controls)
    assert method.charge(terms).noise_multiplier == 2.0
    controls["noise_multiplier"] = 5.0
    assert method.charge(terms).noise_multiplier == 5.0, "terms that somebody changes have another cost"
    assert method.charge(RoundTerms(1, {"noise_multiplier": 2.0})).noise_multiplier == 2.0
