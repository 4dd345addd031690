"""Local training: the loop that a board, a worker process and a vmapped cohort run alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple, Protocol

import numpy as np

from hushfleet.data.augment import black, flip_crop
from hushfleet.data.samples import Samples
from hushfleet.errors import PrivacyError
from hushfleet.evaluation import Evaluation, LogitsOf, evaluate
from hushfleet.methods.base import Array, BatchGradient, DeviceState, Method, RoundTerms, Teacher
from hushfleet.optim import Optimizer, make_optimizer
from hushfleet.parts import WHOLE, BoundOf, Part, mean_of_clipped
from hushfleet.privacy.noise import NoiseSource
from hushfleet.privacy.record import RecordMechanism, clipped_sum
from hushfleet.spec import Augment, DropoutSpec

OnBatch = Callable[[int, int], None]
MakeOptimizer = Callable[[str, float, float], Optimizer]

_FISHER_BATCH = 1  # squares of single gradients, one after the other: memory does not grow with the data
_LOGITS_BATCH = 256
_EACH = "each"  # in a batch's memory: rows for single samples' gradients


class GradientFunction(Protocol):
    """The only place where a network is met: flat parameters and a batch give a loss and its flat gradient.

    `teacher` and `distill` are given where the task's objective distils: logits float32 `[B, C]`, and the weight of
    the distillation for each sample, float32 `[B]`.

    Two things are optional. A function with the attribute `takes_part = True` takes a slice `part`, and may leave the
    gradient of other entries at zero. `clipped_sum` sums clipped gradients; see `models.native`.
    """

    def __call__(
        self, params: Array, x: Any, y: Any, dropout: Sequence[Any] = (), out: Array | None = None, **distilled: Any
    ) -> tuple[float, Array]: ...


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


@dataclass(frozen=True)
class Recipe:
    """How a task's devices train, beside the method.

    :param dropout: the network's masks.
    :param augment: what is done to each batch of images.
    """

    dropout: Sequence[DropoutSpec] = ()
    augment: Augment = "none"


class LocalData:
    """The device's samples as `hushfleet.methods.base.OwnData`."""

    def __init__(self, samples: Samples, gradient: GradientFunction, logits_of: LogitsOf) -> None:
        self.samples, self._gradient, self._logits_of = samples, gradient, logits_of

    def squared_gradient(self, params: Array) -> Array:
        total, one = np.zeros_like(params), np.empty_like(params)
        for first in range(0, len(self.samples), _FISHER_BATCH):
            batch = self.samples.take(slice(first, first + _FISHER_BATCH))
            self._gradient(params, batch.x, batch.y, out=one)
            one *= one
            total += one
        total /= len(self.samples)
        return total

    def logits(self, params: Array) -> np.ndarray:
        starts = range(0, len(self.samples), _LOGITS_BATCH)
        return np.concatenate(
            [self._logits_of(params, self.samples.take(slice(i, i + _LOGITS_BATCH)).x) for i in starts]
        )

    def evaluate(self, params: Array) -> Evaluation:
        return evaluate(self._logits_of, params, self.samples)


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
            batch: BatchGradient = _Batch(
                gradient, x, samples.labels[indices], masks, _taught(method, teacher, indices), buffer, memory
            )
            if record is not None:
                batch = _RecordBatch(batch, record, noise)
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


def epochs(count: int, config: Any, record: RecordMechanism | None) -> Iterator[int]:
    """How many batches each epoch has, the last perhaps cut short by `local_steps`.

    With the unit `record` that does not depend on the number of samples.
    """
    if record is None and config.local_steps:
        whole = -(-count // config.batch_size)
        for done in range(0, config.local_steps, whole):
            yield min(whole, config.local_steps - done)
        return
    for epoch in range(config.local_epochs):
        if record is None:
            yield -(-count // config.batch_size)
        else:
            yield record.batches * (epoch + 1) // config.local_epochs - record.batches * epoch // config.local_epochs


def samples_trained(count: int, config: Any) -> int:
    """How many samples a device with `count` of them trains on in a round, each as often as it does."""
    return sum(min(batches * config.batch_size, count) for batches in epochs(count, config, None))


def drawn_batches(
    count: int, batch_size: int, batches: int, record: RecordMechanism | None, rng: np.random.Generator
) -> Iterator[np.ndarray]:
    """One epoch's index batches; with the unit `record` they are Poisson samples."""
    if record is None:
        yield from islice(shuffled_batches(count, batch_size, rng), batches)
    else:
        for _ in range(batches):
            yield record.sample(count, rng)


def shuffled_batches(count: int, batch_size: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """One epoch's index batches; the last may be smaller."""
    order = rng.permutation(count)
    for first in range(0, count, batch_size):
        yield order[first : first + batch_size]


def drawn_inputs(
    samples: Samples, indices: np.ndarray, recipe: Recipe, rng: np.random.Generator
) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
    """A batch's images as they are trained on, and its dropout masks."""
    x = samples.take(indices).x
    if recipe.augment == "flip-crop":
        x = flip_crop(x, rng, fill=black(samples.mean, samples.std))
    return x, draw_dropout(recipe.dropout, len(indices), rng)


def draw_dropout(
    dropout: Sequence[DropoutSpec], batch: int, rng: np.random.Generator
) -> tuple[np.ndarray, ...]:
    """Masks float32 `[batch, *shape]` of 0 and 1/(1 - rate), the same for every runtime."""
    return tuple(
        (rng.random((batch, *spec.shape), dtype=np.float32) >= spec.rate).astype(np.float32)
        / np.float32(1 - spec.rate)
        for spec in dropout
    )


def _taught(method: Method, teacher: Teacher | None, indices: np.ndarray) -> dict[str, np.ndarray]:
    """The arguments that a distilling objective takes; without a teacher it has weight zero."""
    if not method.objective.distills:
        return {}
    if teacher is None:
        return {"teacher": None, "distill": None}
    return {"teacher": teacher.logits[indices], "distill": np.full(len(indices), teacher.weight, np.float32)}


@dataclass
class _Batch:
    """One batch of one client, as `hushfleet.methods.base.BatchGradient`."""

    gradient: GradientFunction
    x: np.ndarray
    y: np.ndarray
    masks: tuple[np.ndarray, ...]
    taught: dict[str, np.ndarray]
    buffer: np.ndarray
    memory: dict[str, Any] = field(default_factory=dict)
    part: Part = WHOLE

    @property
    def sizes(self) -> np.ndarray:
        return np.int64(len(self.y))

    def mean(self, params: Array) -> tuple[float, Array]:
        asked = {"part": self.part.span} if getattr(self.gradient, "takes_part", False) else {}
        return self.gradient(params, self.x, self.y, self.masks, out=self.buffer, **self.taught, **asked)

    def clipped(self, params: Array, bound_of: BoundOf) -> tuple[float, Array]:
        at_once = getattr(self.gradient, "clipped_sum", None)  # of a runtime that never writes single gradients out
        if at_once is None or not self.part.layers:
            losses, each = self.each(params)
            return float(losses.mean()), mean_of_clipped(each, self.sizes, bound_of, self.part, self.buffer)
        how = {"clip_norm": lambda norms: np.asarray(bound_of(norms)).item(), "part": self.part.span, **self.taught}
        losses, _ = at_once(params, self.x, self.y, self.masks, out=self.buffer, **how)
        self.buffer[self.part.span] /= len(self.y)
        return float(losses.mean()), self.buffer

    def each(self, params: Array) -> tuple[Array, Array]:
        rows = self.memory.get(_EACH)
        if rows is None or len(rows) < len(self.y):  # kept, since fresh pages take time
            rows = self.memory[_EACH] = np.empty((len(self.y), len(params)), params.dtype)
        out = rows[: len(self.y)]
        losses = np.array([loss for loss, _ in self.one_by_one(params, out)], np.float32)
        return losses, out

    def one_by_one(self, params: Array, out: Array | None = None) -> Iterator[tuple[float, Array]]:
        """Each sample's loss and gradient, in rows of `out` or in memory that the next one overwrites."""
        for i in range(len(self.y)):
            one = slice(i, i + 1)
            yield self.gradient(
                params,
                self.x[one],
                self.y[one],
                tuple(mask[one] for mask in self.masks),
                out=self.buffer if out is None else out[i],
                **{name: None if rows is None else rows[one] for name, rows in self.taught.items()},
            )


@dataclass
class _RecordBatch:
    """A batch whose mean gradient is DP-SGD's. Raw gradients are not to be had.

    :param part: changes nothing: bound and noise are on the whole gradient.
    """

    batch: _Batch
    record: RecordMechanism
    noise: NoiseSource
    part: Part = WHOLE
    taken: int = 0

    @property
    def memory(self) -> dict[str, Any]:
        return self.batch.memory

    @property
    def sizes(self) -> np.ndarray:
        return self.batch.sizes

    def mean(self, params: Array) -> tuple[float, Array]:
        self.taken += 1
        self.record.check_charged(self.taken)
        loss, total = self._clipped_batch(params) if self.record.clips == "batch" else self._clipped_sum(params)
        return loss, self.record.noised_mean(total, self.noise)

    def _clipped_batch(self, params: Array) -> tuple[float, Array]:
        if not len(self.batch.y):
            return 0.0, np.zeros_like(params)
        loss, mean = self.batch.mean(params)
        return loss, self.record.clipped_batch(mean)

    def _clipped_sum(self, params: Array) -> tuple[float, Array]:
        batch, total = self.batch, np.empty_like(params)
        at_once = getattr(batch.gradient, "clipped_sum", None)
        if at_once is not None:
            bound = self.record.clip_norm
            each, norms = at_once(params, batch.x, batch.y, batch.masks, clip_norm=bound, out=total, **batch.taught)
            if not np.isfinite(norms).all():
                raise PrivacyError("a record's gradient is not finite; training has diverged: lower the learning rate")
            return float(each.mean()) if len(each) else 0.0, total
        losses: list[float] = []

        def gradients() -> Iterator[Array]:
            for loss, gradient in batch.one_by_one(params):
                losses.append(loss)
                yield gradient

        clipped_sum(gradients(), self.record.clip_norm, total)
        return float(np.mean(losses)) if losses else 0.0, total

    def each(self, params: Array) -> tuple[Array, Array]:
        raise TypeError("with privacy unit 'record' a method sees noised gradients only")

    def clipped(self, params: Array, bound_of: BoundOf) -> tuple[float, Array]:
        raise TypeError("with privacy unit 'record' a method sees noised gradients only")
