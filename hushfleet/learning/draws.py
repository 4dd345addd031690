"""Draws random batches and their transformations; each loop with an equal generator draws the same values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from hushfleet.data.augment import flip_crop
from hushfleet.data.samples import LabelledSamples
from hushfleet.privacy.record import RecordMechanism
from hushfleet.wire.format.spec import Augment, DropoutSpec


@dataclass(frozen=True)
class Inputs:
    """The transformation of each batch before a network sees it.

    :param dropout: the network's masks.
    :param augment: the augmentation of each batch of images.
    """

    dropout: Sequence[DropoutSpec] = ()
    augment: Augment = "none"


def epochs(count: int, config: Any, record: RecordMechanism | None) -> Iterator[int]:
    """Yields the number of batches of each epoch; `local_steps` may shorten the last epoch.

    With the unit `record` the numbers do not depend on the number of samples.
    """
    if record is None and config.local_steps and count:
        whole = -(-count // config.step_size)
        for done in range(0, config.local_steps, whole):
            yield min(whole, config.local_steps - done)
        return
    for epoch in range(config.local_epochs):
        if record is None:
            yield -(-count // config.step_size)
        else:
            yield record.batches * (epoch + 1) // config.local_epochs - record.batches * epoch // config.local_epochs


def samples_trained(count: int, config: Any) -> int:
    """Returns how many samples a device with `count` samples trains on in a round; repeated samples count each time."""
    return sum(min(batches * config.step_size, count) for batches in epochs(count, config, None))


def drawn_batches(
    count: int, batch_size: int, batches: int, record: RecordMechanism | None, rng: np.random.Generator
) -> Iterator[np.ndarray]:
    """Yields one epoch's index batches; with the unit `record` they are Poisson samples."""
    if record is None:
        yield from islice(shuffled_batches(count, batch_size, rng), batches)
    else:
        for _ in range(batches):
            yield record.sample(count, rng)


def shuffled_batches(count: int, batch_size: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Yields one epoch's index batches; the last may be smaller.

    >>> print(*(len(batch) for batch in shuffled_batches(10, 4, np.random.default_rng(0))))
    4 4 2
    """
    order = rng.permutation(count)
    for first in range(0, count, batch_size):
        yield order[first : first + batch_size]


def drawn_inputs(
    samples: LabelledSamples, indices: np.ndarray, inputs: Inputs, rng: np.random.Generator
) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
    """Returns a batch's images after augmentation, and its dropout masks."""
    x = samples.take(indices).x
    if inputs.augment == "flip-crop":
        x = flip_crop(x, rng, fill=-samples.shift)
    return x, draw_dropout(inputs.dropout, len(indices), rng)


def draw_dropout(dropout: Sequence[DropoutSpec], batch: int, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    """Returns masks float32 `[batch, *shape]` of 0 and 1/(1 - rate), the same for every runtime."""
    return tuple(
        (rng.random((batch, *spec.shape), dtype=np.float32) >= spec.rate).astype(np.float32) / np.float32(1 - spec.rate)
        for spec in dropout
    )
