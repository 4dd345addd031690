"""What a round is worth in numbers, and what each device has spent against each of the two adversaries."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
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

    :param participants: devices whose updates went into the global model; 0 where too few came.
    :param uplink_bytes: update blobs of the accepted devices together, and the answers of a committee.
    :param downlink_bytes: what they had to fetch of the global model together, see `downlink.download_bytes`.
    :param snr_db: signal over noise of all that was sent, pooled; None without noise or visible signal.
    :param wall_s: from opening to closing.
    :param multiplier_release: noise multiplier against readers of the global model; None if it did not change.
    :param eq20_bytes: uplink by Eq. (20) of FedGLP-ADP: 32 bits a shared parameter, one a parameter for the mask.
    :param float32_bytes: uplink of plain FedAvg: four bytes a parameter and device.
    :param sample_rate: of the round's charge, 1 with the unit `device`; likewise `steps`.
    :param committee: of a secure sum: how many members it had, 0 elsewhere; `answers`: how many of them answered, with
        `answer_bytes` together.
    :param suspected_wraps: how many values of the secure sum may have wrapped around; see `Ring.suspected_wraps`.
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

    def to_dict(self) -> dict[str, Any]:
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


def privacy_table(
    store: AggregatorStore, *, delta: float, accountant: Accountant = "exact", until: int | None = None
) -> list[PrivacyRow]:
    """One row a device that was ever charged, by id.

    `epsilon_server` is over every accepted round, or what the device itself reported, if that is more (a
    device also counts updates that were never accepted). `epsilon_release` is over those of them that are closed.
    Where a method sends raw values, both are infinite: what is raw steers the noise or the clip norms of the rounds
    that follow, and so the models show it too, by an amount that nothing bounds.

    :param until: only rounds up to this one.
    """
    released = {
        row.round: row.metrics["multiplier_release"]
        for row in store.rounds()
        if row.metrics is not None and row.metrics["multiplier_release"] is not None
    }
    charged: dict[str, list[ChargeRow]] = {}
    for row in store.charges():
        if until is None or row.round <= until:
            charged.setdefault(row.device, []).append(row)
    return [_spent(device, rows, released, delta, accountant) for device, rows in sorted(charged.items())]


def _spent(
    device: str, rows: Sequence[ChargeRow], released: Mapping[int, float], delta: float, accountant: Accountant
) -> PrivacyRow:
    seen = [Step(row.noise_multiplier, row.sample_rate, row.steps) for row in rows]
    in_models = [
        Step(_in_model(row, released[row.round]), row.sample_rate, row.steps) for row in rows if row.round in released
    ]
    raw = list(dict.fromkeys(words for row in rows for words in row.raw.splitlines()))
    server, release = (epsilon(steps, delta=delta, accountant=accountant) for steps in (seen, in_models))
    return PrivacyRow(
        device=device,
        unit=rows[0].unit,
        adjacency=rows[0].adjacency,
        delta=delta,
        epsilon_server=math.inf if raw else max(server, *(row.device_epsilon for row in rows)),
        epsilon_release=math.inf if raw and in_models else release,
        rounds_charged=max(len(rows), *(row.device_rounds for row in rows)),
        raw_values=raw,
        noised_server=server if raw else None,
        noised_release=release if raw else None,
    )


def _in_model(row: ChargeRow, released: float) -> float:
    """Other devices' noise hides a device's contribution; its records are hidden by its own alone, of which no more
    counts than the round's standard, whatever the device says."""
    return min(row.noise_multiplier, released) if row.unit == "record" else released
