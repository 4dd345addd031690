"""Checks the norms of an update's values against its bound and its noise; refuses too small and too large norms.

An honest layer is v = u + n + e: a signal of norm at most the bound C that the noise was scaled to, Gaussian noise of
standard deviation s on each of k values, and the codec's error. Given u + e, |v|^2 / s^2 is a noncentral chi-square
variable of k degrees and noncentrality L = |u + e|^2 / s^2, for which (Birgé 2001, Lemma 8.1; Laurent and Massart 2000)

    P(X >= k + L + 2 sqrt((k + 2 L) x) + 2 x) <= exp(-x)    P(X <= k + L - 2 sqrt((k + 2 L) x)) <= exp(-x)

The quantiser's error is uniform within a step and independent of the values (`codec`), so Hoeffding's
inequality bounds |e|^2 and <u, e>. All checks of one update together refuse an honest one with a probability of at most
`FALSE_REFUSAL`.

The checks cannot detect a malicious update that has the norm of the noise, s sqrt(k), but in a chosen direction. Only
an aggregation that does not follow single updates protects against it (`[round] aggregation`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from hushfleet.aggregator.payloads.checked_update import CheckedUpdate, Refusal
from hushfleet.params import LayerSpan
from hushfleet.wire.format.codecs import codec_of
from hushfleet.wire.format.update import UpdateHeader

FALSE_REFUSAL = 1e-9
"""The probability that an honest update is refused in a round, for any network and codec."""

# The relative error of a norm from float32 arithmetic; and the error from the grid of the noise, 2^-9 deviations
# (`privacy.noise.add_on_grid`), in deviations: an error along the update's direction, by Hoeffding's inequality.
_FLOAT32, _GRID = 1e-5, 1e-2
_ROUNDING = 2.0**-11  # the relative error of a single value in float16, allowed in every codec
_EVENTS = 7  # events that may fail in a layer: two tails of X, two of |e|^2, two of <u, e>, and the largest value


class Limits(NamedTuple):
    """Limits of a squared norm, in units of the noise's variance."""

    least: float
    most: float


def exponent(layers: int) -> float:
    """Returns x: each event of a layer, or of the whole update, may fail with probability exp(-x)."""
    return math.log(_EVENTS * (layers + 1) / FALSE_REFUSAL)


@lru_cache(maxsize=1024)  # the devices of a round mostly declare the same
def square_limits(counts: tuple[int, ...], ratios: tuple[float, ...], signal: float, *, x: float) -> Limits:
    """Returns the limits of one layer, or of several layers together, with values divided by their noise's deviation.

    :param counts: number of values in each layer.
    :param ratios: each layer's quantisation step divided by its noise's standard deviation; 0 without quantisation.
    :param signal: upper bound on the norm of the signal, in the same units.
    """
    k = sum(counts)
    error = math.fsum(count * ratio**2 / 12 for count, ratio in zip(counts, ratios, strict=True))
    spread = math.sqrt(x / 2 * math.fsum(count * ratio**4 / 16 for count, ratio in zip(counts, ratios, strict=True)))
    cross = 2 * max(ratios) * math.sqrt(x / 2)
    most = signal * signal + cross * signal + error + spread  # not `**`, which raises if this is inf
    inward = min(signal, cross / 2)  # the signal that reduces the error's square most
    least = max(0.0, inward * (inward - cross) + error - spread)
    return Limits(
        max(0.0, k + least - 2 * math.sqrt((k + 2 * least) * x)), k + most + 2 * math.sqrt((k + 2 * most) * x) + 2 * x
    )


def value_limit(count: int, ratio: float, signal: float, *, x: float) -> float:
    """Returns the upper limit of one value of a layer, in units of the noise's standard deviation."""
    return signal + math.sqrt(2 * (x + math.log(2 * max(count, 1)))) + ratio / 2


def check_noised(update: CheckedUpdate, *, bound: float, layers: Sequence[LayerSpan]) -> None:
    """Checks an update with noise of its own: each layer, its largest value, and the whole. Raises `Refusal`.

    :param bound: the bound on the norm of the whole signal, with each layer divided by its noise's deviation.
    """
    header, counts = update.header, update.counts
    if not codec_of(header.codec).keeps_norm:
        return  # the header's magnitudes determine the norm of such updates
    stds = header.noise_stds
    ratios = tuple(step / std for step, std in zip(header.steps or (0.0,) * len(stds), stds, strict=True))
    x = exponent(len(stds))
    for span, square, peak, k, std, clip_norm, ratio in zip(
        layers, update.squares, update.peaks, counts, stds, header.clip_norms, ratios, strict=True
    ):
        signal = min(clip_norm / std, bound)
        limits = square_limits((k,), (ratio,), signal, x=x)
        _check(header, f"layer {span.name}", math.sqrt(square) / std, limits, rounded=k, std=std)
        most = value_limit(k, ratio, signal, x=x)
        if peak > std * most * (1 + _FLOAT32 + _ROUNDING):
            reason = f"a value of layer {span.name} is {peak:g}; its bound and noise allow {std * most:g}"
            raise Refusal("out-of-bounds", reason)
    total = math.fsum(square / std / std for square, std in zip(update.squares, stds, strict=True))
    whole = square_limits(counts, ratios, bound, x=x)
    _check(header, "the update", math.sqrt(total), whole, rounded=sum(counts), std=min(stds))


def check_bounded(
    update: CheckedUpdate, *, bound: float, largest: float, rounding: float, layers: Sequence[LayerSpan]
) -> None:
    """Checks an update without noise of its own. Raises `Refusal`.

    :param bound: the bound on the norm of the whole update, inf for none; the header has the bounds of the layers.
    :param largest: upper bound on a value; inf for no bound.
    :param rounding: upper bound on the codec's relative error of a norm or a value.
    """
    slack = 1 + _FLOAT32 + _ROUNDING + rounding
    for span, square, declared in zip(layers, update.squares, update.header.clip_norms, strict=True):
        if math.sqrt(square) > declared * slack:
            reason = f"layer {span.name} has norm {math.sqrt(square):g}; it is clipped to {declared:g}"
            raise Refusal("out-of-bounds", reason)
    norm = math.sqrt(math.fsum(update.squares))
    if norm > bound * slack:
        raise Refusal("out-of-bounds", f"the update has norm {norm:g}; it is clipped to {bound:g}")
    if max(update.peaks) > largest * slack:
        reason = f"a value of {max(update.peaks):g} is more than the task's training can reach, {largest:g}"
        raise Refusal("out-of-bounds", reason)


def _check(header: UpdateHeader, what: str, norm: float, limits: Limits, *, rounded: int, std: float) -> None:
    """Raises `Refusal` if a norm is outside its limits.

    :param norm: the norm in units of the noise.
    :param rounded: number of values.
    :param std: the smallest noise deviation among them.
    """
    relative, absolute = codec_of(header.codec).float_error or (0.0, 0.0)
    relative, absolute = _FLOAT32 + relative, _GRID + absolute * math.sqrt(rounded) / std
    least = math.sqrt(limits.least) * (1 - relative) - absolute
    most = math.sqrt(limits.most) * (1 + relative) + absolute
    if norm < least:
        raise Refusal("below-noise", f"{what} is quieter than its declared noise: norm {norm:g} of at least {least:g}")
    if norm > most:
        reason = f"{what} has norm {norm:g} in units of its noise; its bound and noise allow {most:g}"
        raise Refusal("out-of-bounds", reason)
