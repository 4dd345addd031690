"""A board of a world: the real `Agent` on a real store, whose work takes the seconds of its profile.

The arithmetic of these seconds is that of `hushfleet.simulator.engines.clock.device_time`. A board that is switched off
loses its process and keeps its store; one whose network is cut goes on working.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Protocol

import numpy as np

from hushfleet.edge_client.agent import Agent
from hushfleet.edge_client.board.config import (
    BrokerSection,
    DeviceConfig,
    DeviceSection,
    LimitsSection,
    OwnDataSection,
    SimulationSection,
)
from hushfleet.edge_client.randomness import SeededRandomness
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.edge_client.trainer import DeviceRound, Trainer
from hushfleet.edge_client.worker.job import Finished, Job, Outcome, Told
from hushfleet.edge_client.worker.job_store import JobStore
from hushfleet.secure.roster import Roster
from hushfleet.simulator.engines.clock.device_time import CONNECT_LATENCIES, DeviceTimes
from hushfleet.simulator.world.clock import Actor, WorldClock
from hushfleet.simulator.world.hub import Cable, Cables, LocalHub, LocalLink
from hushfleet.wire.link.interface import Will

LONGEST_SLEEP_S = 5.0  # how soon a board notices that a retained message has not come
_LATE_S = 1e-6  # the agent compares whether its deadline has passed


class Training(Protocol):
    """Does a job, and returns its outcome."""

    def __call__(self, job: Job) -> Outcome: ...


class ZeroTraining:
    """Trains with a gradient of zeros on one sample: for forecasts, whose updates have the real size.

    Noise, codec and bookkeeping are the board's own.
    """

    def __init__(self, spec, method, sample) -> None:  # type: ignore[no-untyped-def]
        self._spec, self._method, self._sample = spec, method, sample

    def _gradient(self, params, x, y, dropout=(), out=None, **others):  # type: ignore[no-untyped-def]
        gradient = np.empty_like(params) if out is None else out
        gradient[...] = 0
        return 0.0, gradient

    def __call__(self, job: Job) -> Outcome:
        store, simulation = JobStore(job), job.config.simulation
        assert simulation is not None
        trainer = Trainer(
            device=job.config.device.id,
            store=store,
            spec=self._spec,
            method=self._method,
            gradient=self._gradient,
            logits_of=None,  # type: ignore[arg-type]
            samples=lambda: self._sample,
            randomness=SeededRandomness(simulation.seed, simulation.index),
            limits=job.config.limits,
        )
        round = DeviceRound(trainer, job.plan, None if job.roster is None else Roster.from_bytes(job.roster))
        round.at, round.mask_keys = job.at, job.mask_keys
        assert job.charge is not None
        round.charge = job.charge
        round.run(np.frombuffer(job.model, "<f4"))
        done = store.commit
        assert done is not None
        return Finished(done.charge, done.update, done.public_before, done.state)


class TimedWorkshop:
    """A `Workshop` whose outcome comes after the seconds that the board takes for it.

    :param train: does the work, at once.
    :param times: the board's seconds; `loads_s`: what the first job takes besides, for the task's graphs.
    """

    def __init__(self, clock: WorldClock, train: Training, times: DeviceTimes) -> None:
        self._clock, self._train, self._times = clock, train, times
        self._outcome: Outcome | None = None
        self._loads_s = times.load_s
        self.compute_s = 0.0
        self._began_at = 0.0
        self.ends_at = math.inf

    def begin(self, job: Job) -> None:
        times = self._times
        self._outcome = outcome = self._train(job)
        writes = len(job.model)
        if isinstance(outcome, Finished):
            state = outcome.state
            writes += len(outcome.update) + len(state.public) + len(state.private) + len(state.own or b"")
        self._began_at = self._clock.now + self._loads_s + writes * times.write_s_per_byte
        self.ends_at = self._began_at + times.train_s + times.release_s
        self._loads_s = 0.0

    def poll(self) -> Outcome | None:
        if self._outcome is None or self._clock.now < self.ends_at:
            return None
        outcome = self._outcome
        self.give_up()
        return outcome

    def told(self) -> list[Told]:
        return []

    def give_up(self) -> None:
        if self._outcome is not None:
            self.compute_s += max(0.0, min(self._clock.now, self.ends_at) - self._began_at)
        self._outcome, self.ends_at = None, math.inf


class VirtualStop(threading.Event):
    """A stop for which nobody waits in real time."""

    def wait(self, timeout: float | None = None) -> bool:
        return self.is_set()


class WorldBoard:
    """One board.

    :param store: opens its store; called at each start.
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
    ) -> None:
        self.name, self.times, self.config = name, times, config
        self._clock, self._hub, self._open_store, self._train = clock, hub, store, train
        self.cables = Cables(
            up=Cable(clock, latency_s=times.latency_s, s_per_byte=times.up_s_per_byte),
            down=Cable(clock, latency_s=times.latency_s, s_per_byte=times.down_s_per_byte),
            connects_s=CONNECT_LATENCIES * times.latency_s,
        )
        self.actor = Actor(clock, self._act)
        self.on_s, self._on_since = 0.0, math.inf
        self._compute_s = 0.0
        self.agent: Agent | None = None

    # power and network

    def start(self) -> None:
        """Switches it on."""
        self._on_since, self.actor.is_off = self._clock.now, False
        self.stop = VirtualStop()
        self.workshop = TimedWorkshop(self._clock, self._train, self.times)
        self.store = self._open_store()
        self.agent = Agent(
            self.config, self._link, self.store, clock=self._clock, stop=self.stop, workshop=self.workshop
        )
        started = self.agent
        self._clock.at(self._clock.now + self.times.start_s + self.cables.connects_s, lambda: self._begin(started))

    def _begin(self, agent: Agent) -> None:
        if agent is self.agent:
            agent.start()
            self.actor.wake()

    def _link(self, will: Will) -> LocalLink:
        self.link = self._hub.link(self.name, will, cables=self.cables)
        self.link.on_event = self.actor.wake
        return self.link

    # its work loop

    def _act(self) -> float:
        """Lets the client work until it waits; returns the time of its next step."""
        agent, link = self.agent, self.link
        if agent is None:
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

    @property
    def compute_s(self) -> float:
        return self._compute_s + self.workshop.compute_s


def board_config(name: str, *, index: int, seed: int, board: str, folder: str, limits: LimitsSection) -> DeviceConfig:
    """Returns a simulated board's DEVICE.toml."""
    return DeviceConfig(
        device=DeviceSection(id=name, state_dir=folder, board=board),
        broker=BrokerSection(url="mqtt://world"),
        data=OwnDataSection(kind="arrays", path=f"{folder}/none.npz"),
        limits=limits,
        simulation=SimulationSection(seed=seed, index=index),
    )
