"""A device's part of a round, up to the trained vector: the loop that a board and a worker process run alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from hushfleet.data.samples import Samples
from hushfleet.methods.base import Array, BatchGradient, DeviceState, Method, RoundTerms, Teacher
from hushfleet.model.evaluation import LogitsOf
from hushfleet.privacy.noise import NoiseSource
from hushfleet.training.batch_gradient import Batch, GradientFunction, RecordBatch
from hushfleet.training.batches import Recipe, drawn_batches, drawn_inputs, epochs
from hushfleet.training.optim import Optimizer, make_optimizer
from hushfleet.training.own_data import LocalData
from hushfleet.training.parts import Part

OnBatch = Callable[[int, int], None]
MakeOptimizer = Callable[[str, float, float], Optimizer]


class Trained(NamedTuple):
    """A device after its local training, before anything is released.

    :param state: what it began with, and what the method measured.
    :param start: float32 `[d]`, what local training began with.
    :param end: float32 `[d]`, what it ended with: their difference is the update.
    :param own: float32 `[d]`, the device's own model; `end` itself, unless the method trains a second one.
    :param loss: mean training loss per sample.
    """

    state: DeviceState
    start: np.ndarray
    end: np.ndarray
    own: np.ndarray
    loss: float


def train_round(
    method: Method,
    state: DeviceState,
    global_params: Array,
    gradient: GradientFunction,
    samples: Samples,
    *,
    terms: RoundTerms,
    logits_of: LogitsOf,
    recipe: Recipe,
    rng: np.random.Generator,
    noise: NoiseSource,
    on_batch: OnBatch | None = None,
    make_optimizer: MakeOptimizer = make_optimizer,
) -> Trained:
    """All that a device does with its data in a round.

    :param rng: draws the order of the samples, or which are in a batch, the augmentation and the dropout masks.
    :param noise: of the gradients, with privacy unit `record`.
    """
    data = LocalData(samples, gradient, logits_of)
    state = method.prepare(state, global_params, data)
    start = method.start(state, global_params)
    teacher = method.teacher(state, data)
    common = {"recipe": recipe, "rng": rng, "terms": terms, "noise": noise, "make_optimizer": make_optimizer}
    end, loss = train_locally(method, state, start, gradient, samples, teacher=teacher, on_batch=on_batch, **common)
    own = end
    companion = method.companion
    if companion is not None:
        begin = companion.start(state, global_params)
        own, _ = train_locally(
            companion, state, begin, gradient, samples, anchor=global_params, on_batch=on_batch, **common
        )
    return Trained(method.measure(state, own, data), start, end, own, loss)


def train_locally(
    method: Method,
    state: DeviceState,
    start: Array,
    gradient: GradientFunction,
    samples: Samples,
    *,
    recipe: Recipe,
    rng: np.random.Generator,
    terms: RoundTerms | None = None,
    noise: NoiseSource | None = None,
    teacher: Teacher | None = None,
    anchor: Array | None = None,
    on_batch: OnBatch | None = None,
    make_optimizer: MakeOptimizer = make_optimizer,
) -> tuple[Array, float]:
    """Trains from `start [d]`, which is left as it is, for the method's epochs or steps.

    :param anchor: what the method's penalties are told as `start`; by default that.
    :param on_batch: called before each batch with (batches done, batches in all); may raise to give up.
    :param make_optimizer: for an implementation that gives the same bits faster.
    :return: the trained vector and the mean loss per sample.
    """
    config = method.config
    anchor = start if anchor is None else anchor
    passes = [
        (Part.of(mask, method.layout), make_optimizer(config.optimizer, config.learning_rate, config.momentum))
        for mask in method.passes(state)
    ]
    record = method.record_mechanism(terms or RoundTerms()) if method.privacy.unit == "record" else None
    params, buffer, memory = start.copy(), np.empty_like(start), {}
    plan = list(epochs(len(samples), config, record))
    total, done, loss_sum, seen = sum(plan), 0, 0.0, 0
    for epoch, batches in enumerate(plan):
        active = method.active_passes(epoch, len(passes))
        for indices in drawn_batches(len(samples), config.batch_size, batches, record, rng):
            if on_batch:
                on_batch(done, total)
            x, masks = drawn_inputs(samples, indices, recipe, rng)
            batch: BatchGradient = Batch(
                gradient, x, samples.labels[indices], masks, _taught(method, teacher, indices), buffer, memory
            )
            if record is not None:
                batch = RecordBatch(batch, record, noise)
            losses = []
            for number in active:
                part, optimizer = passes[number]
                batch.part = part
                loss, grad = method.gradient(state, start, params, batch)
                losses.append(loss)
                method.local_gradient(state, anchor, params, grad)
                optimizer.step(params[part.span], part.keep(grad))
            loss_sum += losses[0] * len(indices)
            seen += len(indices)
            done += 1
    return params, loss_sum / max(seen, 1)


def _taught(method: Method, teacher: Teacher | None, indices: np.ndarray) -> dict[str, np.ndarray]:
    """The arguments that a distilling objective takes; without a teacher it has weight zero."""
    if not method.objective.distills:
        return {}
    if teacher is None:
        return {"teacher": None, "distill": None}
    return {"teacher": teacher.logits[indices], "distill": np.full(len(indices), teacher.weight, np.float32)}
