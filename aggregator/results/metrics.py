"""Computes the metrics of a round, and the epsilon that each device has spent against each of the two adversaries."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import Any

from msgspec.structs import asdict

from hushfleet.aggregator.results.answers import EvaluationRow, evaluation_of
from hushfleet.aggregator.results.result import LostRounds, PrivacyRow, RoundRow
from hushfleet.aggregator.storage.store import AggregatorStore, ChargeRow, UpdateRow
from hushfleet.privacy.accountant import Step, epsilon
from hushfleet.privacy.terms import Accountant

# A signal is reported only if noise alone is unlikely to show one of this size.
_VISIBLE_DEVIATIONS = 2.0
_OF_A_RESULT = ("accuracy_own_common", "accuracy_own_local", "opened_at", "closed_at", "metrics_own")


class RoundSummary(RoundRow, frozen=True, kw_only=True):
    """A closed round, as the store keeps it: what the aggregator tells of it, and what further figures need.

    :param multiplier_release: noise multiplier against readers of the global model; None if the model did not change.
    :param eq20_bytes: uplink by Eq. (20) of FedGLP-ADP: 32 bits per shared parameter, one per parameter for the mask.
    :param float32_bytes: uplink of plain FedAvg: four bytes per parameter and device.
    :param sample_rate: sample rate of the round's charge, 1 with the unit `device`; `steps`: its steps, likewise.
    :param asked: the kind of question that the round asked; empty for a training round.
    :param answer: the mean of the devices' answers to it, with the noise; empty if too few devices answered.
    :param answer_stds: standard deviations of that noise.
    """

    cohort_size: int
    multiplier_release: float | None
    eq20_bytes: float
    float32_bytes: int
    sample_rate: float = 1.0
    steps: int = 1
    asked: str = ""
    answer: list[float] = []
    answer_stds: list[float] = []

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as plain values, for the store and the log, without those that only a result has."""
        left_out = _OF_A_RESULT if self.metrics else (*_OF_A_RESULT, "metrics")
        return {name: value for name, value in asdict(self).items() if name not in left_out}


def snr_db(updates: Iterable[UpdateRow]) -> float | None:
    """Returns 10 log10 of signal over noise power, pooled over updates; None below two standard errors.

    The signal's power is the updates' squared norms minus the expected squared norms of their noise; it is an
    estimate from noised values only, so it costs no privacy.
    """
    rows = list(updates)
    signal = math.fsum(row.signal_square for row in rows)
    noise = math.fsum(row.noise_square for row in rows)
    error = math.sqrt(math.fsum(row.noise_variance for row in rows))
    if noise == 0 or signal <= _VISIBLE_DEVIATIONS * error:
        return None
    return 10 * math.log10(signal / noise)


def eq20_bytes(shared: Sequence[int], size: int) -> float:
    """Returns Eq. (20) with the actual number of shared parameters of each device in place of M (1 - t beta / T)."""
    return sum(32 * k + size for k in shared) / 8


def evaluations(summaries: Iterable[RoundSummary]) -> list[EvaluationRow]:
    """Reads the answers of the rounds that evaluated."""
    return [
        evaluation_of(row.answer, row.answer_stds, round=row.round, devices=row.participants)
        for row in summaries
        if row.asked == "evaluation" and row.answer
    ]


def newest_evaluation(store: AggregatorStore) -> EvaluationRow | None:
    """Returns the newest evaluation of a run; None before the first."""
    found = evaluations(RoundSummary(**row.metrics) for row in store.rounds() if row.metrics is not None)
    return found[-1] if found else None


def privacy_tables(
    store: AggregatorStore, rounds: Iterable[float], *, delta: float, accountant: Accountant = "exact"
) -> list[dict[str, PrivacyRow]]:
    """Returns a table for each of these rounds: a row for every device that was charged up to it, by id.

    `epsilon_server` is over every accepted round, or the value that the device itself reported, if that is larger (a
    device also counts updates that were never accepted). `epsilon_release` is over the closed rounds among these. With
    the unit `record` it is over all, because what a device keeps of a round, a personalized model or a control, has an
    effect on later ones that only the noise of its gradients bounds.
    If a method sends raw values, both are infinite: raw values determine the noise or the clip norms of the following
    rounds, so that the models also reveal them, by an amount that nothing bounds.

    :param rounds: rounds in ascending order; `math.inf` is after all charges.
    """
    released = {
        row.round: row.metrics["multiplier_release"]
        for row in store.rounds()
        if row.metrics is not None and row.metrics["multiplier_release"] is not None
    }
    waiting = deque(sorted(store.charges(), key=lambda row: row.round))
    spent, table, tables = dict[str, _Spent](), dict[str, PrivacyRow](), []
    for until in rounds:
        changed = dict(spent) if math.isinf(until) else {}
        while waiting and waiting[0].round <= until:
            row = waiting.popleft()
            changed[row.device] = spent.setdefault(row.device, _Spent(row))
            changed[row.device].add(row, released.get(row.round))
        at_end = math.isinf(until)
        table = table | {device: each.row(delta, accountant, at_end=at_end) for device, each in changed.items()}
        tables.append(dict(sorted(table.items())))
    return tables


def lost_rounds(store: AggregatorStore, *, delta: float, accountant: Accountant = "exact") -> LostRounds | None:
    """Counts the closed rounds that made no model, and what devices paid for them; None without such rounds."""
    lost = [row.round for row in store.rounds() if row.metrics is not None and not row.metrics["participants"]]
    spent = dict[str, _Spent]()
    for charge in (charge for round in lost for charge in store.charges(round)):
        spent.setdefault(charge.device, _Spent(charge)).add(charge, None)
    epsilons = [each.alone(delta, accountant) for each in spent.values()]
    return LostRounds(rounds=len(lost), boards=len(spent), epsilon=max(epsilons, default=0.0)) if lost else None


class _Spent:
    """Charges of one device so far.

    :param first: its first charge.
    """

    def __init__(self, first: ChargeRow) -> None:
        self._first = first
        self._server, self._release = Counter[tuple[float, float]](), Counter[tuple[float, float]]()
        self._raw = dict[str, None]()
        self._dearest = first
        self._charged = self._reported_rounds = 0
        self._reported_epsilon = 0.0

    def add(self, row: ChargeRow, released: float | None) -> None:
        """:param released: the round's multiplier against readers of the models; None if there is none yet."""
        self._server[row.noise_multiplier, row.sample_rate] += row.steps
        if released is not None or row.unit == "record":
            self._release[_in_model(row, released), row.sample_rate] += row.steps
        self._dearest = min(self._dearest, row, key=lambda row: row.noise_multiplier)
        self._raw |= dict.fromkeys(row.raw.splitlines())
        self._charged += 1
        self._reported_rounds = max(self._reported_rounds, row.device_rounds)
        self._reported_epsilon = max(self._reported_epsilon, row.device_epsilon)

    def alone(self, delta: float, accountant: Accountant) -> float:
        """Returns epsilon_server of these charges alone, whatever the device itself reported."""
        steps = (Step(*how, steps) for how, steps in self._server.items())
        return math.inf if self._raw else epsilon(steps, delta=delta, accountant=accountant)

    def row(self, delta: float, accountant: Accountant, *, at_end: bool) -> PrivacyRow:
        """:param at_end: whether to add the values that are reported only at the end of a run."""
        server, release = (
            epsilon((Step(*how, steps) for how, steps in counts.items()), delta=delta, accountant=accountant)
            for counts in (self._server, self._release)
        )
        raw = list(self._raw)
        if self._first.unit == "record":
            release = max(release, self._reported_epsilon)
        return PrivacyRow(
            device=self._first.device,
            unit=self._first.unit,
            adjacency=self._first.adjacency,
            delta=delta,
            epsilon_server=math.inf if raw else max(server, self._reported_epsilon),
            epsilon_release=math.inf if raw and self._release else release,
            rounds_charged=max(self._charged, self._reported_rounds),
            raw_values=raw,
            noised_server=server if raw else None,
            noised_release=release if raw else None,
            exchange_server=self._replaced(delta, accountant) if at_end else None,
        )

    def _replaced(self, delta: float, accountant: Accountant) -> float | None:
        """Returns epsilon under the replace-one adjacency. Rounds that the device has charged besides the accepted ones
        count like the accepted round with the least noise."""
        counts, unknown = Counter(self._server), self._reported_rounds - self._charged
        if unknown > 0:
            counts[self._dearest.noise_multiplier, self._dearest.sample_rate] += unknown * self._dearest.steps
        if self._raw:
            return math.inf
        if accountant == "rdp" and any(rate < 1 for _, rate in counts):
            return None
        steps = [Step(*how, count) for how, count in counts.items()]
        return epsilon(steps, delta=delta, accountant=accountant, adjacency="replace-one")


def _in_model(row: ChargeRow, released: float | None) -> float:
    """Returns the multiplier that protects the charge in the model. All devices' noise hides a device's contribution;
    only its own noise hides its records, and it counts as the round's standard at most, even if it reports more."""
    if released is None:
        return row.noise_multiplier
    return min(row.noise_multiplier, released) if row.unit == "record" else released
