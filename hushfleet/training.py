"""Local training: the loop that a board, a worker process and a vmapped cohort run alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from hushfleet.data.samples import Samples
from hushfleet.methods.base import Array, DeviceState, Method
from hushfleet.optim import Optimizer, make_optimizer
from hushfleet.spec import DropoutSpec

OnBatch = Callable[[int, int], None]
MakeOptimizer = Callable[[str, float], Optimizer]


class GradientFunction(Protocol):
    """The only place where a network is met: flat parameters and a batch give a loss and its flat gradient."""

    def __call__(
        self, params: Array, x: Any, y: Any, dropout: Sequence[Any] = (), out: Array | None = None
    ) -> tuple[float, Array]: ...


def train_locally(
    method: Method,
    state: DeviceState,
    start: Array,
    gradient: GradientFunction,
    samples: Samples,
    *,
    dropout: Sequence[DropoutSpec],
    rng: np.random.Generator,
    on_batch: OnBatch | None = None,
    make_optimizer: MakeOptimizer = make_optimizer,
) -> tuple[Array, float]:
    """Trains from `start [d]`, which is left as it is, for the method's number of epochs.

    :param rng: draws the order of the samples and the dropout masks.
    :param on_batch: called before each batch with (batches done, batches in all); may raise to give up.
    :param make_optimizer: for an implementation that gives the same bits faster.
    :return: the trained vector and the mean loss per sample.
    """
    config = method.config
    passes = [
        (part, make_optimizer(config.optimizer, config.learning_rate)) for part in method.passes(state)
    ]
    params, buffer = start.copy(), np.empty_like(start)
    batches_per_epoch = -(-len(samples) // config.batch_size)
    total, done, loss_sum = batches_per_epoch * config.local_epochs, 0, 0.0
    for _ in range(config.local_epochs):
        for indices in shuffled_batches(len(samples), config.batch_size, rng):
            if on_batch:
                on_batch(done, total)
            batch = samples.take(indices)
            masks = draw_dropout(dropout, len(indices), rng)
            losses = []
            for part, optimizer in passes:
                loss, grad = gradient(params, batch.x, batch.y, masks, out=buffer)
                losses.append(loss)
                method.local_gradient(state, start, params, grad)
                if part is not None:
                    grad *= part
                optimizer.step(params, grad)
            loss_sum += losses[0] * len(indices)
            done += 1
    return params, loss_sum / (len(samples) * config.local_epochs)


def shuffled_batches(count: int, batch_size: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """One epoch's index batches; the last may be smaller."""
    order = rng.permutation(count)
    for first in range(0, count, batch_size):
        yield order[first : first + batch_size]


def draw_dropout(
    dropout: Sequence[DropoutSpec], batch: int, rng: np.random.Generator
) -> tuple[np.ndarray, ...]:
    """Masks float32 `[batch, *shape]` of 0 and 1/(1 - rate), the same for every runtime."""
    return tuple(
        (rng.random((batch, *spec.shape), dtype=np.float32) >= spec.rate).astype(np.float32)
        / np.float32(1 - spec.rate)
        for spec in dropout
    )
