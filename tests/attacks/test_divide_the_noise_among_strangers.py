"""An aggregator, or strangers who enrol with it, wants a device to divide its noise among many that add none."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from hushfleet.aggregator.config.task import parse_task
from hushfleet.edge_client.board.config import DeviceConfig
from hushfleet.wire.format.spec import PrivacySpec
from support.edge import DEVICE, Bench, Package

STRANGERS = 198


@pytest.fixture
def published(package: Package) -> Package:
    """A task that divides its noise among eight devices, as the papers do."""
    privacy = PrivacySpec("device", "as-published", 1.0, 2.0, 1e-5, noise_split=8)
    return package.with_spec(privacy=privacy, task="published")


def answer_of(bench: Bench, *, split: int, cohort: int) -> tuple[str, str] | float:
    """A decline's code and reason, or the noise multiplier that was charged."""
    bench.until(lambda: bool(bench.server.births))
    digest = bench.server.initial_public().digest()
    names = [DEVICE, *(f"stranger-{index}" for index in range(cohort - 1))]
    bench.server.open_round(1, noise_split=split, cohort=dict.fromkeys(names, digest))
    bench.until(lambda: bool(bench.server.declines or bench.server.updates))
    if bench.server.declines:
        return bench.server.declines[-1].code, bench.server.declines[-1].reason
    return bench.store.ledger.entries()[-1].charge.noise_multiplier


def test_198_strangers_in_the_cohort(make_bench: Callable[..., Bench], published: Package) -> None:
    """Each would take its part of the noise: what is left of 2.0 is a fourteenth."""
    code, reason = answer_of(make_bench(published), split=1 + STRANGERS, cohort=1 + STRANGERS)
    assert code == "no-privacy"
    assert "among 199 devices, but the task package names 8" in reason


def test_what_the_package_names_is_done(make_bench: Callable[..., Bench], published: Package) -> None:
    """A paper's setting is reproduced as it is: noise over the root of the cohort."""
    assert answer_of(make_bench(published), split=8, cohort=8) == 2.0 / math.sqrt(8)


def test_a_plan_that_divides_among_more_than_take_part(make_bench: Callable[..., Bench], published: Package) -> None:
    code, reason = answer_of(make_bench(published), split=8, cohort=3)
    assert (code, "only 3 take part" in reason) == ("no-privacy", True)


@pytest.mark.parametrize(
    ("limits", "words"),
    [({"noise_split": 8}, "limits.noise_split is 8"), ({"min_noise_multiplier": 0.5}, "noise multiplier of 0.06325")],
)
def test_a_package_that_names_a_thousand_meets_the_owners_limit(
    make_bench: Callable[..., Bench], package: Package, config: DeviceConfig, limits: dict[str, float], words: str
) -> None:
    privacy = PrivacySpec("device", "as-published", 1.0, 2.0, 1e-5, noise_split=1000)
    generous = package.with_spec(privacy=privacy, task="generous")
    owned = replace(config, limits=replace(config.limits, **limits))
    bench = make_bench(generous, owned)
    code, reason = answer_of(bench, split=1000, cohort=1000)
    assert code == "no-privacy"
    assert words in reason
    assert bench.store.ledger.entries() == [], "it is refused before it is trained and charged, not before it is sent"


def test_strict_divides_nothing_whatever_the_plan_says(make_bench: Callable[..., Bench]) -> None:
    assert answer_of(make_bench(), split=40, cohort=40) == 2.0


@pytest.mark.parametrize(("cohort_size", "named"), [(0, 8), (5, 5)])
def test_a_task_names_its_cohort_and_never_who_enrolled(cohort_size: int, named: int) -> None:
    plain = {
        "name": "t",
        "model": {"name": "digits-cnn"},
        "method": {"name": "dp-fedavg"},
        "privacy": {"noise_multiplier": 1.0, "accounting": "as-published"},
        "data": {"name": "digits", "devices": 8},
        "round": {"cohort_size": cohort_size},
    }
    assert parse_task(plain).privacy_spec().noise_split == named
    strict = {**plain, "privacy": {"noise_multiplier": 1.0}}
    assert parse_task(strict).privacy_spec().noise_split == 1
