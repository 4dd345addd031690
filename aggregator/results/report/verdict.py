"""What a run's numbers say, in sentences: did federating pay, and does the epsilon mean anything?

The rules are written down here, so that no report can be kinder than its numbers. An (epsilon, delta) guarantee bounds
an observer who must tell, from even odds, whether a device took part: right at most
`(e^epsilon + delta) / (e^epsilon + 1)` of the time. At epsilon 2 that is 88 %; at 8 it is 99.97 %, a certainty for any
purpose, so above `MEANINGLESS_EPSILON` a report speaks of no meaningful protection.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from hushfleet.aggregator.results.report.words import number, percent_up, points, size
from hushfleet.aggregator.results.result import Result, SweepPoint, last_measured

STRONG_EPSILON = 1.0
MODERATE_EPSILON = 4.0
MEANINGLESS_EPSILON = 8.0
LEVEL_GAIN = 0.0005
"""Gains below a twentieth of a point are called level."""


@dataclass(frozen=True)
class Comparison:
    """Mean accuracies of the devices' own models; None: not measured."""

    federated: float | None
    alone: float | None

    @property
    def gain(self) -> float | None:
        return None if self.federated is None or self.alone is None else self.federated - self.alone


@dataclass(frozen=True)
class Headline:
    """The headline's numbers; None: not measured.

    :param common: on the common test set.
    :param local: on each device's own data.
    :param gains: by device, on the common test set, where both were measured.
    :param epsilon_server: the worst device's; likewise `epsilon_release`, and `delta` is the largest.
    :param unit: `device` or `record`: what the epsilons protect.
    :param raw_values: what leaves a device without noise, in words. Both epsilons are infinite then, and
        `noised_server` and `noised_release` are what the noised values alone cost.
    """

    common: Comparison
    local: Comparison
    global_common: float | None
    gains: list[float]
    epsilon_server: float | None
    epsilon_release: float | None
    delta: float | None
    unit: str | None
    raw_values: tuple[str, ...]
    noised_server: float | None
    noised_release: float | None

    @property
    def epsilons(self) -> tuple[tuple[str, str], tuple[str, str]]:
        """The two numbers with their names, for people."""
        return (
            ("epsilon_server", _with_noised(self.epsilon_server, self.noised_server)),
            ("epsilon_release", _with_noised(self.epsilon_release, self.noised_release)),
        )


def judge(result: Result) -> Headline:
    """The headline of a result: final accuracies, gains over training alone, worst-case epsilons."""
    rows, alone, detail = result.privacy, result.local_only, result.details
    final = final_by_device(detail.accuracy_own_common, len(detail.devices))
    return Headline(
        common=Comparison(last_measured(result.rounds, lambda row: row.accuracy_own_common), alone.accuracy_own_common),
        local=Comparison(last_measured(result.rounds, lambda row: row.accuracy_own_local), alone.accuracy_own_local),
        global_common=last_measured(result.rounds, lambda row: row.accuracy_global),
        gains=[a - b for a, b in zip(final, detail.local_only_common, strict=False) if a is not None and b is not None],
        epsilon_server=_largest(row.epsilon_server for row in rows),
        epsilon_release=_largest(row.epsilon_release for row in rows),
        delta=_largest(row.delta for row in rows),
        unit=rows[0].unit if rows else None,
        raw_values=tuple(dict.fromkeys(words for row in rows for words in row.raw_values)),
        noised_server=_largest(row.noised_server for row in rows),
        noised_release=_largest(row.noised_release for row in rows),
    )


def final_by_device(grid: list[list[float | None]], devices: int) -> list[float | None]:
    """Each device's newest measured value of a `[round][device]` list."""
    return [last_measured([row[n] for row in grid], lambda value: value) for n in range(devices)] if grid else []


def answer(headline: Headline) -> str:
    """Did federating beat training alone?"""
    common, local = headline.common.gain, headline.local.gain
    tests = ((common, "on the common test set"), (local, "on each device's own kind of data"))
    gains = [(gain, where) for gain, where in tests if gain is not None]
    if not gains:
        return (
            "This run did not measure models that each device trains alone, "
            "so it cannot say whether federating was worth it."
        )
    signs = {0 if abs(gain) < LEVEL_GAIN else math.copysign(1, gain) for gain, _ in gains}
    if signs == {0}:
        verb = "made no difference to"
    elif signs <= {0, 1}:
        verb = "beat"
    else:
        verb = "lost to" if signs <= {0, -1} else "won on one test and lost on the other against"
    sentence = f"Federating {verb} training alone: {' and '.join(f'{points(gain)} {where}' for gain, where in gains)}."
    if headline.gains:
        better, compared = sum(gain > LEVEL_GAIN for gain in headline.gains), len(headline.gains)
        who = "All" if better == compared else (better or "None")
        sentence += f" {who} of {compared} devices got a better model on the common test set."
    return sentence


def protection(epsilon: float, adversary: str) -> str:
    """What one epsilon means against one adversary, by the thresholds above."""
    if epsilon == math.inf:
        return f"no protection at all against {adversary} (nothing was noised)"
    limits = ((STRONG_EPSILON, "strong"), (MODERATE_EPSILON, "moderate"), (MEANINGLESS_EPSILON, "weak"))
    level = next((word for limit, word in limits if epsilon <= limit), "no meaningful")
    return f"{level} protection against {adversary}"


def guess_rate(epsilon: float, delta: float) -> float:
    """The best an observer can do who guesses, from even odds, whether a device took part: [0.5, 1]."""
    return 1.0 if epsilon > 700 else (math.exp(epsilon) + delta) / (math.exp(epsilon) + 1)


def privacy_answer(headline: Headline, *, devices: int) -> str:
    """What the two epsilons are worth, in plain sentences."""
    server, release, delta = headline.epsilon_server, headline.epsilon_release, headline.delta
    if server is None or release is None or delta is None:
        return "This run recorded no privacy ledger, so nothing can be said about what it protects."
    if headline.raw_values:
        text = (
            f"Both epsilons are infinite: {', '.join(headline.raw_values)} leave the device un-noised, and the models "
            f"follow them. The noised values alone: epsilon_server {number(headline.noised_server)}, epsilon_release "
            f"{number(headline.noised_release)}."
        )
    else:
        text = (
            f"epsilon_server = {number(server)}: {protection(server, 'the server')}. "
            f"epsilon_release = {number(release)}: "
            f"{protection(release, 'someone who sees only the aggregate models')}."
        )
    if server <= MEANINGLESS_EPSILON:
        who = "it" if headline.unit == "device" else f"a given {headline.unit}"
        text += (
            f" Whoever sees a device's updates and guesses, from even odds, whether {who} took part "
            f"is right at most {percent_up(guess_rate(server, delta))} of the time."
        )
    if headline.unit == "device" and delta * devices > 0.1:
        text += (
            f" Mind the delta: {number(delta)} is not small beside 1/{devices}, one over the number of "
            "devices; the promise may fail outright with that probability."
        )
    return text


def trade_answer(result: Result, headline: Headline) -> str:
    """Is there a gain on the common test set, and meaningful privacy against the server, at once?"""
    server, gain, limit = headline.epsilon_server, headline.common.gain, MEANINGLESS_EPSILON
    if server is None or gain is None:
        return ""
    if server <= limit:
        if gain >= LEVEL_GAIN:
            return "This run has both: a gain on the common test set, and meaningful privacy against the server."
        here = "The privacy against the server means something, but this run has no gain on the common test set."
    elif gain >= LEVEL_GAIN:
        here = "The gain is not bought with privacy against the server: there is none worth the name."
    else:
        here = "This run has neither a gain on the common test set nor meaningful privacy against the server."
    if not result.details.privacy_sweep:
        return here
    best = best_private_point(result)
    if best is None:
        return f"{here} No point of the noise sweep has epsilon_server of {limit:g} or less."
    if (best.gain_over_local_only or 0) < LEVEL_GAIN:
        return f"{here} No noise level of the sweep with epsilon_server of {limit:g} or less leaves a gain."
    return (
        f"{here} In the noise sweep, the best gain with meaningful privacy is "
        f"{points(best.gain_over_local_only)} at epsilon_server = {number(best.epsilon_server)}."
    )


def best_private_point(result: Result) -> SweepPoint | None:
    """The sweep's point with the largest gain among those with a meaningful epsilon_server."""
    private = [point for point in result.details.privacy_sweep if point.epsilon_server <= MEANINGLESS_EPSILON]
    gains = {n: gain for n, point in enumerate(private) if (gain := point.gain_over_local_only) is not None}
    return private[max(gains, key=lambda n: gains[n])] if gains else None


def received(result: Result) -> str:
    """What devices fetched of the global models, and how much less it was than whole ones."""
    down = sum(row.downlink_bytes for row in result.rounds)
    # a whole model has as many bytes as an update of plain FedAvg
    whole = sum(value or 0 for value in result.details.float32_bytes)
    less = f", {whole / down:.3g} times less than full models" if 0 < down < whole else ""
    return f"received {size(down)}{less}"


def _largest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _with_noised(epsilon: float | None, noised: float | None) -> str:
    return number(epsilon) + ("" if noised is None else f" (the noised values alone: {number(noised)})")
