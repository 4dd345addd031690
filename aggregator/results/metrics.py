"""Metrics of a round, and what each device has spent against each of the two adversaries."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from hushfleet.aggregator.results.result import PrivacyRow
from hushfleet.aggregator.storage.store import AggregatorStore, ChargeRow, UpdateRow
from hushfleet.privacy.accounting.epsilon import Step, epsilon
from hushfleet.privacy.terms import Accountant

# A signal is reported where it stands out of what noise alone would show by chance.
_VISIBLE_DEVIATIONS = 2.0


@dataclass(frozen=True)
class RoundSummary:
    """A closed round.

    :param participants: updates that went into the global model, each of a device of its own but in buffered rounds; 0
        where too few came.
    :param uplink_bytes: update blobs of the accepted devices together, and the answers of a committee.
    :param downlink_bytes: what they had to fetch of the global model together, see `model_step.download_bytes`.
    :param snr_db: signal over noise of all that was sent, pooled; None without noise or visible signal.
    :param wall_s: from opening to closing.
    :param multiplier_release: noise multiplier against readers of the global model; None if it did not change.
    :param eq20_bytes: uplink by Eq. (20) of FedGLP-ADP: 32 bits a shared parameter, one a parameter for the mask.
    :param float32_bytes: uplink of plain FedAvg: four bytes a parameter and device.
    :param sample_rate: of the round's charge, 1 with the unit `device`; likewise `steps`.
    :param committee: of a secure sum: how many members it had, 0 elsewhere; `answers`: how many of them answered, with
        `answer_bytes` together.
    :param suspected_wraps: how many values of the secure sum may have wrapped around; see `Ring.suspected_wraps`.
    :param asked: of a round that asked, the kind of its question.
    :param answer: the mean of the devices' answers to it, with the noise; empty where too few came.
    :param answer_stds: standard deviations of that noise.
    """

    round: int
    cohort_size: int
    participants: int
    uplink_bytes: int
    downlink_bytes: int
    snr_db: float | None
    wall_s: float
    accuracy_global: float | None
    loss: float | None
    multiplier_release: float | None
    eq20_bytes: float
    float32_bytes: int
    sample_rate: float = 1.0
    steps: int = 1
    committee: int = 0
    answers: int = 0
    answer_bytes: int = 0
    suspected_wraps: int = 0
    asked: str = ""
    answer: list[float] = field(default_factory=list)
    answer_stds: list[float] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as plain values, for the store and the log."""
        return asdict(self)


def snr_db(updates: Iterable[UpdateRow]) -> float | None:
    """10 log10 of signal over noise power, pooled over updates.

    The signal's power is what the updates' squared norms have beyond the expectation of their noise; it is an
    estimate from noised values only, so it costs no privacy. None below two standard errors.
    """
    rows = list(updates)
    signal = math.fsum(row.signal_square for row in rows)
    noise = math.fsum(row.noise_square for row in rows)
    error = math.sqrt(math.fsum(row.noise_variance for row in rows))
    if noise == 0 or signal <= _VISIBLE_DEVIATIONS * error:
        return None
    return 10 * math.log10(signal / noise)


def eq20_bytes(shared: Sequence[int], size: int) -> float:
    """Eq. (20) with the actual number of shared parameters of each device in place of M (1 - t beta / T)."""
    return sum(32 * k + size for k in shared) / 8


def privacy_tables(
    store: AggregatorStore, rounds: Iterable[float], *, delta: float, accountant: Accountant = "exact"
) -> list[dict[str, PrivacyRow]]:
    """Returns, after each of these rounds, a row for every device that was charged by then, by id.

    `epsilon_server` is over every accepted round, or what the device itself reported, if that is more (a
    device also counts updates that were never accepted). `epsilon_release` is over those of them that are closed.
    Where a method sends raw values, both are infinite: what is raw steers the noise or the clip norms of the rounds
    that follow, and so the models show it too, by an amount that nothing bounds.

    :param rounds: ascending; `math.inf` is after all charges that there are.
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
        """:param released: the round's multiplier against readers of the models; None while there is none."""
        self._server[row.noise_multiplier, row.sample_rate] += row.steps
        if released is not None:
            self._release[_in_model(row, released), row.sample_rate] += row.steps
        self._dearest = min(self._dearest, row, key=lambda row: row.noise_multiplier)
        self._raw |= dict.fromkeys(row.raw.splitlines())
        self._charged += 1
        self._reported_rounds = max(self._reported_rounds, row.device_rounds)
        self._reported_epsilon = max(self._reported_epsilon, row.device_epsilon)

    def row(self, delta: float, accountant: Accountant, *, at_end: bool) -> PrivacyRow:
        """:param at_end: also what is told of the end of a run alone."""
        server, release = (
            epsilon((Step(*how, steps) for how, steps in counts.items()), delta=delta, accountant=accountant)
            for counts in (self._server, self._release)
        )
        raw = list(self._raw)
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
            exchange_server=self._exchange(delta, accountant) if at_end else None,
        )

    def _exchange(self, delta: float, accountant: Accountant) -> float | None:
        """Rounds that the device has charged beyond the accepted ones count as the dearest of these."""
        counts, unknown = Counter(self._server), self._reported_rounds - self._charged
        if unknown > 0:
            counts[self._dearest.noise_multiplier, self._dearest.sample_rate] += unknown * self._dearest.steps
        if self._raw:
            return math.inf
        if accountant == "rdp" and any(rate < 1 for _, rate in counts):
            return None
        steps = [Step(*how, count) for how, count in counts.items()]
        return epsilon(steps, delta=delta, accountant=accountant, adjacency="exchange")


def _in_model(row: ChargeRow, released: float) -> float:
    """Other devices' noise hides a device's contribution; its records are hidden by its own alone, of which no more
    counts than the round's standard, whatever the device says."""
    return min(row.noise_multiplier, released) if row.unit == "record" else released
