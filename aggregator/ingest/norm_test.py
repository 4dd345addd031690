"""Holds an update's values to what its bound and its noise give: neither without its noise nor with more does it pass.

An honest layer is v = u + n + e: a signal of norm at most the bound C that the noise was scaled to, Gaussian noise of
standard deviation s on each of k values, and the codec's error. Given u + e, |v|^2 / s^2 is a noncentral chi-square
variable of k degrees and noncentrality L = |u + e|^2 / s^2, for which (Birgé 2001, Lemma 8.1; Laurent and Massart 2000)

    P(X >= k + L + 2 sqrt((k + 2 L) x) + 2 x) <= exp(-x)    P(X <= k + L - 2 sqrt((k + 2 L) x)) <= exp(-x)

The quantiser's error is uniform within a step and independent of the values (`codec`), so Hoeffding's
inequality bounds |e|^2 and <u, e>. All tests of one update together refuse an honest one with a probability of at most
`FALSE_REFUSAL`.

What this cannot find: a liar whose update has the norm of the noise, s sqrt(k), and all of it in a direction of its
own. Against it there is only an aggregation that does not follow single updates (`[round] aggregation`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from hushfleet.aggregator.ingest.decoding import Decoded, Refusal
from hushfleet.model.params import LayerSpan
from hushfleet.wire.format.update import UpdateHeader

FALSE_REFUSAL = 1e-9
"""The probability with which an honest update is refused in a round, whatever the network and the codec."""

# What float32 arithmetic may make of a norm, in parts of it; and what the grid of the noise may, 2^-9 deviations
# (`hushfleet.privacy.grid`), in deviations: an error along the update's direction, by Hoeffding's inequality.
_FLOAT32, _GRID = 1e-5, 1e-2
# What rounding to float16 may make of a value, relative and absolute.
_FLOAT16, _FLOAT16_LEAST = 2.0**-11, 2.0**-25
_EVENTS = 7  # that may fail in a layer: two tails of X, two of |e|^2, two of <u, e>, and the largest value


class Limits(NamedTuple):
    """Of a squared norm, in units of the noise's variance."""

    least: float
    most: float


def exponent(layers: int) -> float:
    """x, with which exp(-x) is what each event of an update of so many layers, and of the whole, may fail with."""
    return math.log(_EVENTS * (layers + 1) / FALSE_REFUSAL)


def square_limits(counts: Sequence[int], ratios: Sequence[float], signal: float, *, x: float) -> Limits:
    """Of one layer, or of several together whose values were divided by their own noise's deviation.

    :param counts: how many values each has.
    :param ratios: the quantisation step of each over its noise's standard deviation; 0 without quantisation.
    :param signal: the most that the norm of the signal can be, in the same units.
    """
    k = sum(counts)
    error = math.fsum(count * ratio**2 / 12 for count, ratio in zip(counts, ratios, strict=True))
    spread = math.sqrt(x / 2 * math.fsum(count * ratio**4 / 16 for count, ratio in zip(counts, ratios, strict=True)))
    cross = 2 * max(ratios) * math.sqrt(x / 2)
    most = signal * signal + cross * signal + error + spread  # not `**`, which raises where this is inf
    inward = min(signal, cross / 2)  # the signal that takes most of the error's square
    least = max(0.0, inward * (inward - cross) + error - spread)
    return Limits(
        max(0.0, k + least - 2 * math.sqrt((k + 2 * least) * x)), k + most + 2 * math.sqrt((k + 2 * most) * x) + 2 * x
    )


def value_limit(count: int, ratio: float, signal: float, *, x: float) -> float:
    """The most that one value of a layer can be, in units of the noise's standard deviation."""
    return signal + math.sqrt(2 * (x + math.log(2 * max(count, 1)))) + ratio / 2


def check_noised(
    header: UpdateHeader, decoded: Decoded, counts: Sequence[int], *, reach: float, layers: Sequence[LayerSpan]
) -> None:
    """Of an update that carries noise of its own: each layer, its largest value, and all of it. Raises `Refusal`.

    :param counts: how many values each layer has.
    :param reach: the most that the norm of the whole signal can be, each layer's divided by its noise's deviation.
    """
    if header.codec == "one-bit":
        return  # all such updates have the norm that the header's magnitudes say
    stds = header.noise_stds
    ratios = [step / std for step, std in zip(header.steps or (0.0,) * len(stds), stds, strict=True)]
    x = exponent(len(stds))
    for span, square, peak, k, std, bound, ratio in zip(
        layers, decoded.squares, decoded.peaks, counts, stds, header.clip_norms, ratios, strict=True
    ):
        signal = min(bound / std, reach)
        limits = square_limits((k,), (ratio,), signal, x=x)
        _check(header, f"layer {span.name}", math.sqrt(square) / std, limits, rounded=k, std=std)
        most = value_limit(k, ratio, signal, x=x)
        if peak > std * most * (1 + _FLOAT32 + _FLOAT16):
            reason = f"a value of layer {span.name} is {peak:g}; its bound and noise allow {std * most:g}"
            raise Refusal("out-of-bounds", reason)
    heard = math.fsum(square / std / std for square, std in zip(decoded.squares, stds, strict=True))
    whole = square_limits(counts, ratios, reach, x=x)
    _check(header, "the update", math.sqrt(heard), whole, rounded=sum(counts), std=min(stds))


def check_bounded(
    header: UpdateHeader,
    decoded: Decoded,
    *,
    bound: float,
    largest: float,
    rounding: float,
    layers: Sequence[LayerSpan],
) -> None:
    """Of an update without noise of its own. Raises `Refusal`.

    :param bound: on the norm of all of it; the header has those of the layers; inf is none.
    :param largest: the most that a value can be; inf is no bound.
    :param rounding: the most that the codec adds to a norm or a value, as a part of it.
    """
    slack = 1 + _FLOAT32 + _FLOAT16 + rounding
    for span, square, declared in zip(layers, decoded.squares, header.clip_norms, strict=True):
        if math.sqrt(square) > declared * slack:
            reason = f"layer {span.name} has norm {math.sqrt(square):g}; it is clipped to {declared:g}"
            raise Refusal("out-of-bounds", reason)
    norm = math.sqrt(math.fsum(decoded.squares))
    if norm > bound * slack:
        raise Refusal("out-of-bounds", f"the update has norm {norm:g}; it is clipped to {bound:g}")
    if decoded.largest > largest * slack:
        reason = f"a value of {decoded.largest:g} is more than the task's training can reach, {largest:g}"
        raise Refusal("out-of-bounds", reason)


def _check(header: UpdateHeader, what: str, norm: float, limits: Limits, *, rounded: int, std: float) -> None:
    """:param norm: in units of the noise.
    :param rounded: how many values.
    :param std: the least noise among them.
    """
    relative, absolute = _FLOAT32, _GRID
    if header.codec == "float16":
        relative, absolute = relative + _FLOAT16, absolute + _FLOAT16_LEAST * math.sqrt(rounded) / std
    least = math.sqrt(limits.least) * (1 - relative) - absolute
    most = math.sqrt(limits.most) * (1 + relative) + absolute
    if norm < least:
        raise Refusal("below-noise", f"{what} is quieter than its declared noise: norm {norm:g} of at least {least:g}")
    if norm > most:
        reason = f"{what} has norm {norm:g} in units of its noise; its bound and noise allow {most:g}"
        raise Refusal("out-of-bounds", reason)
