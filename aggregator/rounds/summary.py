"""Builds the `RoundSummary` of a closing round: its counts, its privacy against readers of the model, and its test."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from hushfleet.aggregator.config.round_section import RoundSection
from hushfleet.aggregator.payloads.model_step import download_bytes
from hushfleet.aggregator.results.metrics import RoundSummary, eq20_bytes, snr_db
from hushfleet.aggregator.rounds.round_sum import AnswerCounts, RoundSum
from hushfleet.aggregator.storage.store import AggregatorStore, UpdateRow
from hushfleet.learning.evaluation import Evaluation
from hushfleet.methods.answer_scale import scale_of
from hushfleet.methods.cost import RoundTerms
from hushfleet.methods.task_method import TaskMethod
from hushfleet.wire.format.codecs import codec_of
from hushfleet.wire.format.messages import RoundPlan
from hushfleet.wire.format.question import QuestionSpec
from hushfleet.wire.format.spec import WireSpec


def summarise(
    plan: RoundPlan,
    updates: Sequence[UpdateRow],
    params: np.ndarray,
    *,
    changed: bool,
    method: TaskMethod,
    rules: RoundSection,
    wire: WireSpec,
    store: AggregatorStore,
    held: Mapping[str, bytes],
    evaluate: Callable[[np.ndarray], Evaluation] | None,
    wall_s: float,
    cohort: int,
    collected: RoundSum | None,
    question: QuestionSpec | None = None,
    answer: RoundSum | None = None,
) -> RoundSummary:
    """:param updates: the accepted updates.
    :param params: the new global vector float32 `[d]`.
    :param changed: whether the updates are part of it; they are not if there were too few.
    :param cohort: number of devices in the cohort; `collected`: their sum, None if too few were drawn.
    :param question: the question of a round that asked; `answer`: its open sum.
    :param held: for each device, SHA-256 of the model on which its previous accepted update was trained.
    """
    terms = RoundTerms(plan.noise_split, plan.controls)
    charge = method.charge(terms)
    participants = len(updates) if changed else 0
    found = evaluate(params) if evaluate else Evaluation(math.nan, math.nan)
    values, stds = _answer(question, answer)
    answers = AnswerCounts() if collected is None else collected.answers
    size = params.size if question is None else method.layout.size
    return RoundSummary(
        round=plan.round,
        cohort_size=cohort,
        participants=participants,
        uplink_bytes=sum(update.size for update in updates) + answers.size,
        downlink_bytes=_downlink_bytes(plan, held, store),
        snr_db=snr_db(updates),
        wall_s=wall_s,
        accuracy_global=_measured(found.accuracy),
        loss=_measured(found.loss),
        metrics=dict(found.metrics),
        multiplier_release=_multiplier_release(method, rules, wire, terms, store, plan.round, participants),
        eq20_bytes=eq20_bytes([update.shared for update in updates], size),
        float32_bytes=4 * size * len(updates),
        sample_rate=charge.sample_rate,
        steps=charge.steps,
        committee=answers.members,
        answers=answers.answers,
        answer_bytes=answers.size,
        suspected_wraps=0 if collected is None else collected.suspected_wraps,
        asked="" if question is None else question.kind,
        answer=values,
        answer_stds=stds,
    )


def _downlink_bytes(plan: RoundPlan, held: Mapping[str, bytes], store: AggregatorStore) -> int:
    """Adds up the downloads for the updates of the round's sum."""
    bases, total = dict(held), 0
    for device, model in store.summed_models(plan.round):
        total += download_bytes(plan, bases.get(device), model)
        bases[device] = model
    return total


def _answer(question: QuestionSpec | None, answer: RoundSum | None) -> tuple[list[float], list[float]]:
    """Returns the mean of answers, and the standard deviations of its noise, in the numbers' own units."""
    if question is None or answer is None:
        return [], []
    mean = answer.aggregated().astype(np.float64)
    scale = scale_of(question, len(mean))
    return (mean / scale.unit + scale.middle).tolist(), (answer.noise_stds[0] / scale.unit).tolist()


def _multiplier_release(
    method: TaskMethod,
    rules: RoundSection,
    wire: WireSpec,
    terms: RoundTerms,
    store: AggregatorStore,
    round: int,
    participants: int,
) -> float | None:
    """Returns the noise multiplier of the aggregate; None without one.

    If devices choose their own noise, their reported noise is added up, but at most the standard noise for each device:
    reports are not verified, and the others' epsilon must not depend on them. If no sum hides an update, or the codec
    can remove the others' noise, each device is promised only the protection of the smallest own noise.
    """
    if not participants and rules.has_cohort:  # else a stale update of this round may be in a later sum
        return None
    charge = method.charge(terms)
    alone = rules.protects_each_alone or wire.step > codec_of(wire.codec).sums_noise_to
    if method.max_preference is None:
        return charge.noise_multiplier if alone else method.multiplier_release(terms, participants=participants)
    claimed = [min(row.noise_multiplier, charge.noise_multiplier) for row in store.charges(round)]
    if alone:
        return min(claimed)
    if charge.unit == "device":
        return math.hypot(*claimed)
    return method.multiplier_release(terms, participants=participants)


def _measured(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
