"""Trains many clients locally at once: arrays `[c, d]` in one vmapped step, on the processor or on CUDA.

It uses the loop of `hushfleet.methods.local_round` with an executor for many clients, and equals `LocalRound.train`
for each client up to the rounding of float32: the same order of samples, augmentation and dropout masks, each client's
own number of steps, and with the privacy unit `record` each client's own noise. A method's computations on a device's
own data before and after the training are done client by client. The rest of a round (noise, codec, ledger, store)
stays in the device's own code.

Clients of a group are at the same step, but not in the same epoch, because an epoch of many samples has more batches.
If epochs train different parts, a group only contains clients whose epochs end together.

On CUDA a step of a compact network has some hundred launches, each of which takes longer than its arithmetic. So a
group is as large as the memory allows, the passes of a network are recorded and replayed (`replay`), and nothing in the
loop waits for the device: batches are cropped there (`device_data`), losses stay there, the optimizer is one kernel.

On a processor, vmap saves the interpreter's time and costs grouped convolutions and fresh memory: 4 to 5 times faster
than one by one for `digits-cnn` in batches of 10, no faster for `mnist-cnn` in batches of 64.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hushfleet.array_api import Array
from hushfleet.data.samples import LabelledSamples
from hushfleet.errors import BadInput
from hushfleet.learning.batch import Batch, NoisedBatch
from hushfleet.learning.draws import Inputs, epochs
from hushfleet.learning.entries import Entries
from hushfleet.learning.optim import Optimizer
from hushfleet.learning.own_samples import LoadedSamples
from hushfleet.methods.cost import RoundTerms
from hushfleet.methods.local import Sgd
from hushfleet.methods.local_round import BatchStep, LocalRound, Trained, train_vector
from hushfleet.methods.state import DeviceState, PrivateArrays, PublicState, RoundContext
from hushfleet.methods.task_method import TaskMethod
from hushfleet.models.torch_gradient import TorchGradient
from hushfleet.privacy.noise import NoiseSource, SecureNoise
from hushfleet.simulator.engines.fast.vmap.batch import CohortBatch
from hushfleet.simulator.engines.fast.vmap.device_data import GroupBatches, SamplesOnDevice
from hushfleet.simulator.engines.fast.vmap.memory import bytes_per_client, free_bytes, records_at_once
from hushfleet.simulator.engines.fast.vmap.optim import make_cohort_optimizer
from hushfleet.simulator.engines.fast.vmap.replay import ReplayedGradient
from hushfleet.simulator.engines.fast.vmap.streams import LARGE, StreamedGradient

CPU_BUDGET_BYTES = 1 << 30
CUDA_SHARE = 0.8  # of the free memory; the rest is for kernels' scratch space and for fragmentation


@dataclass(frozen=True)
class Member:
    """A client of a round.

    :param state: its state at the start of the round.
    :param rng: draws the order of its samples or the samples of a batch, the augmentation and its dropout masks.
    :param terms: terms of the round.
    :param noise: noise of its gradients, with privacy unit `record`.
    :param number: of the round, as for `LocalRound`; the same for all members.
    """

    state: DeviceState
    samples: LabelledSamples
    rng: np.random.Generator
    terms: RoundTerms = field(default_factory=RoundTerms)
    noise: NoiseSource = field(default_factory=SecureNoise)
    number: int = 1


class Grouping(NamedTuple):
    """The groups of a cohort: number of clients in each, bytes that a client needs, and available bytes."""

    sizes: tuple[int, ...]
    bytes_per_client: int
    budget_bytes: int


class CohortTrainer:
    """Trains cohorts on one device, on which the clients' data stay from round to round.

    :param memory_bytes: memory that a group may use. By default 0.8 of the free memory on CUDA when a cohort starts,
        and 1 GiB on a processor.

    A compact network is trained in float32 without TF32. A large one uses TF32 in its convolutions, PyTorch's default,
    because the authors of the papers with such networks trained this way.
    """

    def __init__(
        self,
        gradient: TorchGradient,
        device: str | torch.device,
        *,
        memory_bytes: int | None = None,
    ) -> None:
        self.gradient = gradient
        self.device = torch.device(device)
        self.memory_bytes = memory_bytes
        self.on_device = SamplesOnDevice(self.device)
        self.replayed: ReplayedGradient | None = None
        self.records_at_once = records_at_once(gradient.layout.size, self.device.type)
        self._is_large = gradient.layout.size >= LARGE
        if self.device.type == "cuda":
            self.replayed = ReplayedGradient(StreamedGradient(gradient) if self._is_large else gradient)
        self.grouping: Grouping | None = None  # grouping of the last cohort
        self._most_clients = math.inf

    def train(
        self,
        method: TaskMethod,
        members: Sequence[Member],
        published: np.ndarray,
        *,
        inputs: Inputs,
    ) -> list[Trained]:
        """Trains all members locally for a round; returns the results in their order.

        Members that cannot be trained together (private arrays of other shapes, another number of parts) are put into
        separate groups. The method sees one stacked context: `mask`, `own` and `start` `[c, d]`, private arrays
        `[c, ...]`, all on the device.

        :param published: float32, read-only, as for `TaskMethod.split`.
        :raises BadInput: a member has no samples.
        """
        results: dict[int, Trained] = {}
        for indices, group in self.groups(method, members, published, inputs=inputs):
            results.update(zip(indices, group.fetched(), strict=True))
        return [results[index] for index in range(len(members))]

    def groups(
        self,
        method: TaskMethod,
        members: Sequence[Member],
        published: np.ndarray,
        *,
        inputs: Inputs,
    ) -> Iterator[tuple[list[int], TrainedGroup]]:
        """Trains all members as `train` does; yields each group, with its members' numbers, before the next one is
        trained. Its arrays are still on the device."""
        if not members:
            return
        if any(len(member.samples) == 0 for member in members):
            raise BadInput("a device of the cohort has no training samples; give each at least one")
        if method.training.centred:
            members = [replace(each, samples=method.training.inputs(each.samples)) for each in members]
        ready = [self._ready(method, member, member.samples, published) for member in members]
        needed, budget = self._memory(method, ready, inputs)
        pending = deque(self._groups(method, ready, self._fitting(needed, budget)))
        sizes = []
        while pending:
            group = pending.popleft()
            trained = self._attempt(method, [ready[i] for i in group], inputs)
            if trained is None:
                self._most_clients = -(-len(group) // 2)
                first, second = group[: self._most_clients], group[self._most_clients :]
                pending.extendleft((second, first))
            else:
                sizes.append(len(group))
                self.grouping = Grouping(tuple(sizes), needed, budget)
                yield group, trained

    def clients_at_once(self, method: TaskMethod, members: Sequence[Member], *, inputs: Inputs) -> int:
        """Returns how many such clients fit into the memory together now, at least 1."""
        params = self.gradient.model.init(0)
        # One sample each is enough to find how many parts a method trains.
        ready = [self._ready(method, each, each.samples.take(slice(0, 1)), params) for each in members]
        return self._fitting(*self._memory(method, ready, inputs))

    def _ready(self, method: TaskMethod, member: Member, samples: LabelledSamples, published: np.ndarray) -> _Ready:
        own_samples = LoadedSamples(samples, self.gradient, self.gradient.logits)
        begun = LocalRound(method, member.state, published, member.terms, own_samples, member.number)
        if begun.record is not None and begun.record.subset > 1:
            raise BadInput("records that are clipped in subsets train device by device: choose another --runtime")
        return _Ready(member, begun)

    def _memory(self, method: TaskMethod, ready: Sequence[_Ready], inputs: Inputs) -> tuple[int, int]:
        """Returns the bytes that a client needs, and the available bytes."""
        needed = max(
            bytes_per_client(
                self.gradient,
                config=method.config,
                inputs=inputs,
                parts=max(len(training.order.masks(each.round.context)) for each in ready),
                samples=max(len(each.member.samples) for each in ready),
                image_bytes=max(each.member.samples.kept.nbytes for each in ready),
                each=training.gradient.samples,
                second=method.parts.own_training is not None,
                record=ready[0].round.record if noised else None,
                records_at_once=self.records_at_once,
                replayed=self.replayed is not None,
            )
            for training, noised in _trainings(method)
        )
        return needed, self._budget()

    def _fitting(self, needed: int, budget: int) -> int:
        return int(min(max(1, budget // needed), self._most_clients))

    def _groups(self, method: TaskMethod, ready: Sequence[_Ready], most: int) -> list[list[int]]:
        """Returns groups of indices of similar members, most samples first; groups of a kind have nearly one size."""
        if most < len(ready):
            self.on_device.keep_only({each.member.samples for each in ready})
        alike: dict[object, list[int]] = {}
        for index in sorted(range(len(ready)), key=lambda i: -len(ready[i].member.samples)):
            alike.setdefault(_kind(method, ready[index]), []).append(index)
        return [
            part.tolist() for indices in alike.values() for part in np.array_split(indices, -(-len(indices) // most))
        ]

    def _budget(self) -> int:
        if self.memory_bytes is not None:
            return self.memory_bytes
        if self.replayed is None:
            return CPU_BUDGET_BYTES
        return int(CUDA_SHARE * (free_bytes(self.device) + self.replayed.held_bytes))

    def _attempt(
        self,
        method: TaskMethod,
        group: Sequence[_Ready],
        inputs: Inputs,
    ) -> TrainedGroup | None:
        """Trains a group; if memory runs out, returns None and restores the generators."""
        generators = [each.member.rng.bit_generator.state for each in group]
        # The state of a noise source cannot be restored, so all attempts except the last one draw from copies.
        tried = group if len(group) == 1 else [each.with_noise(deepcopy(each.member.noise)) for each in group]
        try:
            return self._train_group(method, tried, inputs)
        except torch.OutOfMemoryError:
            if len(group) == 1:
                raise
        for each, state in zip(group, generators, strict=True):
            each.member.rng.bit_generator.state = state
        if self.replayed is not None:
            self.replayed.forget()
            torch.cuda.empty_cache()
        return None

    def _train_group(
        self,
        method: TaskMethod,
        group: Sequence[_Ready],
        inputs: Inputs,
    ) -> TrainedGroup:
        """Does the same as `LocalRound.train`."""
        if self.replayed is not None:
            self.replayed.begin()
        context = self._stacked([each.round.context for each in group], reads_own=method.parts.reads_own)
        with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=self._is_large):
            shared = _ManyClients(self, method, method.training, group, inputs, noised=method.by_record)
            end = context.start.clone()
            own, remembered = train_vector(method.training, context, end, shared)
            if method.parts.own_training is not None:
                kept = [each.member.state.own for each in group]
                begin = context.global_params.expand_as(end) if kept[0] is None else self._upload(kept)
                own = begin.clone()
                second = method.parts.own_training
                train_vector(second, context, own, _ManyClients(self, method, second, group, inputs))
        return TrainedGroup([each.round for each in group], context, end, own, shared.losses, remembered)

    def _stacked(self, contexts: Sequence[RoundContext], *, reads_own: bool) -> RoundContext:
        """Returns one context of all clients, on the device: arrays `[c, d]`, and views of one vector where all clients
        have the same."""
        states, first = [context.state for context in contexts], contexts[0]
        global_params = self._copied(first.global_params)
        masks = [state.public.mask for state in states]
        if all(mask is masks[0] or np.array_equal(mask, masks[0]) for mask in masks):
            masks = [masks[0]] * len(masks)
        own = [state.own for state in states] if reads_own and first.state.own is not None else None
        starts = [context.start for context in contexts]
        at_global = all(start is first.global_params for start in starts)
        private = {name: self._upload([state.private[name] for state in states]) for name in first.state.private}
        return replace(
            first,
            state=DeviceState(
                PublicState(self._upload(masks), 0),  # the number of participations is not used in training
                None if own is None else self._upload(own),
                private,
            ),
            global_params=global_params,
            start=global_params.expand(len(states), -1) if at_global else self._upload(starts),
            chosen=None if first.chosen is None else self._upload([context.chosen for context in contexts]),
            vectors={name: self._copied(vector) for name, vector in first.vectors.items()},
        )

    def _copied(self, array: Array) -> Tensor:
        return torch.from_numpy(array.copy()).to(self.device)

    def _upload(self, arrays: Sequence[Array]) -> Tensor:
        """Returns the arrays as one, with a leading axis; the same array is copied once."""
        first = arrays[0]
        if all(array is first for array in arrays):
            return self._copied(np.asarray(first)).expand(len(arrays), *np.shape(first))
        return torch.from_numpy(np.stack(arrays)).to(self.device)


@dataclass(frozen=True)
class TrainedGroup:
    """Clients after their training; the arrays are on the device, `[c, d]`, until a client's are fetched.

    :param rounds: the round of each client.
    :param context: of all, as the training saw it.
    :param own: the personalized models; `end` itself, unless the method trains a second model.
    :param losses: mean loss per sample, float64 `[c]`.
    :param remembered: private arrays that the training keeps for the next round.
    """

    rounds: Sequence[LocalRound]
    context: RoundContext
    end: Tensor
    own: Tensor
    losses: Tensor
    remembered: PrivateArrays

    @cached_property
    def host_losses(self) -> np.ndarray:
        """The losses on the host."""
        losses: np.ndarray = self.losses.cpu().numpy()
        return losses

    def fetched(self, rows: Sequence[int] | None = None) -> list[Trained]:
        """Returns the results of all clients, or of some, on the host."""
        rows = range(len(self.rounds)) if rows is None else rows
        chosen = torch.tensor(rows, device=self.end.device)
        ends = self.end[chosen].cpu().numpy()
        owns = ends if self.own is self.end else self.own[chosen].cpu().numpy()
        lasting = {name: array[chosen].cpu().numpy() for name, array in self.remembered.items()}
        results = []
        for place, row in enumerate(rows):
            remembered = {name: array[place] for name, array in lasting.items()}
            loss = float(self.host_losses[row])
            results.append(self.rounds[row].ended(ends[place], owns[place], loss, remembered))
        return results


class _Ready(NamedTuple):
    """A member at the start of its round."""

    member: Member
    round: LocalRound

    def with_noise(self, noise: NoiseSource) -> _Ready:
        return self._replace(member=replace(self.member, noise=noise))


class _ManyClients:
    """The executor of a group's clients, as `hushfleet.methods.local_round.Executor`."""

    def __init__(
        self,
        trainer: CohortTrainer,
        method: TaskMethod,
        training: Sgd,
        group: Sequence[_Ready],
        inputs: Inputs,
        *,
        noised: bool = False,
    ) -> None:
        self._trainer, self._group = trainer, group
        self.config = group[0].round.config
        self._mechanisms = [each.round.record for each in group if each.round.record] if noised else []
        distills = training.objective.distills
        self._batches = GroupBatches(
            [each.member.samples for each in group],
            [each.member.rng for each in group],
            trainer.on_device,
            config=method.config,
            inputs=inputs,
            record=self._mechanisms[0] if self._mechanisms else None,
            teachers=[training.teacher(each.round.context, each.round.samples) for each in group] if distills else (),
        )
        shape, device = (len(group), method.layout.size), trainer.device
        self._out = torch.empty(shape, device=device)
        self._total = torch.empty(shape if self._mechanisms else (0, 0), dtype=torch.float64, device=device)
        self._scratch: dict[str, Tensor] = {}
        self._loss_sums = torch.zeros(len(group), dtype=torch.float64, device=device)
        self._seen = torch.zeros(len(group), dtype=torch.int64, device=device)

    @property
    def losses(self) -> Tensor:
        """Mean loss per sample of each client, float64 `[c]`."""
        return self._loss_sums / self._seen.clamp(min=1)

    def optimizer(self) -> Optimizer:
        return make_cohort_optimizer(self.config)

    def move(self, optimizer: Optimizer, params: Tensor, gradient: Tensor, entries: Entries) -> None:
        if entries.mask is not None:
            gradient *= entries.mask[: len(gradient)]
        optimizer.step(params, gradient)

    def count_loss(self, step: BatchStep, loss: Tensor) -> None:
        self._loss_sums[step.rows] += loss.double() * step.batch.sizes
        self._seen[step.rows] += step.batch.sizes

    def steps(self) -> Iterator[BatchStep]:
        for cohort in self._batches:
            rows = slice(cohort.active)
            gradient = self._trainer.replayed or self._trainer.gradient
            single, at_once = self._trainer.gradient, self._trainer.records_at_once
            batch: Batch = CohortBatch(gradient, single, at_once, cohort, self._out[rows], self._scratch)
            if self._mechanisms:
                noises = [each.member.noise for each in self._group[rows]]
                batch = NoisedBatch(batch, self._mechanisms[rows], noises, self._total[rows])
            yield BatchStep(cohort.epoch, rows, batch)


def _trainings(method: TaskMethod) -> list[tuple[Sgd, bool]]:
    """Returns the trainings of a round, each with True if its gradients are noised."""
    second = method.parts.own_training
    return [(method.training, method.by_record), *([] if second is None else [(second, False)])]


def _kind(method: TaskMethod, ready: _Ready) -> tuple[object, ...]:
    """Returns a member's kind. Within a kind, states can be stacked, and each step trains the same parts."""
    context = ready.round.context
    arrays = sorted((name, np.shape(value)) for name, value in context.state.private.items())
    rhythms = (_rhythm(method, training, ready, noised) for training, noised in _trainings(method))
    has_own = method.parts.reads_own and ready.member.state.own is not None
    return has_own, context.chosen is None, tuple(arrays), *rhythms


def _rhythm(method: TaskMethod, training: Sgd, ready: _Ready, noised: bool) -> tuple[object, ...]:
    record, parts = ready.round.record if noised else None, len(training.order.masks(ready.round.context))
    ends = tuple(epochs(len(ready.member.samples), method.config, record))
    active = {tuple(training.order.active(epoch, parts)) for epoch in range(len(ends))}
    clip_norm = None if record is None else record.clip_norm
    return parts, ends if len(active) > 1 or training.order.resets else None, clip_norm
