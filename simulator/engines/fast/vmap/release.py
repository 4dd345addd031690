"""Releases a group's updates where they were trained: clip, noise, grid, dither, quantise and add, as arrays `[c, d]`.

The host gets one exact sum, and for each client a few numbers: squares and peaks of its layers. Every operation is one
of IEEE 754, or a sum in the order of the device's own code, so that each client's values have the bits that
`TaskMethod.privatize`, the codec and `ExactSum` give it alone. A client that they would refuse adds nothing here and is
marked: its own code then says why.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hushfleet.aggregator.payloads.decoding import MAX_MAGNITUDE
from hushfleet.aggregator.payloads.exact_sum import SCALE_BITS
from hushfleet.array_api import BLOCK
from hushfleet.params import ParamLayout
from hushfleet.privacy.clipping import clip_factors
from hushfleet.privacy.noise import SeededNoise, add_on_grid
from hushfleet.simulator.engines.fast.vmap import philox
from hushfleet.simulator.engines.fast.vmap.memory import free_bytes
from hushfleet.simulator.engines.fast.vmap.pairwise import row_sums, squares
from hushfleet.wire.format.symbols import MAX_LEVEL

PIECE_BYTES = {"cpu": 1 << 26, "cuda": 1 << 31}
_VALUE_BYTES = 64  # of a client's value at the peak: the noise, its dither with the words, and copies of either


@dataclass(frozen=True)
class ReleaseTerms:
    """The numbers that a client's update is released with; its data do not change them.

    :param bounds: clip norm of each layer, float64 `[L]`, or of the whole, `[1]`; inf: not clipped.
    :param stds: of each layer's noise, float64 `[L]`; 0: no noise.
    :param steps: of each layer, float32 `[L]`; None: the values are sent as they are.
    """

    bounds: np.ndarray
    stds: np.ndarray
    steps: np.ndarray | None
    dither_key: bytes
    noise: SeededNoise


@dataclass(frozen=True)
class ReleasedCohort:
    """A group's released updates.

    :param total: int64 `[k]`, the sum of the sent values times 2^40, without the refused ones.
    :param squares: float64 `[c, L]`, the sum of squares of the values that each client sends.
    :param peaks: float64 `[c, L]`, the largest magnitude among them.
    :param refused: bool `[c]`: a value is not finite or too large, and nothing of this client was added.
    :param levels: float32 `[c, n]`, some of the quantised values, in steps; empty if the values are sent as they are.
    :param sent: float32 `[c, k]` if it was asked for.
    """

    total: Tensor
    squares: np.ndarray
    peaks: np.ndarray
    refused: np.ndarray
    levels: np.ndarray
    sent: np.ndarray | None


def release(
    ends: Tensor,
    starts: Tensor,
    clients: Sequence[ReleaseTerms],
    layout: ParamLayout,
    *,
    personal: Tensor | None = None,
    sampled: Tensor | None = None,
    keeps_sent: bool = False,
) -> ReleasedCohort:
    """Releases the updates `ends - starts`, a few clients at a time.

    :param ends: float32 `[c, d]`.
    :param starts: float32 `[d]` or `[c, d]`.
    :param personal: bool `[d]`, the entries that no client sends; None: all are sent.
    :param sampled: the places of the sample among the sent values, int64 `[n]`.
    """
    spans = [(span.start, span.stop) for span in layout.layers]
    shared = None
    if personal is not None:
        shared = torch.nonzero(~personal)[:, 0]
        counts = [int((~personal[first:last]).sum()) for first, last in spans]
        ends_at = np.cumsum([0, *counts]).tolist()
        spans = list(itertools.pairwise(ends_at))
    total = torch.zeros(spans[-1][1], dtype=torch.int64, device=ends.device)
    most = min(MAX_MAGNITUDE, 2.0 ** (62 - SCALE_BITS) / len(clients))  # the sum of all stays below 2^62
    parts, sent = [], []
    for rows in _pieces(ends):
        some = clients[rows]
        values = ends[rows] - (starts if starts.ndim == 1 else starts[rows])
        if personal is not None:
            values.masked_fill_(personal, 0)
        values, fine = _clipped(values, np.stack([each.bounds for each in some]), layout)
        if shared is not None:
            values = values.index_select(1, shared)
        values, has_room = _noised(values, some, spans)
        values, fits, levels = _quantised(values, some, spans, sampled)
        peaks = torch.stack([_peaks(values[:, first:last]) for first, last in spans], dim=1)
        fine &= has_room & fits & (peaks <= most).all(1)  # False for NaN
        values.masked_fill_(~fine[:, None], 0)
        total += values.double().mul_(2.0**SCALE_BITS).round_().long().sum(0)
        parts.append((_squares(values, spans), peaks.double().cpu().numpy(), ~fine.cpu().numpy(), levels))
        if keeps_sent:
            sent.append(values.cpu().numpy())
    of_layers, largest, refused, found = (np.concatenate(each) for each in zip(*parts, strict=True))
    return ReleasedCohort(total, of_layers, largest, refused, found, np.concatenate(sent) if keeps_sent else None)


def _pieces(ends: Tensor) -> Iterator[slice]:
    clients, size = ends.shape
    room = PIECE_BYTES[ends.device.type]
    if ends.device.type == "cuda":
        room = min(room, free_bytes(ends.device) // 2)
    most = max(1, room // (_VALUE_BYTES * size))
    for first in range(0, clients, most):
        yield slice(first, min(first + most, clients))


def _clipped(values: Tensor, bounds: np.ndarray, layout: ParamLayout) -> tuple[Tensor, Tensor]:
    """Does the same as `hushfleet.privacy.clipping.clip` or `clip_layers`; returns also which rows they accept.

    :param bounds: `[r, L]`, or `[r, 1]` for the whole.
    """
    spans = [(span.start, span.stop) for span in layout.layers] if bounds.shape[1] > 1 else [(0, layout.size)]
    sums = torch.stack([squares(values, first, last) for first, last in spans], dim=1).cpu().numpy()
    norms = np.sqrt(sums)  # PyTorch's root on a processor is not correctly rounded
    factors = torch.from_numpy(clip_factors(norms, bounds).astype(np.float32)).to(values.device)
    for index, (first, last) in enumerate(spans):
        values[:, first:last] *= factors[:, index, None]
    clipped = torch.stack([values[:, first:last].double().square_().sum(1) for first, last in spans], dim=1)
    # A vector within its bound is unchanged; any other is below it by more than another order of the sum could hide.
    limits = torch.from_numpy(np.where(norms <= bounds, np.inf, bounds**2)).to(values.device)
    finite = torch.from_numpy(np.isfinite(norms)).to(values.device)
    return values, (finite & (clipped <= limits)).all(1)


def _noised(values: Tensor, clients: Sequence[ReleaseTerms], spans: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    """Does the same as `GaussianMechanism.add_noise`; returns also which rows fit into float32."""
    if not any(each.stds.any() for each in clients):
        return values, torch.ones(len(values), dtype=torch.bool, device=values.device)
    noise = philox.normals([each.noise for each in clients], values.shape[1], values.device).double()
    stds = torch.from_numpy(np.stack([each.stds for each in clients])).to(values.device)
    for index, (first, last) in enumerate(spans):
        std = stds[:, index, None]
        noise[:, first:last] = add_on_grid(noise[:, first:last] * std, values[:, first:last], std)
    fits = noise.abs().amax(1) <= torch.finfo(torch.float32).max
    return values.copy_(noise), fits


def _quantised(
    values: Tensor, clients: Sequence[ReleaseTerms], spans: Sequence[tuple[int, int]], sampled: Tensor | None
) -> tuple[Tensor, Tensor, np.ndarray]:
    """Does the same as `hushfleet.wire.format.quantized.round_trip`; returns also which rows it accepts, and the sample
    of their levels."""
    fits = torch.ones(len(values), dtype=torch.bool, device=values.device)
    found = [each.steps for each in clients if each.steps is not None]
    if not found:
        return values, fits, np.empty((len(values), 0), np.float32)
    steps = torch.from_numpy(np.stack(found)).to(values.device)
    dither = philox.dither([each.dither_key for each in clients], values.shape[1], values.device)
    for index, (first, last) in enumerate(spans):
        values[:, first:last] /= steps[:, index, None]
    values += dither
    values.round_()
    fits = values.abs().amax(1) <= MAX_LEVEL
    levels = (values[:, :0] if sampled is None else values.index_select(1, sampled)).cpu().numpy()
    values -= dither
    for index, (first, last) in enumerate(spans):
        values[:, first:last] *= steps[:, index, None]
    return values, fits, levels


def _peaks(layer: Tensor) -> Tensor:
    return layer.abs().amax(1) if layer.shape[1] else layer.new_zeros(len(layer))


def _squares(values: Tensor, spans: Sequence[tuple[int, int]]) -> np.ndarray:
    """Returns the sum of squares of each layer, float64 `[r, L]`, as `hushfleet.aggregator.payloads.decoding` does."""
    columns = []
    for first, last in spans:
        count = (last - first) // BLOCK
        rest = first + count * BLOCK
        blocks = values[:, first:rest].double().square_().reshape(len(values) * count, BLOCK)
        sums = row_sums(blocks).view(len(values), count), row_sums(values[:, rest:last].double().square_())[:, None]
        columns.append(torch.cat(sums, dim=1))
    found = torch.cat(columns, dim=1).cpu().numpy()
    ends = np.cumsum([0, *(each.shape[1] for each in columns)]).tolist()
    return np.array([[math.fsum(row[a:b]) for a, b in itertools.pairwise(ends)] for row in found.tolist()])
