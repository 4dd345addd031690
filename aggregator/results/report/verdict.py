"""Describes a run's numbers in words: whether federating paid, and how much protection the epsilon means.

The rules are fixed here, so that no report can be better than its numbers. A gain counts if the model has learned
anything, and if it is at least two standard errors over devices; else it is too close to call
(`MeanAccuracies.verdict`).

The word for an epsilon comes from `hushfleet.privacy.protection`, as everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean

from hushfleet.aggregator.results.gains import (
    Gain,
    GainVerdict,
    MeanAccuracies,
    chance,
    common_test,
    own_data,
    own_models,
    shared_model,
    worse_than_alone,
)
from hushfleet.aggregator.results.report.page import PageCell
from hushfleet.aggregator.results.report.readable import (
    NOT_MEASURED,
    epsilon_number,
    evaluated,
    format_lifetime,
    gained,
    number,
    percent,
    percent_up,
    points,
    size,
    statistic_lines,
)
from hushfleet.aggregator.results.result import Lifetime, Repeated, Result, SumsInfo
from hushfleet.aggregator.results.server_sees import SumFacts, server_sees
from hushfleet.privacy.protection import NEGLIGIBLE_ABOVE, guess_rate, protection
from hushfleet.privacy.terms import TRUST, TrustModel

_VERBS: dict[GainVerdict, str] = {
    "better": "beats training alone",
    "worse": "is worse than training alone",
    "close": "is too close to training alone to call",
    "nothing": "has learned nothing",
}
VERDICTS: dict[GainVerdict | None, str] = {
    "better": "better than alone",
    "worse": "worse than alone",
    "close": "too close to call",
    "nothing": "learned nothing",
    None: "not measured",
}
"""The words of a verdict in a cell of a table."""
_TRUSTS: dict[TrustModel, str] = {
    "local": "nobody is trusted, since each device adds all of its noise itself",
    "secure-sum": "enough of the other devices are trusted to be honest",
    "as-published": "the mechanism and its accounting are the paper's; where its claim does not follow from the "
    "mechanism, these numbers are no proof",
}
SERVER_MEANINGS: dict[TrustModel, str] = {
    "local": "Protection against whoever sees a device's own updates: the aggregator, the broker, a tap on the wire. "
    "This is local differential privacy: the device trusts nobody.",
    "secure-sum": "Protection against whoever sees the sums that a device is in, and what corrupt devices know: the "
    "aggregator, the broker, a tap on the wire. This is not local differential privacy: it holds only if enough of the "
    "other devices are honest and add their noise, and if whoever runs the server does not hold the operator's key.",
    "as-published": "Protection against whoever sees a device's own updates: the aggregator, the broker, a tap on the "
    "wire. The mechanism is the paper's, and this number may be much larger than the one that the paper prints.",
}
"""The meaning of epsilon_server, by trust model."""


COMMON = "common test"


@dataclass(frozen=True)
class ComparedRow:
    """A row of the table of a run. Sentences and tables take its figures and its verdict from here.

    :param model: `own models` and `global model`; if devices also choose own heads, `own heads` and `shared head`.
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
    """The headline's numbers; None: not measured.

    :param rows: the accuracies that are compared with training alone; the first two are `common` and `local`.
    :param own_heads: whether devices choose own heads, so that the rows are of two kinds of heads.
    :param common: accuracies on the common test set; `local`: on each device's own data.
    :param epsilon_server: the epsilon of the worst device, like `epsilon_release`, which is also None if no round made
        a model; `delta` is the largest one.
    :param unit: `device` or `record`: what the epsilons protect.
    :param exchange_server: the epsilon of the worst device for exchanging one unit for another.
    :param lifetime: lifetime spending of the device that has spent most over all tasks; None if it is not known.
    :param raw_values: the values that leave a device without noise, in words. Both epsilons are then infinite, and
        `noised_server` and `noised_release` are the cost of the noised values alone.
    """

    rows: tuple[ComparedRow, ...]
    own_heads: bool
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
    def common(self) -> MeanAccuracies:
        return self.rows[0].found

    @property
    def local(self) -> MeanAccuracies:
        return self.rows[1].found

    @property
    def other_model(self) -> str:
        """The name of the model that all devices share."""
        return self.rows[0 if self.own_heads else 2].model

    @property
    def judged(self) -> tuple[ComparedRow, ...]:
        """The rows of models with which devices predict: both heads, or own models without the global one."""
        rows = self.rows if self.own_heads else self.rows[:2]
        return tuple(row for row in rows if row.verdict is not None)

    @property
    def epsilons(self) -> tuple[tuple[str, str], ...]:
        """The two epsilons of this task with their names, as texts; before them the spending over all tasks."""
        exchange = "" if self.exchange_server is None else f" (exchange {number(self.exchange_server)})"
        return (
            *([] if self.lifetime is None else [("spent in all", format_lifetime(self.lifetime))]),
            ("epsilon_server", _with_noised(self.epsilon_server, self.noised_server) + exchange),
            ("epsilon_release", _with_noised(self.epsilon_release, self.noised_release)),
        )


def judge(result: Result) -> Headline:
    """Returns the headline of a result: final accuracies, gains over training alone, worst-case epsilons."""
    privacy, own_heads = result.privacy, bool(result.details.own_heads)
    own, other = ("own heads", "shared head") if own_heads else ("own models", "global model")
    common = ComparedRow(other if own_heads else own, COMMON, common_test(result))
    third = (
        ComparedRow(own, COMMON, own_models(result)) if own_heads else ComparedRow(other, COMMON, shared_model(result))
    )
    return Headline(
        rows=(common, ComparedRow(own, "own data", own_data(result)), third),
        own_heads=own_heads,
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


def answer(result: Result, headline: Headline) -> str:
    """Says whether federating beats training alone."""
    if (statistic := result.statistic) is not None:
        values = "; ".join(" ".join(line.split()) for line in statistic_lines(statistic))
        return (
            f"{statistic.devices} devices have answered. {statistic.kind.capitalize()}: {values} (the truth is within "
            "each ± in 19 of 20 cases)."
        )
    found: dict[GainVerdict, list[str]] = {}
    for row in headline.judged:
        if row.verdict is not None:
            found.setdefault(row.verdict, []).append(_found(row, result, headline))
    sentences = []
    if found:
        told = [
            f"{_VERBS[verdict]}: {(', and ' if verdict == 'nothing' else ' and ').join(which)}"
            for verdict, which in found.items()
        ]
        sentences.append(f"Federating {'; it '.join(told)}.")
    gain = headline.common.gain or headline.local.gain
    if result.pay:
        sentences.append(f"{result.pay}.")
    elif result.evaluations:
        newest = result.evaluations[-1]
        gained_by = f"{points(newest.gain.value, '')} ± {100 * newest.gain.error:.1f} points over staying alone"
        sentences.append(f"The devices say {gained_by}, {evaluated(newest)}.")
    elif gain is None:
        sentences.append(
            "This run did not measure models that each device trains alone, "
            "so it cannot say whether federating was worth it."
        )
    elif gain is not None and set(found) != {"nothing"}:  # else no gain was told
        sentences.append(_spread(gain, result.seed))
    third = headline.rows[2]
    if third not in headline.judged and third.verdict == "nothing" and headline.common.verdict != "nothing":
        sentences.append(f"The {third.model} has learned nothing: {_found(third, result, headline)}.")
    counted = [row for row in headline.judged if row.test == COMMON and row.found.gains and row.verdict != "nothing"]
    sentences += [_better_off(row, headline) for row in counted]
    return " ".join(sentences)


def _found(row: ComparedRow, result: Result, headline: Headline) -> str:
    """Describes the gain; for a model that has learned nothing, its accuracy and the accuracy of chance."""
    where = "on the common test set"
    if row.test != COMMON:
        where = "on each device's own kind of data" + ", by the labels that it has" * (result.partition == "given")
    if headline.own_heads:
        where = f"{whose(row)} {where}"
    if row.verdict == "nothing":
        found = row.found
        return (
            f"{percent(found.federated)} {where}, where always giving the same answer reaches {percent(found.chance)}"
        )
    return f"{gained(row.found.gain)} {where}"


def whose(row: ComparedRow) -> str:
    """Names the heads of a row in a sentence, where there are two kinds of them."""
    return f"with {'the ' * row.model.startswith('shared')}{row.model}"


def _better_off(row: ComparedRow, headline: Headline) -> str:
    better, of = row.found.better_off, len(row.found.gains)
    who = "all" if better == of else str(better or "none")
    if not headline.own_heads:
        return f"{who.capitalize()} of {of} devices got a better model on the common test set."
    heads = "The shared head is" if row.model.startswith("shared") else "Own heads are"
    return f"{heads} better than alone for {who} of {of} devices on the common test set."


def _spread(gain: Gain, seed: int | None) -> str:
    if gain.standard_error is None:
        return "Without several devices that were measured both ways there is no spread to compare with."
    of_one_seed = "" if seed is None else ", with one seed"
    return f"(± one standard error over {gain.count} devices{of_one_seed}.)"


def own_head_answer(result: Result) -> str:
    """Describes the devices' own heads, and how many devices would be better off alone."""
    heads = [head for head in result.details.own_heads if head is not None]
    if not heads:
        return ""
    text = "By their own images, which costs no privacy, the devices make heads of their own"
    mixed = [(head.shared, head.pulled or 0.0, head.alone or 0.0) for head in heads if head.shared is not None]
    if mixed:
        shared, pulled, alone = (percent(fmean(parts)) for parts in zip(*mixed, strict=True))
        text += f": on average {shared} the shared head, {pulled} heads pulled to it, {alone} heads trained alone"
    if unlabelled := max(head.unlabelled for head in heads):
        text += f". {unlabelled} images without labels have half of a head, and took part in no round"
    text += "."
    found = worse_than_alone(result)
    if found is not None:
        worse, of = found
        text += (
            f" On their own data {worse or 'none'} of {of} devices {'is' if worse == 1 else 'are'} worse than alone by "
            "more than the standard error of their own test."
        )
    return text


def lost_answer(result: Result) -> str:
    """Counts the rounds that made no model, and what they have cost; empty without such rounds."""
    return "" if result.lost_rounds is None else f"{result.lost_rounds.words(len(result.rounds))}."


def lifetime_answer(result: Result, headline: Headline) -> str:
    """Describes the total privacy loss of devices, or where to find it; empty for simulations, which have one task."""
    if headline.lifetime is not None:
        return f"The board that has spent most stands at {format_lifetime(headline.lifetime)}."
    if result.engine != "field" or not result.privacy:
        return ""
    return (
        "These epsilons are of this task. What boards have spent in other tasks is not known to this aggregator: "
        "`hushfleet-edge status DEVICE.toml` on a board says it."
    )


def trust_answer(result: Result) -> str:
    """Names the parties that must be trusted so that epsilon_server holds; empty without noise."""
    if not result.noise_multiplier:
        return ""
    trust = trust_of(result)
    words = f"Trust model {trust}: {_TRUSTS[trust]}."
    return f"{words} {seen_by_server(result.sums)}" if trust == "secure-sum" else words


def seen_by_server(sums: SumsInfo | None) -> str:
    """Returns the sentence of `server_sees` for a run with secure sums."""
    if sums is None:
        return server_sees(None)
    return server_sees(SumFacts(sums.roster_by, sums.keys_in_folder), min_devices=sums.min_devices)


def trust_of(result: Result) -> TrustModel:
    return result.trust or TRUST[result.accounting]


def privacy_answer(headline: Headline, *, devices: int) -> str:
    """Rates the two epsilons in plain sentences."""
    server, release, delta = headline.epsilon_server, headline.epsilon_release, headline.delta
    if server is None or delta is None:
        return "This run recorded no privacy ledger, so nothing can be said about what it protects."
    if release is None:
        return (
            "No round had enough updates to make a model of, so the devices have paid for nothing: "
            f"epsilon_server = {epsilon_number(server)}, {protection(server)} against the server."
        )
    if headline.raw_values:
        text = (
            f"Both epsilons are infinite: {', '.join(headline.raw_values)} leave the device un-noised, and the models "
            f"follow them. The noised values alone: epsilon_server {number(headline.noised_server)}, epsilon_release "
            f"{number(headline.noised_release)}."
        )
    else:
        text = (
            f"epsilon_server = {epsilon_number(server)}: {protection(server)} against the server. "
            f"epsilon_release = {epsilon_number(release)}: {protection(release)} against someone who sees only the "
            "aggregate models."
        )
    if server <= NEGLIGIBLE_ABOVE:
        who = "it" if headline.unit == "device" else f"a given {headline.unit}"
        text += (
            f" Whoever sees a device's updates and guesses, from even odds, whether {who} took part "
            f"is right at most {percent_up(guess_rate(server, delta))} of the time."
        )
    if headline.unit == "device" and release < math.inf and delta * devices > 0.1:
        text += (
            f" Mind the delta: {number(delta)} is not small beside 1/{devices}, one over the number of "
            "devices; the promise may fail outright with that probability."
        )
    return text


def trade_answer(result: Result, headline: Headline) -> str:
    """Says whether the run has both a gain on the common test set and more than negligible protection against the
    server, by the verdicts of the rows of the table."""
    server, limit = headline.epsilon_server, NEGLIGIBLE_ABOVE
    rows = [row for row in headline.judged if row.test == COMMON]
    if server is None or not rows:
        return ""
    better = [row for row in rows if row.verdict == "better"]
    others = "; ".join(f"{row.model}: {VERDICTS[row.verdict]}" for row in rows if row not in better)
    gain = f"{'a' if better else 'no sure'} gain on the common test set"
    gain += f" {' and '.join(map(whose, better))}" * (headline.own_heads and bool(better))
    gain += f" ({others})" * bool(others)
    shield = f"{protection(server)} against the server"
    if server <= limit and better:
        return f"This run has both: {gain}, and {shield}."
    here = f"This run has {shield}, but {gain}." if server <= limit else f"This run has {gain}, and {shield}."
    return " ".join(filter(None, [here, _in_sweep(result, headline)]))


def _in_sweep(result: Result, headline: Headline) -> str:
    """Says whether some noise level has both; the sweep judges the models of the first row."""
    limit, by = NEGLIGIBLE_ABOVE, f" {whose(headline.rows[0])}" * headline.own_heads
    private = [point for point in result.details.privacy_sweep if point.epsilon_server <= limit]
    if not result.details.privacy_sweep:
        return ""
    if not private:
        return f"No point of the noise sweep has epsilon_server of {limit:g} or less."
    sure = [point for point in private if verdict_of(result, point) == "better"]
    if not sure:
        return f"No noise level of the sweep with epsilon_server of {limit:g} or less leaves a sure gain{by}."
    best = max(sure, key=lambda point: gain_of(point).mean)
    return (
        f"In the noise sweep, the best gain{by} with epsilon_server of {limit:g} or less is "
        f"{gained(gain_of(best))} at epsilon_server = {number(best.epsilon_server)}."
    )


def further_answers(result: Result, headline: Headline) -> list[str]:
    """Returns the texts after `answer`: own heads, lifetime, privacy, trust, and gain together with privacy."""
    told = (
        lost_answer(result),
        own_head_answer(result),
        lifetime_answer(result, headline),
        privacy_answer(headline, devices=result.devices),
        trust_answer(result),
        trade_answer(result, headline),
    )
    return [words for words in told if words]


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


def received(result: Result) -> str:
    """Describes the bytes of global models that devices fetched, and how much less it was than full models."""
    down = sum(row.downlink_bytes for row in result.rounds)
    # a whole model has as many bytes as an update of plain FedAvg
    whole = sum(value or 0 for value in result.details.float32_bytes)
    less = f", {whole / down:.3g} times less than full models" if 0 < down < whole else ""
    return f"received {size(down)}{less}"


def _largest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _with_noised(epsilon: float | None, noised: float | None) -> str:
    return number(epsilon) + ("" if noised is None else f" (the noised values alone: {number(noised)})")
