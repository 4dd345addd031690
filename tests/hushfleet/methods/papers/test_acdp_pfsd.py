"""ACDP-pFSD by hand: the teacher, the clip norms, the reports and what they cost."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from hushfleet.learning.evaluation import Evaluation
from hushfleet.methods import make_method
from hushfleet.methods.cost import RoundTerms
from hushfleet.methods.local_round import LocalRound
from hushfleet.methods.server import ClosedRound
from hushfleet.objectives import Objective
from hushfleet.params import ParamLayout
from hushfleet.privacy.accountant import Step, epsilon
from hushfleet.privacy.noise import SeededNoise
from hushfleet.wire.format.spec import PrivacySpec
from support.methods import Constant, advanced, context_of

LAYOUT = ParamLayout(("a.weight", "b.weight"), ((2, 3), (4,)))
ZEROS = np.zeros(10, np.float32)


class Data:
    """A device's data whose answers are known."""

    def __init__(self, accuracy: float = 0.75, loss: float = 2.0) -> None:
        self.found = Evaluation(accuracy, loss)

    def logits(self, params: Any) -> np.ndarray:
        return np.outer(np.arange(3), params[:2]).astype(np.float32)

    def evaluate(self, params: Any) -> Evaluation:
        return self.found


def acdp(
    accounting: str = "as-published", *, clip_norm: float = 1.0, sigma: float = 2.0, unit: str = "device", **config: Any
) -> Any:
    privacy = PrivacySpec(unit, accounting, clip_norm, sigma, 0.01)
    return make_method("acdp-pfsd", config, privacy, LAYOUT, rounds=5)


def outcome(*reports: tuple[float, ...]) -> ClosedRound:
    return ClosedRound(1, ZEROS, ZEROS, reports, None, None)


def measured(method, terms: RoundTerms, data: Data):
    begun = LocalRound(method, method.init_state(), ZEROS, terms, data)
    return begun.ended(ZEROS, ZEROS, 0.0, {}).context


def privatized(method, terms: RoundTerms, *, data: Data | None = None, update: np.ndarray = ZEROS, noise: Any = None):
    context = measured(method, terms, data or Data())
    return method.privatize(context, update, noise or Constant())


def test_the_teacher_is_the_last_personalized_model_and_training_starts_from_the_global_one() -> None:
    method = acdp(distillation_weight=0.3)
    assert method.training.objective == Objective("decoupled-distillation", 3.0, 0.25)
    assert method.training.teacher(context_of(method), Data()) is None
    own = np.arange(10, dtype=np.float32)
    state = advanced(method, method.init_state(), update=own, trained=own, sent=own)
    assert (context_of(method, state, ZEROS).start == 0).all()
    teacher = method.training.teacher(context_of(method, state), Data())
    np.testing.assert_array_equal(teacher.logits, [[0, 0], [0, 1], [0, 2]])
    assert teacher.weight == 0.3
    plain = acdp(self_distillation=False)
    assert not plain.training.objective.distills
    assert plain.training.teacher(context_of(plain, state), Data()) is None


def test_as_published_reports_are_raw_and_the_charge_is_that_of_the_update() -> None:
    method, terms = acdp(), RoundTerms(4, {"clip_norm": 0.5})
    noised = privatized(method, terms, noise=Constant(1.0))
    assert noised.report == pytest.approx((0.75 - 0.5, 2.0 / 10 - 0.5))
    # line 18: sigma C / sqrt(|P|) = 2 * 0.5 / 2, on a zero update
    np.testing.assert_allclose(noised.values, 0.5)
    np.testing.assert_allclose(noised.clip_norms, 0.5)
    assert noised.charge.noise_multiplier == 1.0
    assert method.cost(terms).values_multiplier == 1.0


def test_strict_reports_are_noised_and_paid_for() -> None:
    method, terms = acdp("strict", report_share=0.2), RoundTerms(4)
    noised = privatized(method, terms, noise=Constant(1.0))
    values, report = noised.noise_stds[0] / 1.0, (noised.report[0] - 0.25) / math.sqrt(0.5)
    assert noised.report[1] - (-0.3) == pytest.approx(noised.report[0] - 0.25, abs=0.01)
    assert values**-2 == pytest.approx(0.8 * 2.0**-2)
    assert report**-2 == pytest.approx(0.2 * 2.0**-2, rel=0.01)
    assert noised.charge.noise_multiplier == pytest.approx(2.0)
    assert method.cost(terms).values_multiplier == pytest.approx(values)
    both = epsilon([Step(values, 1.0, 30), Step(report, 1.0, 30)], delta=1e-5)
    assert both == pytest.approx(epsilon([Step(2.0, 1.0, 30)], delta=1e-5), rel=1e-3)
    # a reader of the aggregates has four noises against the values, and one against the report
    assert method.multiplier_release(terms, participants=4) == pytest.approx(
        (1 / (4 * values**2) + 1 / report**2) ** -0.5, rel=1e-3
    )


@pytest.mark.parametrize(("accuracy", "loss"), [(0.0, 0.0), (1.0, 1e9), (0.5, math.inf), (1.0, math.nan)])
def test_what_is_noised_is_within_its_bound(accuracy: float, loss: float) -> None:
    report = privatized(acdp("strict"), RoundTerms(1), data=Data(accuracy, loss)).report
    assert math.hypot(*report) <= math.sqrt(0.5)


def test_a_bit_says_whether_the_norm_is_within_the_clip_norm() -> None:
    method = acdp(sigma=0.0, clipping="quantile")
    update = ZEROS.copy()
    update[[0, 9]] = 0.3, 0.4
    for clip_norm, bit in ((0.51, 0.5), (0.49, -0.5)):
        assert privatized(method, RoundTerms(3, {"clip_norm": clip_norm}), update=update).report == (bit,)


@pytest.mark.parametrize(("accounting", "devices"), [("as-published", 100), ("strict", 100), ("as-published", 3)])
def test_bits_are_paid_for_as_opacus_has_it(accounting: str, devices: int) -> None:
    """Opacus' AdaClipDPOptimizer: z_values = (z^-2 - (2 sigma_b)^-2)^(-1/2); sigma_b is devices / 20."""
    method, terms = acdp(accounting, clipping="quantile"), RoundTerms(devices)
    split = devices if accounting == "as-published" else 1
    doubled = max(devices / 10, 4.0)  # with three devices a quarter of the charge is the bits'
    values = (2.0**-2 - doubled**-2) ** -0.5
    noised = privatized(method, terms, noise=Constant(1.0))
    np.testing.assert_allclose(noised.noise_stds, values / math.sqrt(split))
    assert noised.report[0] == pytest.approx(0.5 + doubled / 2 / math.sqrt(split), rel=2**-9)
    assert noised.charge.noise_multiplier == pytest.approx(2.0 / math.sqrt(split))
    assert method.cost(terms).values_multiplier == pytest.approx(values / split**0.5)
    together = epsilon([Step(values, 1.0, 10), Step(doubled, 1.0, 10)], delta=0.01)
    assert together == pytest.approx(epsilon([Step(2.0, 1.0, 10)], delta=0.01), rel=1e-9)
    assert method.multiplier_release(terms, participants=split) == pytest.approx(2.0)


def test_the_quantile_step_by_hand() -> None:
    method = acdp(clipping="quantile", quantile=0.4, quantile_step=0.5)
    server = method.server.initial(0)
    assert method.server.controls(server, 1) == {"clip_norm": 1.0}
    after = method.server.advance(server, outcome((0.5,), (-0.5,), (-0.5,), (-0.5,), (1.0, 2.0)))
    assert method.server.controls(after, 2) == {"clip_norm": pytest.approx(math.exp(-0.5 * (0.25 - 0.4)))}
    shouted = method.server.advance(server, outcome((1e300,)))
    assert method.server.controls(shouted, 2) == {"clip_norm": pytest.approx(math.exp(-0.5 * 0.6))}
    assert method.server.advance(server, outcome()) is server


def test_the_clip_norm_comes_to_the_median_of_fixed_norms() -> None:
    method, norms = acdp(sigma=0.3, clip_norm=2.5, clipping="quantile"), np.geomspace(0.2, 3.0, 21)
    server, noise, seen = method.server.initial(0), SeededNoise(0, 0, 0), []
    for _ in range(60):
        terms = RoundTerms(len(norms), method.server.controls(server, 1))
        seen.append(terms.controls["clip_norm"])
        updates = [np.full(10, norm / math.sqrt(10), np.float32) for norm in norms]
        reports = [privatized(method, terms, update=each, noise=noise).report for each in updates]
        server = method.server.advance(server, outcome(*reports))
    assert np.exp(np.mean(np.log(seen[-30:]))) == pytest.approx(np.median(norms), rel=0.15)


def test_the_agent_hears_trimmed_means_in_the_devices_units() -> None:
    method = acdp()
    server = method.server.initial(0)
    reports = [(each - 0.5, each / 10 - 0.5) for each in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)]
    after = method.server.advance(server, outcome(*reports, (0.5,)))
    # percentiles 10 and 80 of six: the nearest values are the first and the fifth, so 1 is left out
    assert after["state"] == pytest.approx([0.4, 0.4])
    (clip_norm,) = method.server.controls(after, 2).values()
    assert 0.25 <= clip_norm <= 4.0
    assert method.server.controls(after, 2) != method.server.controls(server, 1)


@pytest.mark.parametrize("how", [{"clipping": "fixed"}, {"clip_norm": math.inf, "sigma": 0.0}, {"unit": "record"}])
def test_with_a_clip_norm_that_stays_nothing_is_reported(how: dict[str, Any]) -> None:
    method = acdp(**how)
    assert method.server.initial(0) == {} == method.server.controls({}, 1)
    assert measured(method, RoundTerms(), Data()).measured is None
    noised = privatized(method, RoundTerms(4))
    assert noised.report == ()
    assert noised.charge.noise_multiplier == {"fixed": 1.0}.get(how.get("clipping"), method.privacy.noise_multiplier)
