"""Formats numbers for people. A missing value is named as not measured, never shown as 0."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, stdev
from typing import TYPE_CHECKING

from hushfleet.aggregator.results.answers import EvaluationRow, StatisticRow, WithError
from hushfleet.aggregator.results.result import Lifetime, WireInfo
from hushfleet.privacy.protection import protection
from hushfleet.privacy.spending import describe_since

if TYPE_CHECKING:
    from hushfleet.aggregator.results.gains import Gain

NOT_MEASURED = "not measured"
NARROW = "\N{NO-BREAK SPACE}"
MINUS = "\N{MINUS SIGN}"
_UNITS = (("d", 86400.0), ("h", 3600.0), ("min", 60.0))
LIFETIME = "over all tasks known to this aggregator"


def number(value: float | None) -> str:
    """Formats three significant digits, with grouped thousands, and infinity as its sign."""
    if value is None:
        return NOT_MEASURED
    if math.isinf(value):
        return "\N{INFINITY}" if value > 0 else f"{MINUS}\N{INFINITY}"
    size = abs(float(f"{value:.3g}"))  # as it is shown: 99.96 is 100
    form = ",.0f" if size >= 100 else ".1f" if size >= 10 else ".3g" if size >= 0.01 or size == 0 else ".2g"
    return f"{value:{form}}".replace("-", MINUS, 1) if value < 0 else f"{value + 0.0:{form}}"


def epsilon_number(epsilon: float | None, limit: float | None = None) -> str:
    """Formats an epsilon beside its word: 8.004 is not `8`, whose word is better. Nor is it rounded to its `limit`."""
    if epsilon is None or math.isinf(epsilon):
        return number(epsilon)

    def says_the_same(shown: float) -> bool:
        return protection(shown) == protection(epsilon) and (limit is None or (shown > limit) is (epsilon > limit))

    digits = next(digits for digits in range(3, 18) if says_the_same(float(f"{epsilon:.{digits}g}")))
    return number(epsilon) if digits == 3 else f"{epsilon:.{digits}g}"


def format_lifetime(lifetime: Lifetime) -> str:
    """Formats a lifetime in the same way for the report, the terminal and a fleet's page."""
    period = "".join(f"; {words}, as the aggregator counts" for words in (lifetime.period, lifetime.window) if words)
    return (
        f"epsilon_server {number(lifetime.epsilon_server)} (replace-one {number(lifetime.exchange_server)}) {LIFETIME}"
        f"{describe_since(lifetime.since)}, at delta {number(lifetime.delta)}{period}"
    )


def percent(value: float | None) -> str:
    """Formats an accuracy or share: `87.3 %`."""
    return NOT_MEASURED if value is None else f"{100 * value:.1f}{NARROW}%"


def spread(values: Sequence[float | None]) -> str:
    """Formats the mean of accuracies and their standard deviation: `87.3 % (sd 0.6)`."""
    known = [value for value in values if value is not None]
    if len(known) < 2:
        return percent(known[0] if known else None)
    return f"{percent(fmean(known))} (sd {100 * stdev(known):.1f})"


def percent_up(value: float) -> str:
    """Formats an upper bound, which must not be rounded down; 100 % appears only for an exact 100 %."""
    if value < 0.999:
        return f"{math.ceil(1000 * value) / 10:.1f}{NARROW}%"
    if value >= 1:
        return f"100{NARROW}%"
    nines = min(12, math.ceil(-math.log10(1 - value)))
    return f"{100 * (1 - 10**-nines):.{nines - 2}f}{NARROW}%"


def points(gain: float | None, unit: str = " points") -> str:
    """Formats a difference of accuracies in percentage points, with its sign: `+3.2 points`."""
    if gain is None:
        return NOT_MEASURED
    return f"{round(100 * gain, 1) + 0.0:+.1f}".replace("-", MINUS).replace("+0.0", "0.0") + unit


def gained(gain: Gain | None, unit: str = " points") -> str:
    """Formats a gain with its standard error: `+3.2 ± 0.4 points`."""
    if gain is None or gain.standard_error is None:
        return points(None if gain is None else gain.mean, unit)
    return f"{points(gain.mean, '')} ± {100 * gain.standard_error:.1f}{unit}"


def evaluated(row: EvaluationRow) -> str:
    """Says who measured a gain, and the accuracies that it comes from; without a full stop."""
    own, alone, shared, gaining = map(_with_error, (row.own, row.alone, row.shared, row.gaining))
    return (
        f"by noised answers of {row.devices} boards after round {row.round}, on samples that never train: {own} right "
        f"with their personalized heads, {alone} with heads trained alone, {shared} with the shared model; {gaining} "
        "of the boards gain (the truth is within each ± in 19 of 20 cases)"
    )


def statistic_lines(found: StatisticRow) -> list[str]:
    """Returns a line for each value: `leaf   412 ± 38`."""
    width = max(map(len, found.names))
    shares = found.kind == "histogram"
    said = [_with_error(each) if shares else f"{number(each.value)} ± {number(each.error)}" for each in found.values]
    return [f"{name:{width}}  {each}" for name, each in zip(found.names, said, strict=True)]


def _with_error(found: WithError) -> str:
    return f"{100 * found.value:.1f} ± {100 * found.error:.1f}{NARROW}%"


def size(count: float | None) -> str:
    """Formats bytes in decimal units: `1.2 MB`."""
    if count is None:
        return NOT_MEASURED
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= 0.9995 * scale:
            amount = count / scale
            return (f"{amount:,.0f}" if amount >= 100 else f"{amount:.3g}") + NARROW + unit
    return f"{count:.0f}{NARROW}B"


def ago(at: float | None, now: float) -> str:
    """Formats the time since a moment: `3 min ago`."""
    if at is None:
        return "never"
    passed = max(0.0, now - at)
    unit, unit_s = next((each for each in _UNITS if passed >= each[1]), ("s", 1.0))
    return f"{passed / unit_s:.0f} {unit} ago"


def format_seconds(seconds: float) -> str:
    """Formats a duration: `2.5 h`, `34.0 s`."""
    unit, unit_s = next((each for each in _UNITS if seconds >= 2 * each[1]), ("s", 1.0))
    return f"{seconds:.2g} s" if seconds < 1 else f"{seconds / unit_s:.1f} {unit}"


def from_to(values: list[int]) -> str:
    """Formats the range of values: `160`, or `100 to 200`."""
    if not values:
        return "none"
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def codec(wire: WireInfo) -> str:
    """Describes the encoding of updates: `quantized, step 0.5 of the noise`."""
    if wire.step is None:
        return wire.codec
    unit = "the noise" if wire.step_unit == "noise" else "a layer's root mean square"
    return f"{wire.codec}, step {number(wire.step)} of {unit}"


def repeating(command: str) -> str:
    """Returns the command that runs it again without `--out`, because the old output folder is in use."""
    words = shlex.split(command)
    if words[:1] != ["hushfleet"]:
        return command
    return shlex.join(
        word
        for before, word in pairwise(["", *words])
        if before != "--out" and word != "--out" and not word.startswith("--out=")
    )
