"""What a run's numbers say, in sentences: did federating pay, and does the epsilon mean anything?

The sentences are decided by rules that are written down here, so that no report can be kinder than its
numbers. An (epsilon, delta) guarantee bounds an observer who must tell, from even odds, whether a device
took part: right at most `(e^epsilon + delta) / (e^epsilon + 1)` of the time. At epsilon 2 that is 88 %; at
8 it is 99.97 %, a certainty for any purpose, so above `MEANINGLESS_EPSILON` a report speaks of no meaningful
protection, whatever the noise looked like.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from hushfleet.aggregator.results.result import Result, SweepPoint, last_measured

STRONG_EPSILON = 1.0
MODERATE_EPSILON = 4.0
MEANINGLESS_EPSILON = 8.0
LEVEL_GAIN = 0.0005
"""Gains below a twentieth of a point are called level."""


@dataclass(frozen=True)
class Verdict:
    """The headline's numbers. Accuracies and gains are fractions of 1; None: not measured.

    :param gain_common: own models minus local-only models, both on the common test set.
    :param gain_local: the same on each device's own data.
    :param epsilon_server: the worst device's.
    :param raw_values: what leaves a device without noise, in words; both epsilons are infinite then, and
        `noised_server` and `noised_release` are what the noised values alone cost.
    :param delta: the largest of the devices'.
    :param unit: `device` or `record`: what the epsilons protect.
    """

    own_common: float | None
    own_local: float | None
    global_common: float | None
    alone_common: float | None
    alone_local: float | None
    gain_common: float | None
    gain_local: float | None
    devices_gained: int
    devices_compared: int
    epsilon_server: float | None
    epsilon_release: float | None
    delta: float | None
    unit: str | None
    raw_values: tuple[str, ...] = ()
    noised_server: float | None = None
    noised_release: float | None = None

    @property
    def epsilons(self) -> tuple[tuple[str, str], tuple[str, str]]:
        """The two numbers with their names, for people."""
        return (
            ("epsilon_server", _with_noised(self.epsilon_server, self.noised_server)),
            ("epsilon_release", _with_noised(self.epsilon_release, self.noised_release)),
        )


def judge(result: Result) -> Verdict:
    """The headline of a result: final accuracies, gains over training alone, worst-case epsilons."""
    own_common = last_measured(result.rounds, lambda row: row.accuracy_own_common)
    own_local = last_measured(result.rounds, lambda row: row.accuracy_own_local)
    alone = result.local_only
    pairs = paired_gains(result)
    return Verdict(
        own_common=own_common,
        own_local=own_local,
        global_common=last_measured(result.rounds, lambda row: row.accuracy_global),
        alone_common=alone.accuracy_own_common,
        alone_local=alone.accuracy_own_local,
        gain_common=_minus(own_common, alone.accuracy_own_common),
        gain_local=_minus(own_local, alone.accuracy_own_local),
        devices_gained=sum(gain > LEVEL_GAIN for gain in pairs),
        devices_compared=len(pairs),
        epsilon_server=max((row.epsilon_server for row in result.privacy), default=None),
        epsilon_release=max((row.epsilon_release for row in result.privacy), default=None),
        delta=max((row.delta for row in result.privacy), default=None),
        unit=result.privacy[0].unit if result.privacy else None,
        raw_values=tuple(dict.fromkeys(words for row in result.privacy for words in row.raw_values)),
        noised_server=_largest(row.noised_server for row in result.privacy),
        noised_release=_largest(row.noised_release for row in result.privacy),
    )


def _largest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _with_noised(epsilon: float | None, noised: float | None) -> str:
    return number(epsilon) + ("" if noised is None else f" (the noised values alone: {number(noised)})")


def final_by_device(grid: list[list[float | None]], devices: int) -> list[float | None]:
    """Each device's newest measured value of a `[round][device]` list."""
    return [last_measured(grid, lambda row, n=n: row[n]) for n in range(devices)] if grid else []


def paired_gains(result: Result) -> list[float]:
    """Per device, own model minus local-only on the common test set, where both were measured."""
    detail = result.details
    final = final_by_device(detail.accuracy_own_common, len(detail.devices))
    pairs = zip(final, detail.local_only_common, strict=False)
    return [own - alone for own, alone in pairs if own is not None and alone is not None]


def answer(verdict: Verdict) -> str:
    """Did federating beat training alone?"""
    common, local = verdict.gain_common, verdict.gain_local
    if common is None and local is None:
        return (
            "This run did not measure models that each device trains alone, "
            "so it cannot say whether federating was worth it."
        )
    parts = [
        f"{points(gain)} {where}"
        for gain, where in ((common, "on the common test set"), (local, "on each device's own kind of data"))
        if gain is not None
    ]
    sentence = f"Federating {_verb(common, local)} training alone: {' and '.join(parts)}."
    if verdict.devices_compared:
        gained, compared = verdict.devices_gained, verdict.devices_compared
        who = "All" if gained == compared else ("None" if gained == 0 else str(gained))
        sentence += f" {who} of {compared} devices got a better model on the common test set."
    return sentence


def _verb(common: float | None, local: float | None) -> str:
    signs = {_sign(gain) for gain in (common, local) if gain is not None}
    if signs == {0}:
        return "made no difference to"
    if signs <= {0, 1}:
        return "beat"
    if signs <= {0, -1}:
        return "lost to"
    return "won on one test and lost on the other against"


def _sign(gain: float) -> int:
    return 0 if abs(gain) < LEVEL_GAIN else (1 if gain > 0 else -1)


def protection(epsilon: float, adversary: str) -> str:
    """What one epsilon means against one adversary, by the thresholds above."""
    if epsilon == math.inf:
        return f"no protection at all against {adversary} (nothing was noised)"
    if epsilon > MEANINGLESS_EPSILON:
        return f"no meaningful protection against {adversary}"
    if epsilon > MODERATE_EPSILON:
        return f"weak protection against {adversary}"
    if epsilon > STRONG_EPSILON:
        return f"moderate protection against {adversary}"
    return f"strong protection against {adversary}"


def guess_rate(epsilon: float, delta: float) -> float:
    """The best an observer can do who guesses, from even odds, whether a device took part: [0.5, 1]."""
    if epsilon > 700:
        return 1.0
    return (math.exp(epsilon) + delta) / (math.exp(epsilon) + 1)


def privacy_answer(verdict: Verdict, *, devices: int) -> str:
    """What the two epsilons are worth, in plain sentences."""
    server, release, delta = verdict.epsilon_server, verdict.epsilon_release, verdict.delta
    if server is None or release is None or delta is None:
        return "This run recorded no privacy ledger, so nothing can be said about what it protects."
    who = "it" if verdict.unit == "device" else f"a given {verdict.unit}"
    if verdict.raw_values:
        text = (
            f"Both epsilons are infinite: {', '.join(verdict.raw_values)} leave the device un-noised, and the models "
            f"follow them. The noised values alone: epsilon_server {number(verdict.noised_server)}, epsilon_release "
            f"{number(verdict.noised_release)}."
        )
    else:
        text = (
            f"epsilon_server = {number(server)}: {protection(server, 'the server')}. "
            f"epsilon_release = {number(release)}: "
            f"{protection(release, 'someone who sees only the aggregate models')}."
        )
    if server <= MEANINGLESS_EPSILON:
        text += (
            f" Whoever sees a device's updates and guesses, from even odds, whether {who} took part "
            f"is right at most {percent_up(guess_rate(server, delta))} of the time."
        )
    if verdict.unit == "device" and delta * devices > 0.1:
        text += (
            f" Mind the delta: {number(delta)} is not small beside 1/{devices}, one over the number of "
            "devices; the promise may fail outright with that probability."
        )
    return text


def trade_answer(result: Result, verdict: Verdict) -> str:
    """Is there a gain on the common test set, and meaningful privacy against the server, at once?"""
    server, gain = verdict.epsilon_server, verdict.gain_common
    if server is None or gain is None:
        return ""
    private, gained = server <= MEANINGLESS_EPSILON, gain >= LEVEL_GAIN
    if private and gained:
        return (
            "So this run has both: a gain on the common test set, and privacy against the server that means something."
        )
    if gained:
        here = "The gain is not bought with privacy against the server: there is none worth the name."
    elif private:
        here = "The privacy against the server means something, but this run has no gain on the common test set."
    else:
        here = "This run has neither a gain on the common test set nor meaningful privacy against the server."
    best = best_private_point(result)
    if not result.details.privacy_sweep:
        return here
    limit = f"{MEANINGLESS_EPSILON:g}"
    if best is None:
        return f"{here} No point of the noise sweep has epsilon_server of {limit} or less."
    if (best.gain_over_local_only or 0) < LEVEL_GAIN:
        return f"{here} No noise level of the sweep with epsilon_server of {limit} or less leaves a gain."
    return (
        f"{here} In the noise sweep, the best gain with meaningful privacy is "
        f"{points(best.gain_over_local_only)} at epsilon_server = {number(best.epsilon_server)}."
    )


def best_private_point(result: Result) -> SweepPoint | None:
    """The sweep's point with the largest gain among those with a meaningful epsilon_server."""
    private = [
        point
        for point in result.details.privacy_sweep
        if point.epsilon_server <= MEANINGLESS_EPSILON and point.gain_over_local_only is not None
    ]
    return max(private, key=lambda point: point.gain_over_local_only, default=None)


def points(gain: float | None) -> str:
    """A difference of accuracies in percentage points, with its sign: `+3.2 points`."""
    if gain is None:
        return "not measured"
    return f"{signed(100 * gain)} points"


def percent(value: float | None) -> str:
    """An accuracy or share: `87.3 %`."""
    return "not measured" if value is None else f"{100 * value:.1f}\N{NO-BREAK SPACE}%"


def percent_up(value: float) -> str:
    """A bound that must not be rounded down, and that says 100 % only when it is."""
    if value < 0.999:
        return f"{math.ceil(1000 * value) / 10:.1f}\N{NO-BREAK SPACE}%"
    if value >= 1:
        return "100\N{NO-BREAK SPACE}%"
    nines = min(12, math.ceil(-math.log10(1 - value)))
    return f"{100 * (1 - 10**-nines):.{nines - 2}f}\N{NO-BREAK SPACE}%"


def number(value: float | None) -> str:
    """A number as people write it: three figures, thousands grouped, infinity as its sign."""
    if value is None:
        return "not measured"
    if math.isinf(value):
        return "\N{INFINITY}" if value > 0 else "\N{MINUS SIGN}\N{INFINITY}"
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1000:
        text = f"{value:,.0f}"
    elif size >= 100:
        text = f"{value:.0f}"
    elif size >= 10:
        text = f"{value:.1f}"
    elif size >= 0.01:
        text = f"{value:.3g}"
    else:
        text = f"{value:.2g}"
    return text.replace("-", "\N{MINUS SIGN}", 1) if value < 0 else text


def tick_text(value: float) -> str:
    """A round number on an axis."""
    return f"{round(value, 9):,g}".replace("-", "\N{MINUS SIGN}", 1)


def signed(value: float) -> str:
    """A difference with its sign and one decimal."""
    return f"{round(value, 1) + 0.0:+.1f}".replace("-", "\N{MINUS SIGN}").replace("+0.0", "0.0")


def size(count: float | None) -> str:
    """Bytes in decimal units: `1.2 MB`."""
    if count is None:
        return "not measured"
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= 0.9995 * scale:
            amount = count / scale
            text = f"{amount:,.0f}" if amount >= 100 else f"{amount:.3g}"
            return f"{text}\N{NO-BREAK SPACE}{unit}"
    return f"{count:.0f}\N{NO-BREAK SPACE}B"


def received(result: Result) -> str:
    """What devices fetched of the global models, and how much less it was than whole ones."""
    down = sum(row.downlink_bytes for row in result.rounds)
    # a whole model has as many bytes as an update of plain FedAvg
    whole = sum(value or 0 for value in result.details.float32_bytes)
    less = f", {whole / down:.3g} times less than full models" if 0 < down < whole else ""
    return f"received {size(down)}{less}"


def _minus(own: float | None, alone: float | None) -> float | None:
    return None if own is None or alone is None else own - alone
