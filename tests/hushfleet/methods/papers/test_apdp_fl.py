"""APDP-FL: the score by hand, the schedule, preferences, and what the ledger is told."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from opacus.accountants import RDPAccountant

from hushfleet.data.samples import Samples
from hushfleet.errors import Malformed
from hushfleet.learning.batch import ClientBatch
from hushfleet.methods import make_method
from hushfleet.methods.cost import RoundTerms
from hushfleet.methods.papers.apdp_fl import score_of
from hushfleet.methods.server import ClosedRound
from hushfleet.methods.task_method import TaskMethod
from hushfleet.params import ParamLayout
from hushfleet.privacy.accountant import Step, epsilon
from hushfleet.privacy.noise import SeededNoise
from hushfleet.privacy.record import RecordMechanism
from hushfleet.wire.format.spec import PrivacySpec
from support.methods import context_of, penalty, privatized, trained

LAYOUT = ParamLayout(("a.weight",), ((4,),))
RECORD = PrivacySpec("record", "as-published", 1.0, 5.0, 1e-5, sample_rate=0.5, batches=10)


def apdp(privacy: PrivacySpec = RECORD, *, rounds: int = 10, **config: Any) -> TaskMethod:
    return make_method("apdp-fl", {"batch_size": 20, **config}, privacy, LAYOUT, rounds=rounds)


def outcome(round: int, *, step: float = 1.0, accuracy: float | None = None, loss: float | None = None) -> ClosedRound:
    before = np.zeros(4, np.float32)
    return ClosedRound(round, before, before + np.float32(step) / 2, [], accuracy, loss)  # its length is `step`


@pytest.mark.parametrize(
    ("step", "loss_rose", "accuracy_fell", "progress", "score"),
    [
        (1.0, False, False, 0.0, 0.0),
        (0.75, False, False, 0.0, 17.5),  # 2 (1 - 0.75) = 0.5 of 35
        (0.5, False, False, 0.0, 35.0),
        (0.25, False, False, 0.0, 35.0),
        (0.0, False, False, 0.0, 35.0),
        (1.0, True, False, 0.0, 20.0),
        (1.0, False, True, 0.0, 25.0),
        (1.0, False, False, 0.25, 10.0),
        (1.0, False, False, 0.9, 20.0),
        (0.0, True, True, 1.0, 100.0),
    ],
)
def test_the_score_by_hand(step: float, loss_rose: bool, accuracy_fell: bool, progress: float, score: float) -> None:
    assert score_of(step, loss_rose=loss_rose, accuracy_fell=accuracy_fell, progress=progress) == score


def test_the_plain_score_of_a_step_falls_with_its_length() -> None:
    none = {"loss_rose": False, "accuracy_fell": False, "progress": 0.0}
    assert [score_of(step, **none, step_score="plain") for step in (0.0, 0.25, 0.5, 1.0)] == [35.0, 26.25, 17.5, 0.0]
    assert [score_of(step, **none, step_score="clamped") for step in (0.0, 0.25, 0.375, 0.5, 1.0)] == [
        35.0, 35.0, 17.5, 0.0, 0.0,
    ]  # fmt: skip
    method = apdp(decay=0.5, step_score="plain")
    server = method.server.initial(0)
    for round in range(1, 11):  # 17.5 for half of the longest step, and 20 for the rounds, are less than 50
        server = method.server.advance(server, outcome(round, step=8.0 if round == 1 else 4.0))
    assert method.server.controls(server, 11) == {"noise_multiplier": 5.0}


def test_noise_falls_in_rounds_that_score_above_fifty() -> None:
    """Ten rounds without a validation set: a step of half of the longest one is worth 35, rounds 20 t / 5."""
    method = apdp(decay=0.5)
    server, sigmas = method.server.initial(0), []
    for round, step in enumerate([8.0, 4.0, 4.0, 4.0, 8.0, 4.0], start=1):
        sigmas.append(method.server.controls(server, round)["noise_multiplier"])
        server = method.server.advance(server, outcome(round, step=step))
    # scores 4, 43, 47, 51, 20, 55: the noise of rounds 5 and 7 is half of that before
    assert sigmas == [5.0, 5.0, 5.0, 5.0, 2.5, 2.5]
    assert method.server.controls(server, 7) == {"noise_multiplier": 1.25}


def test_loss_and_accuracy_count_against_what_came_before() -> None:
    """20 for a loss that rose and 25 for an accuracy below the mean of the last five, which the sixth round has."""
    method = apdp(decay=0.5)
    server = method.server.initial(0)
    for round in range(1, 6):
        server = method.server.advance(server, outcome(round, accuracy=0.5, loss=1.0))
    assert float(server["noise_multiplier"]) == 5.0  # 20 at most so far: no step was shorter
    fell = method.server.advance(server, outcome(6, accuracy=0.4, loss=1.1))
    assert float(fell["noise_multiplier"]) == 2.5  # 20 + 20 + 25
    rose = method.server.advance(server, outcome(6, accuracy=0.6, loss=1.1))
    assert float(rose["noise_multiplier"]) == 5.0  # 20 + 20
    unseen = method.server.advance(server, outcome(6))
    assert float(unseen["noise_multiplier"]) == 5.0
    early = method.server.advance(method.server.initial(0), outcome(5, accuracy=0.1, loss=1.0))
    assert float(early["noise_multiplier"]) == 5.0  # a mean of five needs five


def test_without_decay_or_noise_nothing_changes() -> None:
    for method, sigma in ((apdp(decay=1.0), 5.0), (apdp(replace(RECORD, noise_multiplier=0.0)), 0.0)):
        server = method.server.initial(0)
        for round in range(1, 11):
            server = method.server.advance(server, outcome(round, step=1.0 / round))
        assert method.server.controls(server, 11) == {"noise_multiplier": sigma}


@pytest.mark.parametrize("accounting", ["as-published", "strict"])
def test_a_preference_scales_the_noise_of_the_round_and_the_charge_with_it(accounting: str) -> None:
    method = apdp(replace(RECORD, accounting=accounting))
    charge = method.charge(RoundTerms(10, {"noise_multiplier": 4.0}, preference=1.5))
    assert charge.noise_multiplier == 6.0
    assert (charge.unit, charge.sample_rate, charge.steps) == ("record", 0.5, 10)


def test_local_training_is_algorithm_2_line_by_line() -> None:
    """Subsets of one record, on all r = 7 of them, E = 3 times, with the paper's sigma = 1.5 and R_i / L = 1.2."""
    bound, sigma, rate, r, steps = 0.5, 1.5, 0.1, 7, 3
    features = np.random.default_rng(4).integers(0, 256, (r, 1, 1, 4), dtype=np.uint8)
    data = Samples(features, np.arange(r) % 2, (0.5,), (0.25,))

    def gradient(params: Any, x: Any, y: Any, dropout: Any = (), out: Any = None, **_: Any) -> tuple[float, Any]:
        rows = x.reshape(len(y), -1)
        out[...] = ((rows @ params - y)[:, None] * rows).mean(axis=0)  # of half a squared error
        return 0.0, out

    privacy = replace(RECORD, clip_norm=bound, noise_multiplier=2 * sigma, sample_rate=1.0, batches=steps)
    method = apdp(privacy, optimizer="sgd", learning_rate=rate, batch_size=r, local_steps=steps)
    start = np.array([1, -2, 3, 4], np.float32)
    got = trained(method, start, gradient, data, terms=RoundTerms(preference=1.2), noise=SeededNoise(1, 2, 3)).end

    w, noise = start.astype(np.float64), SeededNoise(1, 2, 3)
    for _ in range(steps):
        total = np.zeros(4)
        for b in range(r):
            g = gradient(w, data.x[b : b + 1], data.labels[b : b + 1], out=np.empty(4))[1]
            total += g / max(1, np.linalg.norm(g) / bound)
        w = w - rate / r * (total + 2 * bound * (1.2 * sigma) * noise.normal(4))
    np.testing.assert_allclose(got, w, atol=steps * rate / r * 2 * bound * 1.2 * sigma * 2**-9)
    charge = method.charge(RoundTerms(preference=1.2))
    accountant = RDPAccountant()
    accountant.history = [(2 * 1.2 * sigma, 1.0, steps)]
    spent = [Step(charge.noise_multiplier, charge.sample_rate, charge.steps)]
    assert epsilon(spent, delta=1e-5, accountant="rdp") == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-6)


def test_records_clipped_as_one_are_algorithm_2_with_subsets_and_pay_for_turning_a_gradient_round() -> None:
    """Line 10 sums, over all r = 12 records, the clipped mean gradient of the record's subset of about d = 4."""
    bound, sigma, rate, r, d = 0.5, 1.5, 0.1, 12, 4
    data = Samples(
        np.random.default_rng(4).integers(0, 256, (r, 1, 1, 4), dtype=np.uint8), np.arange(r) % 2, (0.5,), (0.25,)
    )

    def gradient(params: Any, x: Any, y: Any, dropout: Any = (), out: Any = None, **_: Any) -> tuple[float, Any]:
        rows = x.reshape(len(y), -1)
        out[...] = ((rows @ params - y)[:, None] * rows).mean(axis=0)
        return 0.0, out

    privacy = replace(RECORD, clip_norm=bound, noise_multiplier=2 * sigma, sample_rate=1.0, batches=1)
    method = apdp(privacy, optimizer="sgd", learning_rate=rate, batch_size=r, local_steps=1, subset_size=d)
    start = np.array([1, -2, 3, 4], np.float32)
    how = {"rng": np.random.default_rng(8), "noise": SeededNoise(1, 2, 3)}
    got = trained(method, start, gradient, data, **how).end

    rng, total = np.random.default_rng(8), np.zeros(4)
    rng.random(r)  # who is in the batch: all, at sample rate 1
    places = rng.integers(3, size=r)
    for place in range(3):
        rows = np.flatnonzero(places == place)
        g = gradient(start, data.x[rows], data.labels[rows], out=np.empty(4))[1]
        total += d * g / max(1, np.linalg.norm(g) / bound)
    w = start - rate / r * (total + 2 * bound * sigma * SeededNoise(1, 2, 3).normal(4))
    np.testing.assert_allclose(got, w, atol=rate / r * 2 * bound * sigma * 2**-9)
    assert method.charge(RoundTerms()).noise_multiplier == pytest.approx(sigma / d)


def test_one_record_moves_a_sum_of_subsets_by_what_is_charged_and_no_more() -> None:
    """The worst case: beside one other record in its subset, it turns their mean gradient round."""
    mechanism = RecordMechanism(0.5, 3.0, sample_rate=1.0, batches=1, gradients_per_batch=1, batch_size=8, subset=4)

    def mean(params: Any, x: Any, y: Any, dropout: Any = (), out: Any = None, **_: Any) -> tuple[float, Any]:
        out[...] = x.mean(axis=0)
        return 0.0, out

    def summed(*values: float) -> np.ndarray:
        x, total = np.array(values, np.float32)[:, None], np.empty(1, np.float32)
        batch = ClientBatch(mean, x, np.zeros(len(x), np.int64), (), {}, np.empty(1, np.float32))
        batch.subsets = [np.arange(len(x))]
        batch.clipped_sum(total, mechanism.clip_norm, total)
        return 8 * replace(mechanism, noise_multiplier=0.0).noised_mean(total, SeededNoise(0, 0, 0))

    moved = abs(float(summed(1.0, -9.0)[0] - summed(1.0)[0]))
    assert moved == pytest.approx(2 * 4 * mechanism.clip_norm)
    noise = mechanism.clip_norm * mechanism.noise_multiplier
    assert mechanism.charge().noise_multiplier == pytest.approx(noise / moved)


def test_the_server_steps_by_its_learning_rate() -> None:
    server = apdp(server_learning_rate=0.5).server
    after = server.aggregate({}, np.ones(4), np.array([2.0, 4.0, 6.0, 0.0]), np.array([2.0, 2.0, 2.0, 0.0]))
    np.testing.assert_array_equal(after, [1.5, 2.0, 2.5, 1.0])


def test_with_the_unit_device_the_update_is_noised_by_preference() -> None:
    method = apdp(replace(RECORD, unit="device", sample_rate=1.0, batches=1))
    terms = RoundTerms(4, {"noise_multiplier": 2.0}, preference=1.5)
    noised = privatized(method, np.ones(4, np.float32), terms, SeededNoise(0, 0, 0))
    np.testing.assert_allclose(noised.noise_stds, 1.5 * 2.0 * 1.0 / math.sqrt(4))
    assert noised.charge.noise_multiplier == 1.5


def test_a_proximal_weight_pulls_towards_the_start() -> None:
    method, gradient = apdp(mu=0.5), np.ones(4, np.float32)
    start, params = np.zeros(4, np.float32), np.full(4, 2.0, np.float32)
    assert penalty(method, context_of(method, global_params=start), params, gradient).tolist() == [2.0] * 4


@pytest.mark.parametrize("wrong", [{"decay": 0.0}, {"decay": 1.1}, {"mu": -1.0}, {"server_learning_rate": 0.0}])
def test_settings_out_of_range_are_named(wrong: dict[str, float]) -> None:
    with pytest.raises(Malformed, match=next(iter(wrong))):
        apdp(**wrong)
