"""Local training of many clients at once: arrays `[c, d]` in one vmapped step, on the processor or on CUDA.

It equals `hushfleet.training.train_locally`, client by client, up to the rounding of float32: the same methods, the
same order of samples, the same dropout masks, each client's own count of steps. What follows in a round (noise, codec,
ledger, store) stays with the device's own code.

What dominates, on CUDA by counting and not by timing, since none was at hand: a step of `mnist-cnn` under DP-FedAvg is
some hundred operations besides views. For a compact network each is a launch that takes longer than its arithmetic,
so a step's time should hardly grow with the clients until the device is full: a group is as large as the memory
allows. Nothing in the loop waits for the device: batches are cut there (`simulator.resident`), losses stay there, the
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
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from hushfleet.data.samples import Samples
from hushfleet.errors import BadInput
from hushfleet.methods.base import DeviceState, Method, PublicState
from hushfleet.spec import DropoutSpec
from hushfleet.training import Trained
from models.torch_gradient import TorchGradient
from simulator.cohort_memory import bytes_per_client
from simulator.cohort_optim import make_cohort_optimizer
from simulator.resident import GroupBatches, ResidentSamples, step_count

OnStep = Callable[[int, int], None]
Precision = Literal["float32", "bfloat16"]

CPU_BUDGET_BYTES = 1 << 30
CUDA_SHARE = 0.8  # of what is free; the rest is for kernels' scratch space and for fragments


@dataclass(frozen=True)
class Member:
    """A client of a round.

    :param state: what it begins the round with.
    :param rng: draws the order of its samples and its dropout masks.
    """

    state: DeviceState
    samples: Samples
    rng: np.random.Generator


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
    dropout: Sequence[DropoutSpec],
    on_step: OnStep | None = None,
) -> list[Trained]:
    """Trains `members` once, on the gradient's device; see `CohortTrainer.train`."""
    trainer = CohortTrainer(gradient, gradient.device)
    return trainer.train(method, members, global_params, dropout=dropout, on_step=on_step)


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
        dropout: Sequence[DropoutSpec],
        on_step: OnStep | None = None,
    ) -> list[Trained]:
        """Local training of a round, of all members, in their order.

        The members' states must have private arrays of like shapes where they share a group; those that do not are
        put in groups of their own. The method sees a stacked state: `mask` and `own` `[c, d]`, `participations`
        `[c]`, private arrays `[c, ...]`, all on the device.

        :param global_params: float32 `[d]`, read-only.
        :param on_step: called before each step with (steps done, steps in all); may raise to give up.
        :raises BadInput: a member has no samples.
        """
        if not members:
            return []
        if any(len(member.samples) == 0 for member in members):
            raise BadInput("a device of the cohort has no training samples; give each at least one")
        needed, budget = self._memory(method, members, dropout)
        pending = deque(self._groups(method, members, self._fitting(needed, budget)))
        progress = _Progress(on_step, sum(_steps(method, members[group[0]]) for group in pending))
        results: dict[int, Trained] = {}
        sizes = []
        while pending:
            group = pending.popleft()
            trained = self._attempt(method, [members[i] for i in group], global_params, dropout, progress)
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

    def clients_at_once(self, method: Method, members: Sequence[Member], *, dropout: Sequence[DropoutSpec]) -> int:
        """How many such clients fit the memory together now, at least 1."""
        return self._fitting(*self._memory(method, members, dropout))

    def _memory(self, method: Method, members: Sequence[Member], dropout: Sequence[DropoutSpec]) -> tuple[int, int]:
        """Bytes that a client needs, and bytes that there are."""
        config = method.config
        needed = bytes_per_client(
            self.gradient,
            batch_size=min(config.batch_size, max(len(member.samples) for member in members)),
            dropout=tuple(dropout),
            optimizer=config.optimizer,
            passes=max(len(method.passes(member.state)) for member in members),
            image_bytes=max(member.samples.images.nbytes for member in members),
        )
        return needed, self._budget()

    def _fitting(self, needed: int, budget: int) -> int:
        return int(min(max(1, budget // needed), self._most_clients))

    def _groups(self, method: Method, members: Sequence[Member], most: int) -> list[list[int]]:
        """Indices of members, like with like, those with most steps first, in groups of nearly one size."""
        if most < len(members):
            self.resident.keep_only({member.samples for member in members})
        alike: dict[object, list[int]] = {}
        for index in sorted(range(len(members)), key=lambda i: -_steps(method, members[i])):
            alike.setdefault(_kind(members[index].state), []).append(index)
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
        dropout: Sequence[DropoutSpec],
        progress: _Progress,
    ) -> list[Trained] | None:
        """The group's training; None if memory ran out, with generators and progress as they were before."""
        generators = [member.rng.bit_generator.state for member in group]
        done = progress.done
        try:
            return self._train_group(method, group, global_params, dropout, progress)
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
        dropout: Sequence[DropoutSpec],
        progress: _Progress,
    ) -> list[Trained]:
        starts = np.stack([method.start(member.state, global_params) for member in group])
        start = self._upload(starts)
        with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False):
            params, loss_sums = self._loop(method, group, start, dropout, progress)
        own, sums = params.cpu().numpy(), loss_sums.cpu().numpy()
        seen = [len(member.samples) * method.config.local_epochs for member in group]
        return [
            Trained(member.state, starts[row], own[row], own[row], float(sums[row]) / count)
            for row, (member, count) in enumerate(zip(group, seen, strict=True))
        ]

    def _loop(
        self,
        method: Method,
        group: Sequence[Member],
        start: Tensor,
        dropout: Sequence[DropoutSpec],
        progress: _Progress,
    ) -> tuple[Tensor, Tensor]:
        """The loop: from `start [c, d]` to parameters `[c, d]` and sums of losses float64 `[c]`, on the device."""
        config = method.config
        batches = GroupBatches(
            [member.samples for member in group],
            [member.rng for member in group],
            self.resident,
            batch_size=config.batch_size,
            local_epochs=config.local_epochs,
            dropout=dropout,
        )
        state = self._stacked([member.state for member in group])
        passes = [(part, make_cohort_optimizer(config)) for part in method.passes(state)]
        params, gradient = start.clone(), torch.empty_like(start)
        loss_sums = torch.zeros(len(group), dtype=torch.float64, device=self.device)
        reduced = self.precision == "bfloat16"
        autocast = torch.autocast(self.device.type, torch.bfloat16) if reduced else nullcontext()
        for batch in batches:
            progress.step()
            rows = slice(batch.active)
            current, grad, living = params[rows], gradient[rows], _first_rows(state, batch.active)
            for number, (part, optimizer) in enumerate(passes):
                with autocast:
                    losses, _ = self.gradient.clients(
                        current, batch.x, batch.y, batch.masks, out=grad, weights=batch.weights
                    )
                if number == 0:
                    loss_sums[rows] += losses.double() * batch.sizes
                method.local_gradient(living, start[rows], current, grad)
                if part is not None:
                    grad *= part[rows]
                optimizer.step(current, grad)
        return params, loss_sums

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
    return step_count(member.samples, method.config.batch_size, method.config.local_epochs)


def _kind(state: DeviceState) -> tuple[object, ...]:
    """States of one kind can be stacked."""
    arrays = sorted((name, np.shape(value)) for name, value in state.private.items())
    return state.own is None, tuple(arrays)


def _first_rows(state: DeviceState, count: int) -> DeviceState:
    rows = slice(count)
    public = PublicState(state.public.mask[rows], state.public.participations[rows])
    own = None if state.own is None else state.own[rows]
    return DeviceState(public, own, {name: value[rows] for name, value in state.private.items()})
