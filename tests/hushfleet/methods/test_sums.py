"""With `accounting = "secure"`: which methods go, what a round costs, and that noise is left to the ring."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hushfleet.errors import PrivacyError
from hushfleet.methods import METHODS, make_method
from hushfleet.methods.cost import RoundTerms
from hushfleet.methods.hush import FirstPrior
from hushfleet.methods.method import CLIP_AND_NOISE, Method, TrainingConfig
from hushfleet.methods.personal import Head, Personal
from hushfleet.methods.sparse import KeepLargest
from hushfleet.methods.stages import ClipWhole, Gaussian, Transform
from hushfleet.methods.state import RoundContext
from hushfleet.methods.sums import check_sums
from hushfleet.methods.task_method import bind
from hushfleet.params import ParamLayout
from hushfleet.privacy.noise import SeededNoise
from hushfleet.wire.format.spec import PrivacySpec, SecureSpec

LAYOUT = ParamLayout(("body.weight", "norm.weight", "head.weight", "prior"), ((4, 2), (4,), (3, 2), (3,)))
SECURE = SecureSpec(16, min_devices=90, honest_devices=80, honest_fraction=0.9)
PRIVACY = PrivacySpec("device", "secure", clip_norm=2.0, noise_multiplier=8.9, delta=1e-5, secure=SECURE)
GO = {
    *("dp-fedavg", "fedprox", "dp-fedsam", "blur-lus", "ditto", "fedper", "lg-fedavg", "fedrep", "perfreezeclip"),
    *("pfedsd", "dkd-pfed", "moon", "feddpa", "hush", "fednova", "fedbn", "pfedme", "apfl"),
    *("fedopt", "fedala", "second-moments"),
}


@pytest.mark.parametrize("name", sorted(METHODS))
def test_these_methods_go_with_secure_aggregation(name: str) -> None:
    try:
        make_method(name, {}, PRIVACY, LAYOUT, rounds=20)
    except PrivacyError:
        assert name not in GO
    else:
        assert name in GO


@pytest.mark.parametrize(
    ("name", "settings", "reason"),
    [
        ("fedavg", {}, "clipped to the round's clip norm and then noised"),
        ("fedglp-adp", {}, "a mask of its own"),
        ("scaffold", {}, "devices remember what they sent"),
        ("feddyn", {}, "devices remember what they sent"),
        ("dp-fedsim", {}, "cannot be weighed"),
        ("dp-fedsim", {"msa": False}, "clips layer by layer"),
        ("acdp-pfsd", {}, "report numbers"),
        ("acdp-pfsd", {"clipping": "quantile"}, "report numbers"),
        ("fedaddp", {}, "clips layer by layer"),
        ("apdp-fl", {}, "each chooses its own"),
    ],
)
def test_the_others_are_refused_with_a_reason(name: str, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(PrivacyError, match=reason):
        make_method(name, settings, PRIVACY, LAYOUT, rounds=20)


def test_a_method_without_what_is_in_the_way_goes() -> None:
    make_method("acdp-pfsd", {"clipping": "fixed"}, PRIVACY, LAYOUT, rounds=20)
    make_method("dp-fedsim", {"agc": False, "msa": False}, PRIVACY, LAYOUT, rounds=20)


class AfterClipping(Transform):
    def change(self, context: Any, update: Any, noise: Any) -> Any:
        return update * 2


@pytest.mark.parametrize(
    "stages", [(), (ClipWhole(),), (Gaussian(),), (ClipWhole(), AfterClipping(), Gaussian()), (KeepLargest(0.5),)]
)
def test_an_update_without_bound_or_noise_is_not_summed(stages: tuple[Any, ...]) -> None:
    with pytest.raises(PrivacyError, match="clipped to the round's clip norm"):
        check_sums(Method(stages=stages), PRIVACY, TrainingConfig())


def test_a_round_costs_what_the_sum_has() -> None:
    method = bind(Method(stages=CLIP_AND_NOISE), TrainingConfig(), PRIVACY, LAYOUT)
    for split in (1, 7, 1000):  # whatever a plan says
        charge = method.charge(RoundTerms(split))
        assert (charge.noise_multiplier, charge.noise_split, charge.mechanism) == (8.9, 80, "gaussian")
        assert method.multiplier_release(RoundTerms(split), participants=100) == 8.9
        assert method.cost(RoundTerms(split)).values_multiplier == 8.9


def test_noise_is_left_to_the_ring() -> None:
    method = bind(Method(stages=CLIP_AND_NOISE), TrainingConfig(), PRIVACY, LAYOUT)
    state, update = method.init_state(), np.arange(LAYOUT.size, dtype=np.float32)
    context = RoundContext(method.setting(RoundTerms()), state, np.zeros_like(update), np.zeros_like(update))
    noised = method.privatize(context, update, SeededNoise(0, 0, 0))
    np.testing.assert_allclose(noised.values, update * 2.0 / np.linalg.norm(update), rtol=1e-5)
    np.testing.assert_allclose(noised.noise_stds, 2.0 * 8.9)


def test_with_records_a_derived_choice_of_entries_is_not_taken_for_its_base() -> None:
    record, sgd = replace(PRIVACY, unit="record"), TrainingConfig(optimizer="sgd", local_steps=1)
    for personal in (Personal(), FirstPrior()):
        check_sums(Method(personal), record, sgd)

    class Derived(Personal):
        """May look at what the device has of its own."""

    for personal in (Derived(), Head()):
        with pytest.raises(PrivacyError, match="gradients may not see what a device has of its own"):
            check_sums(Method(personal), record, sgd)
