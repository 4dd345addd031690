"""Judges a run: whether federating paid, and how much protection the epsilon means, as verdicts and numbers.

The rules are fixed here, so that no report can be better than its numbers. A gain counts if the model has learned
anything, and if it is at least two standard errors over devices; else it is too close to call
(`MeanAccuracies.verdict`). The words are in the templates.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean

from hushfleet.aggregator.report.readable import NOT_MEASURED, format_lifetime, gained, number
from hushfleet.aggregator.report.tables import PageCell
from hushfleet.aggregator.results.gains import (
    Gain,
    GainVerdict,
    MeanAccuracies,
    chance,
    common_test,
    personalized_models,
    shared_model,
    worse_than_local_only,
)
from hushfleet.aggregator.results.result import Lifetime, PersonalizedHead, Repeated, Result, SumsInfo, SweepPoint
from hushfleet.aggregator.results.server_sees import SumFacts, server_sees
from hushfleet.privacy.protection import NEGLIGIBLE_ABOVE
from hushfleet.privacy.terms import TRUST, TrustModel

VERDICTS: dict[GainVerdict | None, str] = {
    "better": "better than alone",
    "worse": "worse than alone",
    "close": "too close to call",
    "nothing": "learned nothing",
    None: "not measured",
}
"""The words of a verdict in a cell of a table."""
LIMIT = NEGLIGIBLE_ABOVE
COMMON = "common test"


@dataclass(frozen=True)
class ComparedRow:
    """A row of the table of a run. Sentences and tables take its figures and its verdict from here.

    :param model: `personalized models` and `global model`; if devices also choose personalized heads, `personalized
        heads` and `shared head`.
    :param test: `common test` or `own data`.
    """

    model: str
    test: str
    found: MeanAccuracies

    @property
    def name(self) -> str:
        return f"{self.model}, {self.test}"

    @property
    def verdict(self) -> GainVerdict | None:
        return self.found.verdict


@dataclass(frozen=True)
class Headline:
    """The verdicts and numbers of a run; None: not measured.

    :param rows: the accuracies that are compared with training alone; the first two are `common` and `local`.
    :param epsilon_server: the epsilon of the worst device, like `epsilon_release`, which is also None if no round made
        a model; `delta` is the largest one.
    :param unit: `device` or `record`: what the epsilons protect.
    :param exchange_server: the epsilon of the worst device for replacing one unit by another.
    :param lifetime: lifetime spending of the device that has spent most over all tasks; None if it is not known.
    :param raw_values: the values that leave a device without noise, in words. Both epsilons are then infinite, and
        `noised_server` and `noised_release` are the cost of the noised values alone.
    """

    result: Result
    rows: tuple[ComparedRow, ...]
    epsilon_server: float | None
    epsilon_release: float | None
    delta: float | None
    unit: str | None
    raw_values: tuple[str, ...]
    noised_server: float | None
    noised_release: float | None
    exchange_server: float | None = None
    lifetime: Lifetime | None = None

    @property
    def own_heads(self) -> bool:
        """Whether devices choose personalized heads, so that the rows are of two kinds of heads."""
        return bool(self.result.details.own_heads)

    @property
    def common(self) -> MeanAccuracies:
        """Accuracies on the common test set."""
        return self.rows[0].found

    @property
    def local(self) -> MeanAccuracies:
        """Accuracies on each device's own data."""
        return self.rows[1].found

    @property
    def judged(self) -> tuple[ComparedRow, ...]:
        """The rows of models with which devices predict: both heads, or personalized models without the global one."""
        rows = self.rows if self.own_heads else self.rows[:2]
        return tuple(row for row in rows if row.verdict is not None)

    @property
    def by_verdict(self) -> dict[GainVerdict | None, list[ComparedRow]]:
        found: dict[GainVerdict | None, list[ComparedRow]] = {}
        for row in self.judged:
            found.setdefault(row.verdict, []).append(row)
        return found

    @property
    def epsilons(self) -> tuple[tuple[str, str], ...]:
        """The two epsilons of this task with their names, as texts; before them the spending over all tasks."""
        replaced = "" if self.exchange_server is None else f" (replace-one {number(self.exchange_server)})"
        return (
            *([] if self.lifetime is None else [("spent in all", format_lifetime(self.lifetime))]),
            ("epsilon_server", _with_noised(self.epsilon_server, self.noised_server) + replaced),
            ("epsilon_release", _with_noised(self.epsilon_release, self.noised_release)),
        )

    @property
    def trust(self) -> TrustModel:
        return self.result.trust or TRUST[self.result.accounting]

    @property
    def _heads(self) -> list[PersonalizedHead]:
        return [head for head in self.result.details.own_heads if head is not None]

    @property
    def mixture(self) -> list[float] | None:
        """The mean shares of the shared head, pulled heads and heads trained alone in the devices' personalized heads;
        empty if devices chose one of them, None without personalized heads."""
        mixed = [
            (head.shared, head.pulled or 0.0, head.alone or 0.0) for head in self._heads if head.shared is not None
        ]
        return list(map(fmean, zip(*mixed, strict=True))) if self._heads else None

    @property
    def unlabelled(self) -> int:
        return max(head.unlabelled for head in self._heads)

    @property
    def worse_than_local_only(self) -> tuple[int, int] | None:
        return worse_than_local_only(self.result)

    @property
    def best_private(self) -> SweepPoint | str:
        """The point of the noise sweep with the best sure gain and more than negligible protection against the server;
        `no point` has that protection, or `no sure gain`; empty without a sweep."""
        sweep = self.result.details.privacy_sweep
        private = [point for point in sweep if point.epsilon_server <= LIMIT]
        sure = [point for point in private if verdict_of(self.result, point) == "better"]
        if sure:
            return max(sure, key=lambda point: gain_of(point).mean)
        return "no sure gain" if private else "no point" if sweep else ""


def judge(result: Result) -> Headline:
    """Returns the headline of a result: final accuracies, gains over training alone, worst-case epsilons."""
    privacy, own_heads = result.privacy, bool(result.details.own_heads)
    own, other = ("personalized heads", "shared head") if own_heads else ("personalized models", "global model")
    third = personalized_models(result) if own_heads else shared_model(result)
    return Headline(
        result,
        rows=(
            ComparedRow(other if own_heads else own, COMMON, common_test(result)),
            ComparedRow(own, "own data", personalized_models(result, "local")),
            ComparedRow(own if own_heads else other, COMMON, third),
        ),
        epsilon_server=_largest(row.epsilon_server for row in privacy),
        # an epsilon of models: if no model was made, 0 would look like protection
        epsilon_release=_largest(row.epsilon_release for row in privacy if any(r.participants for r in result.rounds)),
        delta=_largest(row.delta for row in privacy),
        unit=privacy[0].unit if privacy else None,
        raw_values=tuple(dict.fromkeys(words for row in privacy for words in row.raw_values)),
        noised_server=_largest(row.noised_server for row in privacy),
        noised_release=_largest(row.noised_release for row in privacy),
        exchange_server=_largest(row.exchange_server for row in privacy),
        lifetime=max(
            (row.lifetime for row in privacy if row.lifetime), key=lambda each: each.epsilon_server, default=None
        ),
    )


def seen_by_server(sums: SumsInfo | None) -> str:
    """Returns the sentence of `server_sees` for a run with secure aggregation."""
    if sums is None:
        return server_sees(None)
    return server_sees(SumFacts(sums.roster_by, sums.keys_in_folder), min_devices=sums.min_devices)


def gain_of(point: Repeated) -> Gain:
    return Gain(point.gain_over_local_only or 0.0, point.gain_standard_error)


def verdict_of(result: Result, point: Repeated) -> GainVerdict | None:
    """Returns the verdict on a point of a sweep, by the same rule as for the run itself."""
    reached = point.accuracy_global if result.details.own_heads else point.accuracy_own_common
    images = result.details.common_test_images or 0
    verdict = MeanAccuracies(reached, None, chance=chance(result)[0], images=images).verdict
    return verdict if verdict or point.gain_over_local_only is None else gain_of(point).outcome


def gain_cell(
    gain: Gain | None, verdict: GainVerdict | None, unit: str = "", *, missing: str = NOT_MEASURED
) -> PageCell:
    """Returns a cell of a table: the gain in the colour of its verdict, or that the model has learned nothing."""
    if verdict == "nothing":
        return PageCell(VERDICTS[verdict], verdict)
    return PageCell(missing if gain is None else gained(gain, unit), verdict or "")


def _largest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _with_noised(epsilon: float | None, noised: float | None) -> str:
    return number(epsilon) + ("" if noised is None else f" (the noised values alone: {number(noised)})")
