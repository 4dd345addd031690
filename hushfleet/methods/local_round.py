"""Runs a device's part of a round, up to the trained vector: one loop, for one client as `[d]` or many as `[c, d]`.

`LocalRound` is the round of one device: it begins, trains and ends. A board and a cohort on an accelerator differ only
in the executor: it draws the batches, computes their gradients and moves the vector.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import EllipsisType
from typing import Any, NamedTuple, Protocol

import numpy as np

from hushfleet import array_api
from hushfleet.array_api import Array
from hushfleet.errors import GraphRefused
from hushfleet.learning.batch import Batch, ClientBatch, Descent, NoisedBatch
from hushfleet.learning.draws import Inputs, drawn_batches, drawn_inputs, epochs
from hushfleet.learning.entries import ALL, Entries
from hushfleet.learning.optim import Optimizer, decay_weights, make_optimizer
from hushfleet.learning.own_samples import HiddenSamples, LoadedSamples, OwnSamples, distillation_inputs
from hushfleet.methods.cost import RoundTerms
from hushfleet.methods.local import GradientRule, Pull, Sgd
from hushfleet.methods.method import TrainingConfig
from hushfleet.methods.state import DeviceState, PrivateArrays, RoundContext
from hushfleet.methods.task_method import TaskMethod
from hushfleet.privacy.noise import NoiseSource
from hushfleet.privacy.record import RecordMechanism

MakeOptimizer = Callable[[str, float, float], Optimizer]


class Trained(NamedTuple):
    """A device after its local training, before anything is released.

    :param context: of the round, with the measured accuracy and loss.
    :param end: float32 `[d]`, the shared model after training.
    :param own: float32 `[d]`, the device's personalized model; `end` itself, unless the method trains a second model.
    :param loss: mean training loss per sample.
    :param step: in a sum over records, float32 `[d]`: `OneClient.step`.
    :param failures: with the unit `record`, reasons for what was left out: the first record without a gradient, the own
        model. Nothing that is sent may depend on them.
    :param former: the device's personalized model at the start of the round, also if the round could not see it.
    """

    context: RoundContext
    end: np.ndarray
    own: np.ndarray
    loss: float
    step: np.ndarray | None = None
    failures: Sequence[str] = ()
    former: np.ndarray | None = None

    @property
    def update(self) -> np.ndarray:
        """The change by training, float32 `[d]`."""
        change: np.ndarray = self.end - self.context.start if self.step is None else self.step
        return change

    def without_training(self) -> Trained:
        """Returns the device as if it had not trained in this round."""
        context, begin = self.context, self.context.global_params
        own = begin if self.former is None else self.former
        context = replace(context, start=begin, remembered=context.state.private)
        return Trained(context, begin, own, self.loss, np.zeros_like(begin))


class LocalRound:
    """One device's round up to the release.

    :param state: the device's state from its last round.
    :param published: float32 `[published_size]`, as `TaskMethod.split` takes it; read-only.
    :param samples: the device's own samples. With the unit `record` the method's choices do not see them.
    :param number: the round's number among the rounds that train, from 1 on.
    """

    def __init__(
        self,
        method: TaskMethod,
        state: DeviceState,
        published: Array,
        terms: RoundTerms,
        samples: OwnSamples,
        number: int = 1,
    ) -> None:
        self.method, self.state, self.samples = method, state, samples
        self.config = method.config_in(number)
        self.record = method.record_mechanism(terms)
        seen = replace(state, own=None) if method.personalized_model_has_no_noise else state
        visible: Any = samples if self.record is None else HiddenSamples()
        (global_params, vectors), personal, layout = method.split(published), method.parts.personal, method.layout
        chosen = personal.choose(seen, global_params, visible, layout)
        start, learned = personal.begin(seen, global_params, chosen, visible, layout)
        setting = method.setting(terms)
        self.context = RoundContext(setting, seen, global_params, start, chosen, remembered=learned, vectors=vectors)

    def train(self, **how: Any) -> Trained:
        """Trains on samples in memory (`LoadedSamples`): the shared model, then the own one if the method has two.

        :param how: `inputs`, `rng`, `noise`, and the other parameters of `OneClient`.
        """
        training, second = self.method.training, self.method.parts.own_training
        client = OneClient(self, training, record=self.record, **how)
        end = self.context.start.copy()
        own, remembered = client.train(end)
        if second is not None:
            begin = self.context.global_params if self.state.own is None else self.state.own
            own = begin.copy()
            try:
                OneClient(self, second, **how).train(own)
            except GraphRefused as error:
                if self.record is None:
                    raise
                own = begin
                client.failures.append(str(error))  # it stays unchanged; what is sent does not depend on it
        return self.ended(end, own, client.loss, remembered, client.step, client.failures)

    def ended(self, end: np.ndarray, own: np.ndarray, loss: float, remembered: PrivateArrays, *rest: Any) -> Trained:
        """Returns the round after training, with the measured numbers that a report needs.

        :param rest: `step` and `failures` of `Trained`.
        """
        measured = self.samples.evaluate(own) if self.method.parts.evaluates else None
        remembered = {**self.context.remembered, **remembered}
        context = replace(self.context, measured=measured, remembered=remembered)
        return Trained(context, end, own, loss, *rest)._replace(former=self.state.own)


class BatchStep(NamedTuple):
    """One batch of an executor.

    :param rows: the clients that still train: the first rows of every array; `...` for a single client.
    """

    epoch: int
    rows: slice | EllipsisType
    batch: Batch


class Executor(Protocol):
    """The implementation that runs one local training.

    :cvar config: with the learning rate of the round.
    """

    config: TrainingConfig

    def steps(self) -> Iterator[BatchStep]:
        """Draws the batches of the training, in order."""

    def optimizer(self) -> Optimizer:
        """Makes the optimizer of one part."""

    def move(self, optimizer: Optimizer, params: Array, gradient: Array, entries: Entries) -> None:
        """Moves `params [..., d]` by one step, in place, only on `entries`."""

    def count_loss(self, step: BatchStep, loss: Any) -> None:
        """Records a batch's mean loss."""


def train_vector(
    training: Sgd, context: RoundContext, params: Array, executor: Executor
) -> tuple[Array, PrivateArrays]:
    """Trains `params [..., d]` in place; returns the device's personalized model, by default `params` itself, and the
    arrays `[..., n]` to keep for the next round."""
    entries = [Entries.of(mask, context.layout) for mask in training.order.masks(context)]
    optimizers = [executor.optimizer() for _ in entries]
    moved = entries[0] if len(entries) == 1 else ALL  # several parts together are the whole vector
    memory, epoch = _lasting(training, context.state.private), 0
    for step in executor.steps():
        batch, at = step.batch, params[step.rows]
        batch.moved = moved
        now, seen = _first(context, step.rows), {name: array[step.rows] for name, array in memory.items()}
        if training.order.resets and step.epoch > epoch:
            training.order.reset(now, at)
        epoch = step.epoch
        active = training.order.active(step.epoch, len(entries))
        for number in active:
            batch.part, batch.entries = number, entries[number]
            loss, gradient, seen = training.gradient(now, at, batch, seen)
            if number == active[0]:
                executor.count_loss(step, loss)
            training.add_penalties(now, at, gradient)
            decay_weights(executor.config, at, gradient, entries[number])
            executor.move(optimizers[number], at, gradient, entries[number])
        memory = seen if step.rows is ... else {name: _joined(memory.get(name), seen[name]) for name in seen}
    return training.gradient.own_model(params, memory), _lasting(training, memory)


def _joined(before: Array | None, first: Array) -> Array:
    """Returns the array of the clients that still train, and after it the rows of those that do not."""
    if before is None or len(before) == len(first) or before.shape[1:] != first.shape[1:]:
        return first
    return array_api.array_namespace(first).concat((first, before[len(first) :]))


def _lasting(training: Sgd, arrays: PrivateArrays) -> PrivateArrays:
    return {name: arrays[name] for name in training.gradient.lasting if name in arrays}


def _first(context: RoundContext, rows: slice | EllipsisType) -> RoundContext:
    return context if rows is Ellipsis else context.map(lambda array: array[rows])


@dataclass
class OneClient:
    """The executor of a board, and of a worker process.

    :param round: the round of one device, with its samples in memory.
    :param rng: draws the order of the samples or the samples of a batch, the augmentation and the dropout masks.
    :param noise: the source of the gradients' noise with `record`.
    :param record: how gradients get noise with the unit `record`; None for a personalized model, which is never sent.
    :param make_optimizer: for an implementation that gives the same bits faster.
    :param step: in secure aggregation over records, the movement by the only batch. The difference of two models would
        have the models' rounding errors, and with small steps one record could move it by many times its bound.
    """

    round: LocalRound
    training: Sgd
    inputs: Inputs
    rng: np.random.Generator
    noise: NoiseSource | None = None
    record: RecordMechanism | None = None
    make_optimizer: MakeOptimizer = make_optimizer
    step: np.ndarray | None = None
    loss_sum: float = 0.0
    seen: int = 0
    scratch: dict[str, np.ndarray] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        assert isinstance(self.round.samples, LoadedSamples)
        self.samples, self.gradient = self.training.inputs(self.round.samples.samples), self.round.samples.gradient_of
        self.config = self.round.config
        self.teacher = self.training.teacher(self.round.context, self.round.samples)

    def train(self, params: np.ndarray) -> tuple[np.ndarray, PrivateArrays]:
        """Does `train_vector` for `params [d]`, in one call if the runtime can do so: it gives the same bits."""
        if not self.in_one_call:
            return train_vector(self.training, self.round.context, params, self)
        descent = self.descent()
        if descent.batches:
            self.loss_sum += float(self.gradient.descend([descent], params[None])[0])  # type: ignore[attr-defined]
            self.seen += sum(map(len, descent.batches))
        return params, {}

    @property
    def in_one_call(self) -> bool:
        """Whether all steps are plain: nothing has to be computed between two gradients but pulls and the step."""
        training, inputs = self.training, self.inputs
        return (
            hasattr(self.gradient, "descend")
            and self.record is None
            and self.samples.targets.are_classes
            and inputs.augment == "none"
            and not inputs.dropout
            and training.distillation is None
            and type(training.gradient) is GradientRule
            and all(type(penalty) is Pull for penalty in training.penalties)
            and not training.order.resets
            and not self.config.weight_decay
            and self.config.accumulate == 1
        )

    def descent(self) -> Descent:
        """Draws the batches of a training `in_one_call`."""
        training, context, config = self.training, self.round.context, self.config
        parts = [Entries.of(mask, context.layout) for mask in training.order.masks(context)]
        drawn = [(indices, training.order.active(epoch, len(parts))) for epoch, indices in self._drawn()]
        pulls = [penalty.weight for penalty in training.penalties if isinstance(penalty, Pull) and penalty.weight]
        return Descent(
            self.samples,
            [indices for indices, active in drawn if active],
            [active for _, active in drawn if active],
            parts,
            (config.optimizer, config.learning_rate, config.momentum),
            pulls,
            context.global_params,
        )

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

    def count_loss(self, step: BatchStep, loss: float) -> None:
        count = int(step.batch.sizes)
        self.loss_sum += loss * count
        self.seen += count

    @property
    def loss(self) -> float:
        """Mean training loss per sample."""
        return self.loss_sum / max(self.seen, 1)

    def steps(self) -> Iterator[BatchStep]:
        out = np.empty(self.round.method.layout.size, np.float32)
        for epoch, indices in self._drawn():
            yield BatchStep(epoch, ..., self._batch(indices, out))

    def _drawn(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yields the epoch of each batch, and the places of its samples."""
        count = len(self.samples)
        for epoch, batches in enumerate(epochs(count, self.config, self.record)):
            for indices in drawn_batches(count, self.config.step_size, batches, self.record, self.rng):
                yield epoch, indices

    def _batch(self, indices: np.ndarray, out: np.ndarray) -> Batch:
        x, masks = drawn_inputs(self.samples, indices, self.inputs, self.rng)
        y = self.samples.targets.learned(self.samples.labels[indices], x)
        learned = distillation_inputs(self.teacher, indices) if self.training.objective.distills else {}
        batch = ClientBatch(self.gradient, x, y, masks, learned, out, self.scratch, self.failures)
        if self.record is None:
            batch.at_once = self.config.batch_size
            return batch
        assert self.noise is not None
        batch.subsets = self.record.subsets(len(y), self.rng)
        total = self.scratch.setdefault("total", np.empty(out.shape, np.float64))
        return NoisedBatch(batch, [self.record], [self.noise], total)
