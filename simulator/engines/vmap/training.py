"""Local training of many clients at once: arrays `[c, d]` in one vmapped step, on the processor or on CUDA.

It equals `train_round`, client by client, up to the rounding of float32: the same methods, the same
order of samples, augmentation and dropout masks, each client's own count of steps, with the privacy unit `record` each
client's own noise. What a method asks of a device's own data before and after the training is answered client by
client. What follows in a round (noise, codec, ledger, store) stays with the device's own code.

Clients of a group are in step, not in the same epoch, since an epoch of many samples has more batches. Where epochs
make different passes, groups are of clients whose epochs end together.

What dominates, on CUDA by counting and not by timing, since none was at hand: a step of `mnist-cnn` under DP-FedAvg is
some hundred operations besides views. For a compact network each is a launch that takes longer than its arithmetic,
so a step's time should hardly grow with the clients until the device is full: a group is as large as the memory
allows. Nothing in the loop waits for the device: batches are cut there (`device_data`), losses stay there, the
optimizer is one kernel. With dropout, drawing the masks on the host comes next. A CUDA graph for each shape of a step
would take the launches away (clients of one size have two shapes, others have many), and so might `torch.compile`
around the whole step; neither is used, as neither could be tested.

On a processor vmap saves the interpreter's time and costs grouped convolutions and fresh memory: 4 to 5 times faster
than one by one for `digits-cnn` in batches of 10, no faster for `mnist-cnn` in batches of 64.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from hushfleet.data.samples import Samples
from hushfleet.errors import BadInput
from hushfleet.methods.base import DeviceState, Method, PublicState, RoundTerms, Teacher
from hushfleet.models.torch_gradient import TorchGradient
from hushfleet.privacy.noise import NoiseSource, SecureNoise
from hushfleet.privacy.record import RecordMechanism
from hushfleet.simulator.engines.vmap.batch import CohortBatch, CohortRecordBatch, first_rows
from hushfleet.simulator.engines.vmap.device_data import GroupBatches, ResidentSamples, step_count
from hushfleet.simulator.engines.vmap.memory import bytes_per_client, what_is_asked
from hushfleet.simulator.engines.vmap.optim import make_cohort_optimizer
from hushfleet.training.batches import Recipe, epochs
from hushfleet.training.local_round import Trained
from hushfleet.training.own_data import LocalData
from hushfleet.training.parts import Part

OnStep = Callable[[int, int], None]
Precision = Literal["float32", "bfloat16"]

CPU_BUDGET_BYTES = 1 << 30
CUDA_SHARE = 0.8  # of what is free; the rest is for kernels' scratch space and for fragments


@dataclass(frozen=True)
class Member:
    """A client of a round.

    :param state: what it begins the round with.
    :param rng: draws the order of its samples, or which are in a batch, the augmentation and its dropout masks.
    :param terms: what the round asks of it.
    :param noise: of its gradients, with privacy unit `record`.
    """

    state: DeviceState
    samples: Samples
    rng: np.random.Generator
    terms: RoundTerms = field(default_factory=RoundTerms)
    noise: NoiseSource = field(default_factory=SecureNoise)


@dataclass(frozen=True)
class Grouping:
    """How a cohort was split, for display.

    :param sizes: clients of each group.
    """

    sizes: tuple[int, ...]
    bytes_per_client: int
    budget_bytes: int

    def __str__(self) -> str:
        groups = f"{len(self.sizes)} groups of up to {max(self.sizes)}" if len(self.sizes) > 1 else "one group"
        return (
            f"{sum(self.sizes)} clients in {groups}; {self.bytes_per_client / 2**20:.1f} MiB a client, "
            f"{self.budget_bytes / 2**20:.0f} MiB at hand"
        )


def train_cohort(
    method: Method,
    members: Sequence[Member],
    global_params: np.ndarray,
    gradient: TorchGradient,
    *,
    recipe: Recipe,
    on_step: OnStep | None = None,
) -> list[Trained]:
    """Trains `members` once, on the gradient's device; see `CohortTrainer.train`."""
    trainer = CohortTrainer(gradient, gradient.device)
    return trainer.train(method, members, global_params, recipe=recipe, on_step=on_step)


class CohortTrainer:
    """Trains cohorts on one device, where the clients' data stays from round to round.

    :param memory_bytes: what a group may take. By default 0.8 of what is free on CUDA when a cohort begins, and
        1 GiB on a processor.
    :param precision: of the networks' forward and backward pass; `bfloat16` is autocast. Parameters, optimizer and
        the method's own terms are float32 in any case. `float32` is meant: no TF32.
    """

    def __init__(
        self,
        gradient: TorchGradient,
        device: str | torch.device,
        *,
        memory_bytes: int | None = None,
        precision: Precision = "float32",
    ) -> None:
        self.gradient = gradient
        self.device = torch.device(device)
        self.memory_bytes = memory_bytes
        self.precision = precision
        self.resident = ResidentSamples(self.device)
        self.grouping: Grouping | None = None  # of the last cohort
        self._most_clients = math.inf

    def train(
        self,
        method: Method,
        members: Sequence[Member],
        global_params: np.ndarray,
        *,
        recipe: Recipe,
        on_step: OnStep | None = None,
    ) -> list[Trained]:
        """Local training of a round, of all members, in their order.

        Members that cannot be trained together (private arrays of other shapes, another number of passes) are put in
        groups of their own. The method sees a stacked state: `mask` and `own` `[c, d]`, `participations` `[c]`,
        private arrays `[c, ...]`, all on the device.

        :param global_params: float32 `[d]`, read-only.
        :param on_step: called before each step with (steps done, steps in all); may raise to give up.
        :raises BadInput: a member has no samples.
        """
        if not members:
            return []
        if any(len(member.samples) == 0 for member in members):
            raise BadInput("a device of the cohort has no training samples; give each at least one")
        members = [self._prepared(method, member, global_params) for member in members]
        needed, budget = self._memory(method, members, global_params, recipe)
        pending = deque(self._groups(method, members, self._fitting(needed, budget)))
        progress = _Progress(on_step, sum(_steps(method, members[group[0]]) for group in pending))
        results: dict[int, Trained] = {}
        sizes = []
        while pending:
            group = pending.popleft()
            trained = self._attempt(method, [members[i] for i in group], global_params, recipe, progress)
            if trained is None:
                self._most_clients = -(-len(group) // 2)
                first, second = group[: self._most_clients], group[self._most_clients :]
                pending.extendleft((second, first))
                progress.total += _steps(method, members[second[0]])
            else:
                sizes.append(len(group))
                results.update(zip(group, trained, strict=True))
        self.grouping = Grouping(tuple(sizes), needed, budget)
        return [results[index] for index in range(len(members))]

    def clients_at_once(self, method: Method, members: Sequence[Member], *, recipe: Recipe) -> int:
        """How many such clients fit the memory together now, at least 1."""
        params = self.gradient.model.init(0)
        # One sample each tells what a method measures, though not with which result.
        few = [self._prepared(method, replace(each, samples=_first(each.samples)), params) for each in members]
        few = [replace(one, samples=each.samples) for one, each in zip(few, members, strict=True)]
        return self._fitting(*self._memory(method, few, params, recipe))

    def _prepared(self, method: Method, member: Member, global_params: np.ndarray) -> Member:
        return replace(member, state=method.prepare(member.state, global_params, self._data(member.samples)))

    def _data(self, samples: Samples) -> LocalData:
        return LocalData(samples, self.gradient, self.gradient.logits)

    def _memory(
        self, method: Method, members: Sequence[Member], global_params: np.ndarray, recipe: Recipe
    ) -> tuple[int, int]:
        """Bytes that a client needs, and bytes that there are. States are those after `prepare`."""
        trainings = [method] if method.companion is None else [method, method.companion]
        most = max(len(member.samples) for member in members)
        needed = max(
            bytes_per_client(
                self.gradient,
                batch_size=min(training.config.batch_size, most),
                dropout=tuple(recipe.dropout),
                optimizer=training.config.optimizer,
                momentum=training.config.momentum > 0,
                passes=max(len(training.passes(member.state)) for member in members),
                image_bytes=max(member.samples.images.nbytes for member in members),
                samples=most,
                asked=what_is_asked(training, members[0].state, global_params),
                record=_record(training, members[0]),
                augments=recipe.augment != "none",
            )
            for training in trainings
        )
        return needed, self._budget()

    def _fitting(self, needed: int, budget: int) -> int:
        return int(min(max(1, budget // needed), self._most_clients))

    def _groups(self, method: Method, members: Sequence[Member], most: int) -> list[list[int]]:
        """Indices of members, like with like, those with most samples first, in groups of nearly one size."""
        if most < len(members):
            self.resident.keep_only({member.samples for member in members})
        alike: dict[object, list[int]] = {}
        # Most samples are most steps too, whatever the batch size of a second training.
        for index in sorted(range(len(members)), key=lambda i: -len(members[i].samples)):
            alike.setdefault(_kind(method, members[index]), []).append(index)
        return [
            part.tolist() for indices in alike.values() for part in np.array_split(indices, -(-len(indices) // most))
        ]

    def _budget(self) -> int:
        if self.memory_bytes is not None:
            return self.memory_bytes
        if self.device.type != "cuda":
            return CPU_BUDGET_BYTES
        free, _ = torch.cuda.mem_get_info(self.device)
        cached = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return int(CUDA_SHARE * (free + cached))

    def _attempt(
        self,
        method: Method,
        group: Sequence[Member],
        global_params: np.ndarray,
        recipe: Recipe,
        progress: _Progress,
    ) -> list[Trained] | None:
        """The group's training; None if memory ran out, with generators and progress as they were before."""
        generators = [member.rng.bit_generator.state for member in group]
        done = progress.done
        # Noise has no state that could be put back, so all but the last attempt draw from copies.
        tried = group if len(group) == 1 else [replace(each, noise=deepcopy(each.noise)) for each in group]
        try:
            return self._train_group(method, tried, global_params, recipe, progress)
        except torch.OutOfMemoryError:
            if len(group) == 1:
                raise
        for member, state in zip(group, generators, strict=True):
            member.rng.bit_generator.state = state
        progress.done = done
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return None

    def _train_group(
        self,
        method: Method,
        group: Sequence[Member],
        global_params: np.ndarray,
        recipe: Recipe,
        progress: _Progress,
    ) -> list[Trained]:
        """As `train_round`, of prepared states."""
        data = [self._data(member.samples) for member in group]
        starts = np.stack([method.start(member.state, global_params) for member in group])
        teachers = [method.teacher(member.state, own) for member, own in zip(group, data, strict=True)]
        state, start = self._stacked([member.state for member in group]), self._upload(starts)
        common = {"recipe": recipe, "progress": progress}
        companion = method.companion
        with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False):
            end, losses = self._loop(method, group, state, start, teachers=teachers, **common)
            own = end
            if companion is not None:
                begin = self._upload(np.stack([companion.start(member.state, global_params) for member in group]))
                anchor = self._upload(global_params.copy()).expand(len(group), -1)
                own, _ = self._loop(companion, group, state, begin, anchor=anchor, **common)
        ends, loss = end.cpu().numpy(), losses.cpu().numpy()
        owns = ends if own is end else own.cpu().numpy()
        return [
            Trained(
                method.measure(member.state, owns[row], data[row]), starts[row], ends[row], owns[row], float(loss[row])
            )
            for row, member in enumerate(group)
        ]

    def _loop(
        self,
        method: Method,
        group: Sequence[Member],
        state: DeviceState,
        start: Tensor,
        *,
        recipe: Recipe,
        progress: _Progress,
        teachers: Sequence[Teacher | None] = (),
        anchor: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """As `train_locally`: from `start [c, d]` to parameters `[c, d]` and mean losses float64 `[c]`."""
        config = method.config
        anchor = start if anchor is None else anchor
        mechanisms = [_record(method, member) for member in group]
        batches = GroupBatches(
            [member.samples for member in group],
            [member.rng for member in group],
            self.resident,
            config=config,
            recipe=recipe,
            record=mechanisms[0],
            teachers=teachers if method.objective.distills else (),
        )
        passes = [(Part.of(mask, method.layout), make_cohort_optimizer(config)) for mask in method.passes(state)]
        params, gradient = start.clone(), torch.empty_like(start)
        scratch = torch.empty_like(start) if mechanisms[0] is not None else None
        loss_sums = torch.zeros(len(group), dtype=torch.float64, device=self.device)
        seen = torch.zeros(len(group), dtype=torch.int64, device=self.device)
        memory: dict[str, Any] = {}
        training = len(group)
        for batch in batches:
            progress.step()
            rows = slice(batch.active)
            if batch.active < training:
                memory, training = first_rows(memory, batch.active), batch.active
            current, living = params[rows], _first_rows(state, batch.active)
            asked = CohortBatch(self.gradient, batch, gradient[rows], memory, self.precision == "bfloat16")
            if scratch is not None:
                noises = [member.noise for member in group[rows]]
                asked = CohortRecordBatch(asked, mechanisms[rows], noises, scratch[rows])
            for turn, number in enumerate(method.active_passes(batch.epoch, len(passes))):
                part, optimizer = passes[number]
                asked.part = part
                losses, grad = method.gradient(living, start[rows], current, asked)
                if turn == 0:
                    loss_sums[rows] += losses.double() * batch.sizes
                method.local_gradient(living, anchor[rows], current, grad)
                if part.mask is not None:
                    grad *= part.mask[rows]
                optimizer.step(current, grad)
            seen[rows] += batch.sizes
        return params, loss_sums / seen.clamp(min=1)

    def _stacked(self, states: Sequence[DeviceState]) -> DeviceState:
        participations = np.array([state.public.participations for state in states])
        public = PublicState(
            self._upload(np.stack([state.public.mask for state in states])), self._upload(participations)
        )
        own = None if states[0].own is None else self._upload(np.stack([state.own for state in states]))
        private = {
            name: self._upload(np.stack([state.private[name] for state in states])) for name in states[0].private
        }
        return DeviceState(public, own, private)

    def _upload(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device)


class _Progress:
    def __init__(self, on_step: OnStep | None, total: int) -> None:
        self.on_step, self.total, self.done = on_step, total, 0

    def step(self) -> None:
        if self.on_step:
            self.on_step(self.done, self.total)
        self.done += 1


def _steps(method: Method, member: Member) -> int:
    own = step_count(len(member.samples), method.config, _record(method, member))
    return own if method.companion is None else own + _steps(method.companion, member)


def _record(method: Method, member: Member) -> RecordMechanism | None:
    return method.record_mechanism(member.terms) if method.privacy.unit == "record" else None


def _kind(method: Method, member: Member) -> tuple[object, ...]:
    """Members of one kind can be trained together: their states can be stacked, and each step is the same passes."""
    state = member.state
    arrays = sorted((name, np.shape(value)) for name, value in state.private.items())
    trainings = [method] if method.companion is None else [method, method.companion]
    return state.own is None, tuple(arrays), *(_rhythm(training, member) for training in trainings)


def _rhythm(method: Method, member: Member) -> tuple[object, ...]:
    record, passes = _record(method, member), len(method.passes(member.state))
    ends = tuple(epochs(len(member.samples), method.config, record))
    active = {tuple(method.active_passes(epoch, passes)) for epoch in range(len(ends))}
    clip_norm = None if record is None else record.clip_norm
    return passes, ends if len(active) > 1 else None, clip_norm


def _first(samples: Samples) -> Samples:
    return samples.take(slice(0, 1))


def _first_rows(state: DeviceState, count: int) -> DeviceState:
    rows = slice(count)
    public = PublicState(state.public.mask[rows], state.public.participations[rows])
    own = None if state.own is None else state.own[rows]
    return DeviceState(public, own, {name: value[rows] for name, value in state.private.items()})
