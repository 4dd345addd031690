"""A board of a world: the real `Agent` on a real store, whose work takes the seconds of its profile.

The arithmetic of these seconds is that of `hushfleet.simulator.world.times`. A board that is switched off
loses its process and keeps its store; one whose network is cut goes on working.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from hushfleet.array_api import Array
from hushfleet.edge_client.agent import Agent
from hushfleet.edge_client.board.budget_clock import BudgetClock
from hushfleet.edge_client.board.config import (
    BrokerSection,
    DeviceConfig,
    DeviceSection,
    LimitsSection,
    OwnDataSection,
    SimulationSection,
)
from hushfleet.edge_client.board.local_data import zero_samples
from hushfleet.edge_client.storage.answers import AnswerEntry
from hushfleet.edge_client.storage.declines import Declined, decline_reason
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.edge_client.worker.job import Failed, Finished, Job, Outcome, Told
from hushfleet.edge_client.worker.job_store import JobStore
from hushfleet.edge_client.worker.randomness import SeededRandomness
from hushfleet.edge_client.worker.trainer import DeviceRound, Trainer
from hushfleet.errors import BadInput, PrivacyError
from hushfleet.methods.task_method import TaskMethod
from hushfleet.secure.membership_list import MembershipList
from hushfleet.simulator.world.clock import Actor, WorldClock
from hushfleet.simulator.world.hub import Cable, Cables, LocalHub, LocalLink
from hushfleet.simulator.world.times import CONNECT_LATENCIES, DeviceTimes
from hushfleet.wire.format.spec import TaskSpec
from hushfleet.wire.link.interface import LinkDown, Will

LONGEST_SLEEP_S = 3600.0  # nothing is due sooner that `Agent.rests_s` does not know of
_LATE_S = 1e-6  # the agent compares whether its deadline has passed


class Training(Protocol):
    """Begins a job; the iterator gives its outcome, and may wait for it."""

    def __call__(self, job: Job) -> Iterator[Outcome]: ...


def trained(job: Job, trainer: Trainer) -> Outcome:
    """Returns the outcome of a round, as a worker does (`hushfleet.edge_client.worker.work`).

    :param trainer: on a `JobStore` of the job.
    """
    store = trainer.store
    assert isinstance(store, JobStore)
    round = DeviceRound(
        trainer, job.plan, None if job.membership_list is None else MembershipList.from_bytes(job.membership_list)
    )
    round.at, round.mask_keys = job.at, job.mask_keys
    assert job.charge is not None
    round.charge = job.charge
    try:
        round.run(np.frombuffer(job.model, "<f4"), blank=job.blank)
    except (PrivacyError, Declined, BadInput) as error:
        return Failed(*decline_reason(error))
    done = store.commit
    assert done is not None
    return Finished(done.charge, done.update, done.public_before, done.state, round.failed, arrived=tuple(store.new))


class ZeroTraining:
    """Trains with a gradient of zeros on one sample: for forecasts, whose updates have the real size.

    Noise, codec and bookkeeping are the board's own. Without noise zeros would be sent as nothing: such a gradient is
    drawn at random, for each device and round.
    """

    def __init__(self, spec: TaskSpec, method: TaskMethod) -> None:
        self._spec, self._method = spec, method
        self._sample = zero_samples(spec.model, spec.model.targets.blank(1, len(spec.model.class_names)))

    def __call__(self, job: Job) -> Iterator[Outcome]:
        simulation = job.config.simulation
        assert simulation is not None
        is_noised = job.charge is None or job.charge.noise_multiplier > 0
        drawn = None if is_noised else np.random.default_rng((simulation.index, job.plan.round))
        trainer = Trainer(
            device=job.config.device.id,
            store=JobStore(job),
            spec=self._spec,
            method=self._method,
            gradient=_Untrained(drawn),
            logits_of=lambda params, x: np.zeros((len(x), self._spec.model.outputs), np.float32),
            samples=lambda: self._sample,
            held_out=lambda: self._sample,
            randomness=SeededRandomness(simulation.seed, simulation.index),
            limits=job.config.limits,
        )
        yield trained(job, trainer)


class _Untrained:
    """A gradient that no sample has made: zeros, or independent values of one size.

    :param random: draws the values.
    """

    def __init__(self, random: np.random.Generator | None) -> None:
        self._random = random

    def __call__(
        self,
        params: Array,
        x: Any,
        y: Any,
        dropout: Sequence[Array] = (),
        out: Array | None = None,
        teacher: Array | None = None,
        distill: Any | None = None,
    ) -> tuple[float, Array]:
        gradient = np.empty_like(params) if out is None else out
        gradient[...] = 0 if self._random is None else self._random.standard_normal(params.shape, np.float32)
        return 0.0, gradient


class TimedWorkshop:
    """A `Workshop` whose outcome comes after the seconds that the board takes for it.

    :param train: begins the work; its outcome is taken when the board has computed it.
    """

    def __init__(self, clock: WorldClock, train: Training, times: DeviceTimes) -> None:
        self._clock, self._train, self._times = clock, train, times
        self._work: Iterator[Outcome] | None = None
        self._outcome: Outcome | None = None
        self._is_started = False  # as for a `ChildProcess`, until `give_up`
        self._began_at = self._computed_at = 0.0
        self.compute_s = 0.0
        """Seconds of computing so far."""
        self.ends_at = math.inf
        """When it is worth to look."""

    def begin(self, job: Job) -> None:
        times = self._times
        self._work = self._train(job)
        self._began_at = self._clock.now + len(job.model) * times.write_s_per_byte
        if not self._is_started:
            self._began_at, self._is_started = self._began_at + times.load_s, True
        self._computed_at = self.ends_at = self._began_at + times.train_s + times.release_s

    def poll(self) -> Outcome | None:
        if self._work is None or self._clock.now < self.ends_at:
            return None
        if self._outcome is None:
            self._outcome = outcome = next(self._work)
            if isinstance(outcome, Finished):
                state = outcome.state
                size = len(outcome.update) + len(state.public) + len(state.private) + len(state.own or b"")
                self.ends_at += size * self._times.write_s_per_byte
            if self._clock.now < self.ends_at:
                return None
        outcome = self._outcome
        self._end()
        return outcome

    def told(self) -> list[Told]:
        return []

    def give_up(self) -> None:
        self._is_started = False
        self._end()

    def _end(self) -> None:
        if self._work is not None:
            self.compute_s += max(0.0, min(self._clock.now, self._computed_at) - self._began_at)
        self._work = self._outcome = None
        self.ends_at = math.inf


class VirtualStop(threading.Event):
    """A stop for which nobody waits in real time."""

    def wait(self, timeout: float | None = None) -> bool:
        return self.is_set()


class WorldBoard:
    """One board.

    :param store: opens its store; called at each start.
    :param budget_clock: makes its clock for its owner's limits; None: the agent's own.
    """

    def __init__(
        self,
        name: str,
        *,
        clock: WorldClock,
        hub: LocalHub,
        times: DeviceTimes,
        config: DeviceConfig,
        store: Callable[[], DeviceStore],
        train: Training,
        budget_clock: Callable[[DeviceStore], BudgetClock] | None = None,
    ) -> None:
        self._budget_clock = budget_clock
        self.name, self.times, self.config = name, times, config
        self._clock, self._hub, self._open_store, self._train = clock, hub, store, train
        simulation = config.simulation
        assert simulation is not None

        def cable(direction: str, s_per_byte: float) -> Cable:
            seed = f"{simulation.seed} {name} {direction}"
            return Cable(clock, latency_s=times.latency_s, s_per_byte=s_per_byte, rough=times.rough, seed=seed)

        self.cables = Cables(
            up=cable("up", times.up_s_per_byte),
            down=cable("down", times.down_s_per_byte),
            connects_s=CONNECT_LATENCIES * times.latency_s,
        )
        self.actor = Actor(clock, self._act)
        self.is_cut = False
        self.down_since = 0.0
        """Since when it tries to connect, while it has no link."""
        self._on_s, self._on_since, self._compute_s = 0.0, math.inf, 0.0
        self.agent: Agent | None = None
        self.store: DeviceStore | None = None
        self.link: LocalLink | None = None
        self._is_started = False
        self._answered: bytes | None = None

    @property
    def is_on(self) -> bool:
        return self.agent is not None

    @property
    def compute_s(self) -> float:
        """Seconds of computing so far."""
        return self._compute_s + (self.workshop.compute_s if self.agent is not None else 0.0)

    @property
    def on_s(self) -> float:
        """Seconds of power so far."""
        return self._on_s + max(0.0, self._clock.now - self._on_since)

    @property
    def is_linked(self) -> bool:
        return self.link is not None and self._hub.connected.get(self.name) is self.link

    def has_heard_of(self, round: int) -> bool:
        """Returns whether its client has the plan of this round."""
        plan = None if self.agent is None else self.agent.rounds.plan
        return plan is not None and plan.round == round

    # power and network

    def start(self, *, connects: bool = True) -> None:
        """Switches it on.

        :param connects: whether its first attempt to connect succeeds, unless its network is cut.
        """
        self._on_since = self._clock.now
        self.stop = VirtualStop()
        self.workshop = TimedWorkshop(self._clock, self._train, self.times)
        self.store = self._open_store()
        self._is_started = False
        self.agent = Agent(
            self.config,
            self._make_link,
            self.store,
            clock=self._clock,
            stop=self.stop,
            workshop=self.workshop,
            budget_clock=None if self._budget_clock is None else self._budget_clock(self.store),
        )
        self.down_since = self._clock.now + self.times.start_s
        if connects and not self.is_cut:
            self.connect_at(self.down_since)

    def connect_at(self, at: float) -> None:
        """Connects it, with an attempt at this time; nothing happens if it is switched off or cut meanwhile."""
        agent = self.agent

        def connect() -> None:
            if agent is None or agent is not self.agent or self.is_cut or self.link is None or self.is_linked:
                return
            if self._is_started:
                self.link.open()
            else:
                self._is_started = True
                agent.start()
            self.actor.wake()

        self._clock.at(max(at, self.down_since) + self.cables.connects_s, connect)

    def kill(self, *, will_after_s: float) -> None:
        """Takes its power away."""
        self._break(will_after_s)
        self._end()

    def stop_client(self) -> None:
        """Ends the client as its system would: it says that it sleeps."""
        if self.agent is not None:
            self.agent.close()
        self._end()

    def cut(self, *, will_after_s: float) -> None:
        """Cuts its network; the client goes on."""
        self.is_cut = True
        if self.is_linked and self.link is not None:
            self._break(will_after_s)
            self.link.put(LinkDown("the network was cut"))

    def _break(self, will_after_s: float) -> None:
        self.down_since = max(self._clock.now, self.down_since)
        if self.link is not None:
            self._hub.vanish(self.link, will_after_s=will_after_s)

    def _end(self) -> None:
        if self.agent is not None and self.store is not None:
            self.workshop.give_up()
            self._compute_s += self.workshop.compute_s
            self._on_s, self._on_since = self.on_s, math.inf
            self.agent = None
            self.store.close()

    def _make_link(self, will: Will) -> LocalLink:
        self.link = self._hub.link(self.name, will, cables=self.cables)
        self.link.on_event, self.link.on_publish = self.actor.wake, self._before_sending
        return self.link

    def _before_sending(self) -> None:
        """Takes the time of a committee member's answer, which its client computes by itself."""
        agent = self.agent
        if agent is None or agent.rounds.upload is None or not isinstance(agent.rounds.upload.entry, AnswerEntry):
            return
        entry, plan = agent.rounds.upload.entry, agent.rounds.plan
        if entry.digest != self._answered and plan is not None and plan.secure is not None:
            self._answered = entry.digest
            took_s = int.from_bytes(plan.secure.included).bit_count() * self.times.pair_s
            self._compute_s += took_s
            self.cables.up.hold(self._clock.now + took_s)

    # its work loop

    def _act(self) -> float:
        """Lets the client work until it waits; returns the time of its next step."""
        agent, link = self.agent, self.link
        if agent is None or link is None:
            return math.inf
        while True:
            agent.step(LONGEST_SLEEP_S)
            if link.is_full:
                return link.room_at
            if link.events.empty() and (rests_s := agent.rests_s(LONGEST_SLEEP_S)) > 0:
                break
        if (training := agent.rounds.training) is not None and training.ends_at is None:
            return min(self.workshop.ends_at, training.deadline + _LATE_S)
        return self._clock.now + rests_s


def board_config(name: str, *, index: int, seed: int, board: str, folder: str, limits: LimitsSection) -> DeviceConfig:
    """Returns a simulated board's DEVICE.toml."""
    return DeviceConfig(
        device=DeviceSection(id=name, state_dir=folder, board=board),
        broker=BrokerSection(url="mqtt://world"),
        data=OwnDataSection(kind="arrays", path=f"{folder}/none.npz"),
        limits=limits,
        simulation=SimulationSection(seed=seed, index=index),
    )
