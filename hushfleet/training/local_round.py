"""A device's part of a round, up to the trained vector: one loop, for one client as `[d]` and for many as `[c, d]`.

What differs between a board and a cohort on an accelerator is an executor: it draws the batches, computes their
gradients and moves the vector.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import EllipsisType
from typing import Any, NamedTuple, Protocol

import numpy as np

from hushfleet.array_api import Array
from hushfleet.data.samples import LabelledSamples
from hushfleet.errors import GraphRefused
from hushfleet.methods.local import Sgd
from hushfleet.methods.method import TaskMethod, TrainingConfig
from hushfleet.methods.state import DeviceState, PrivateArrays, RoundContext, RoundTerms
from hushfleet.model.evaluation import LogitsOf
from hushfleet.privacy.noise import NoiseSource
from hushfleet.privacy.record import RecordMechanism
from hushfleet.training.batch import Batch, ClientBatch, GradientFunction, NoisedBatch
from hushfleet.training.draws import Inputs, drawn_batches, drawn_inputs, epochs
from hushfleet.training.entries import ALL, Entries
from hushfleet.training.optim import Optimizer, make_optimizer
from hushfleet.training.own_samples import LoadedSamples, Teacher, distillation_inputs

OnBatch = Callable[[int, int], None]
MakeOptimizer = Callable[[str, float, float], Optimizer]


class Trained(NamedTuple):
    """A device after its local training, before anything is released.

    :param context: of the round, with what was measured.
    :param end: float32 `[d]`, what training of the shared model ended with.
    :param own: float32 `[d]`, the device's own model; `end` itself, unless the method trains a second one.
    :param loss: mean training loss per sample.
    :param step: of a sum over records, float32 `[d]`: `OneClient.step`.
    :param failures: with the unit `record`, why something was left out that nothing else may follow: the first record
        without a gradient, the own model.
    """

    context: RoundContext
    end: np.ndarray
    own: np.ndarray
    loss: float
    step: np.ndarray | None = None
    failures: Sequence[str] = ()

    @property
    def update(self) -> np.ndarray:
        change: np.ndarray = self.end - self.context.start if self.step is None else self.step
        return change

    def forgotten(self) -> Trained:
        """The device as if it had not trained in this round."""
        context, begin = self.context, self.context.global_params
        own = begin if context.state.own is None else context.state.own
        context = replace(context, start=begin, remembered=context.state.private)
        return Trained(context, begin, own, self.loss, np.zeros_like(begin))


class Step(NamedTuple):
    """One batch of an executor.

    :param rows: which clients still train: the first ones of every array, or all of one client.
    """

    epoch: int
    rows: slice | EllipsisType
    batch: Batch


class Executor(Protocol):
    """The machine that runs one local training."""

    def steps(self) -> Iterator[Step]: ...

    def optimizer(self) -> Optimizer: ...

    def move(self, optimizer: Optimizer, params: Array, gradient: Array, entries: Entries) -> None:
        """One step of `params [..., d]`, in place, on `entries` alone."""

    def count_loss(self, step: Step, loss: Any) -> None:
        """Notes a batch's mean loss."""


def train_vector(training: Sgd, context: RoundContext, params: Array, executor: Executor) -> PrivateArrays:
    """Trains `params [..., d]` in place; gives what of it lasts until the next round, arrays `[..., n]`."""
    entries = [Entries.of(mask, context.layout) for mask in training.order.masks(context)]
    optimizers = [executor.optimizer() for _ in entries]
    moved = entries[0] if len(entries) == 1 else ALL  # several parts are the whole vector, together
    memory, epoch = _lasting(training, context.state.private), 0
    for step in executor.steps():
        batch, at = step.batch, params[step.rows]
        batch.moved = moved
        now, memory = _first(context, step.rows), {name: array[step.rows] for name, array in memory.items()}
        if training.order.resets and step.epoch > epoch:
            training.order.reset(now, at)
        epoch = step.epoch
        active = training.order.active(step.epoch, len(entries))
        for number in active:
            batch.part, batch.entries = number, entries[number]
            loss, gradient, memory = training.gradient(now, at, batch, memory)
            if number == active[0]:
                executor.count_loss(step, loss)
            training.add_penalties(now, at, gradient)
            executor.move(optimizers[number], at, gradient, entries[number])
    return _lasting(training, memory)


def _lasting(training: Sgd, arrays: PrivateArrays) -> PrivateArrays:
    return {name: arrays[name] for name in training.gradient.lasting if name in arrays}


def _first(context: RoundContext, rows: slice | EllipsisType) -> RoundContext:
    return context if rows is Ellipsis else context.map(lambda array: array[rows])


@dataclass
class OneClient:
    """The executor of a board, and of a worker process.

    :param rng: draws the order of the samples, or which are in a batch, the augmentation and the dropout masks.
    :param record: of the unit `record`.
    :param noise: of its gradients.
    :param distills: whether the objective takes a teacher.
    :param on_batch: called before each batch with (batches done, batches in all); may raise to give up.
    :param make_optimizer: for an implementation that gives the same bits faster.
    :param step: of a secure sum over records, what the one batch has moved. The difference of two models would be
        rounded as these are, and where steps are small one record could move it by many times its bound.
    """

    config: TrainingConfig
    gradient: GradientFunction
    samples: LabelledSamples
    inputs: Inputs
    rng: np.random.Generator
    size: int
    record: RecordMechanism | None = None
    noise: NoiseSource | None = None
    distills: bool = False
    teacher: Teacher | None = None
    on_batch: OnBatch | None = None
    make_optimizer: MakeOptimizer = make_optimizer
    step: np.ndarray | None = None
    loss_sum: float = 0.0
    seen: int = 0
    scratch: dict[str, np.ndarray] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def optimizer(self) -> Optimizer:
        return self.make_optimizer(self.config.optimizer, self.config.learning_rate, self.config.momentum)

    def move(self, optimizer: Optimizer, params: Array, gradient: Array, entries: Entries) -> None:
        gradient = entries.keep(gradient)
        if self.record is None or not self.record.noise_split:
            optimizer.step(params[entries.span], gradient)
            return
        self.step = np.zeros_like(params)
        optimizer.step(self.step[entries.span], gradient)
        params[entries.span] += self.step[entries.span]

    def count_loss(self, step: Step, loss: float) -> None:
        count = int(step.batch.sizes)
        self.loss_sum += loss * count
        self.seen += count

    @property
    def loss(self) -> float:
        """Mean per sample."""
        return self.loss_sum / max(self.seen, 1)

    def steps(self) -> Iterator[Step]:
        count, out = len(self.samples), np.empty(self.size, np.float32)
        plan, done = list(epochs(count, self.config, self.record)), 0
        for epoch, batches in enumerate(plan):
            for indices in drawn_batches(count, self.config.batch_size, batches, self.record, self.rng):
                if self.on_batch:
                    self.on_batch(done, sum(plan))
                yield Step(epoch, ..., self._batch(indices, out))
                done += 1

    def _batch(self, indices: np.ndarray, out: np.ndarray) -> Batch:
        x, masks = drawn_inputs(self.samples, indices, self.inputs, self.rng)
        y = self.samples.targets.learned(self.samples.labels[indices])
        learned = distillation_inputs(self.teacher, indices) if self.distills else {}
        batch = ClientBatch(self.gradient, x, y, masks, learned, out, self.scratch, self.failures)
        if self.record is None:
            return batch
        assert self.noise is not None
        total = self.scratch.setdefault("total", np.empty_like(out))
        return NoisedBatch(batch, [self.record], [self.noise], total)


def train_locally(
    method: TaskMethod,
    training: Sgd,
    context: RoundContext,
    begin: Array,
    gradient: GradientFunction,
    samples: LabelledSamples,
    *,
    noised: bool = False,
    **how: Any,
) -> tuple[np.ndarray, OneClient, PrivateArrays]:
    """The trained vector `[d]`, its executor, and what lasts; `begin` is left as it is.

    :param noised: whether noise is in the training, with the unit `record`.
    :param how: more fields of `OneClient`.
    """
    record = method.record_mechanism(context.setting.terms) if noised else None
    executor = OneClient(
        method.config, gradient, samples, size=len(begin), record=record, distills=training.objective.distills, **how
    )
    params = begin.copy()
    remembered = train_vector(training, context, params, executor)
    return params, executor, remembered


def train_round(
    method: TaskMethod,
    state: DeviceState,
    published: Array,
    gradient: GradientFunction,
    samples: LabelledSamples,
    *,
    terms: RoundTerms,
    logits_of: LogitsOf,
    **how: Any,
) -> Trained:
    """All that a device does with its data in a round.

    :param published: the global model float32 `[d]`, and the server half's vectors, see `TaskMethod.split`.
    :param how: `inputs`, `rng`, `noise`, and what else `OneClient` takes.
    """
    own_samples = LoadedSamples(samples, gradient, logits_of, by_record=method.by_record)
    context = method.begin(state, published, terms, own_samples)
    teacher = method.training.teacher(context, own_samples)
    at = {"gradient": gradient, "samples": samples, **how}
    end, executor, remembered = train_locally(
        method, method.training, context, context.start, teacher=teacher, noised=method.by_record, **at
    )
    own = end
    if method.parts.own_training is not None:
        own = context.global_params if state.own is None else state.own
        try:
            own, *_ = train_locally(method, method.parts.own_training, context, own, **at)
        except GraphRefused as error:
            if not method.by_record:
                raise
            executor.failures.append(str(error))  # it stays as it was, and what is sent does not follow
    context = replace(method.measured(context, own, own_samples), remembered=remembered)
    return Trained(context, end, own, executor.loss, executor.step, executor.failures)
