"""One seed: a run through the storm of its plan, and the audit of what it leaves."""

from __future__ import annotations

import os
import random
import shutil
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from chaos import audit
from chaos.fleet import ChaosFleet
from chaos.plan import AGGREGATOR, BROKER, KINDS, NEEDS_MACHINE, Plan, draw_plan
from chaos.storm import Storm
from chaos.tap import Tap
from chaos.trespass import HostileMember, Stranger, Trespasser
from hushfleet.aggregator.results.events import EventLog
from hushfleet.aggregator.storage.store import AggregatorStore
from hushfleet.errors import HushfleetError
from hushfleet.simulator.engines.fast.engine import FastFleet
from hushfleet.simulator.engines.fast.sums import write_membership_list
from hushfleet.simulator.engines.fast.workers import Workers
from hushfleet.simulator.run_folder import RunFolder, Simulation

TIMEOUT_S = 500.0


@dataclass(frozen=True)
class Outcome:
    """What came of one seed.

    :param wrong: what did not hold; empty is a pass.
    :param bad_updates: how many a hostile member sent.
    :param missing: updates that a device with a full disk, or a hostile one, did not send.
    :param played: `KIND of TARGET` -> how often it happened.
    """

    seed: int
    wrong: list[str]
    seconds: float
    broker: str
    field_noise: bool
    tampering: list[str]
    slow_links: int
    bad_updates: int
    missing: int
    played: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, plan: Plan, *, wrong: list[str], seconds: float = 0.0, bad_updates: int = 0, missing: int = 0,
           played: list[tuple[str, str]] | None = None) -> Outcome:  # fmt: skip
        happened = (f"{kind} of {name if name in (AGGREGATOR, BROKER) else 'device'}" for kind, name in played or [])
        return cls(plan.seed, wrong, round(seconds, 1), plan.broker, plan.field_noise, list(plan.tampering),
                   len(plan.links), bad_updates, missing, dict(Counter(happened)))  # fmt: skip

    @property
    def passed(self) -> bool:
        return not self.wrong

    @property
    def line(self) -> str:
        """For people."""
        played = ", ".join(f"{kind} ({times})" if times > 1 else kind for kind, times in self.played.items())
        return f"seed {self.seed}: {f'passed in {self.seconds:g} s; {played}' if self.passed else self.wrong[0]}"


class TrialRunner:
    """Runs seeds of one prepared simulation.

    :param prepared: its folder is copied for each run, and never written.
    :param library: of `build_library`; None where there is no compiler.
    :param timeout_s: a run that takes longer fails.
    :param options: `client` and `aggregator` of `LiveFleet`.
    """

    def __init__(
        self, prepared: Simulation, *, library: Path | None, timeout_s: float = TIMEOUT_S, **options: Any
    ) -> None:
        self._prepared, self._library, self._timeout_s, self._options = prepared, library, timeout_s, options
        self._calm: dict[frozenset[tuple[int, str]], dict[str, str]] = {}
        prepared.write_samples()  # its devices are processes

    def plan(self, seed: int) -> Plan:
        kinds = KINDS if self._library else tuple(kind for kind in KINDS if kind not in NEEDS_MACHINE)
        names = [device.name for device in self._prepared.fleet.devices]
        return draw_plan(seed, names, rounds=self._prepared.task.round.rounds, kinds=kinds)

    def run(self, seed: int, folder: Path) -> Outcome:
        """Runs it in `folder`, which must not be there."""
        return self.play(self.plan(seed), folder)

    def play(self, plan: Plan, folder: Path) -> Outcome:
        """Runs a plan; see `run`."""
        began, wrong, missing = time.monotonic(), list[str](), set[tuple[int, str]]()
        simulation = self._copy(folder)
        fleet = ChaosFleet(simulation, plan, library=self._library, **self._options)
        trespassers: list[Trespasser] = []
        if plan.tampering:
            trespassers.append(Stranger(plan.tampering, random.Random(f"stranger {plan.seed}")))
        if plan.hostile:
            trespassers.append(HostileMember(simulation, plan.hostile, random.Random(f"hostile {plan.seed}")))
        tap = Tap(lambda payload: any(payload in each.forged for each in trespassers))
        storm = Storm(fleet, plan, tap, timeout_s=self._timeout_s)
        try:
            with ExitStack() as stack:
                stack.enter_context(fleet.running())
                stack.callback(fleet.end)
                for each in (*trespassers, tap):
                    each.attach(fleet.broker_url)
                    stack.callback(each.close)
                storm.pass_over()
            if not storm.played:
                wrong.append("no trouble happened")
        except HushfleetError as error:
            wrong.append(str(error))
        finished = not wrong  # what a run that was broken off still says is about privacy
        try:
            wrong += audit.check_tap(simulation, tap, devices=fleet.honest)
            wrong += audit.check_outboxes(simulation, fleet.honest)
            wrong += audit.check_metrics(simulation, {name: fleet.starts[name] for name in fleet.honest})
            if finished:
                missing, unexplained = audit.missing_of(simulation, storm.may_decline)
                wrong += unexplained + audit.check_stores(simulation, missing=missing)
                is_calm = audit.models_of(simulation) == self.calm(frozenset(missing))
                if plan.field_noise and is_calm:
                    wrong.append("the model is the calm run's, although the noise was drawn")
                elif not plan.field_noise and not is_calm:
                    wrong.append("the models are not those of the calm run")
        except HushfleetError as error:
            wrong.append(f"a store cannot be read: {error}")
        return Outcome.of(
            plan,
            wrong=wrong,
            seconds=time.monotonic() - began,
            bad_updates=sum(each.sent for each in trespassers if isinstance(each, HostileMember)),
            missing=len(missing),
            played=storm.played,
        )

    def calm(self, missing: frozenset[tuple[int, str]] = frozenset()) -> dict[str, str]:
        """The models of a run without trouble in which these (round, device) send nothing, by the fast engine."""
        if missing not in self._calm:
            folder = self._prepared.folder.path.with_name(f"calm-{os.getpid()}")
            shutil.rmtree(folder, ignore_errors=True)
            simulation = self._copy(folder)
            names = [device.name for device in simulation.fleet.devices]
            with (
                AggregatorStore(simulation.folder.aggregator, durable=False) as store,
                EventLog(simulation.folder.events) as events,
                Workers(1) as workers,
            ):
                fleet = FastFleet(simulation, workers, store, events)
                engine = fleet.engine
                membership_list = write_membership_list(simulation, store) if engine.spec.privacy.secure else None
                while not engine.finished:
                    plan = engine.open_round(names, membership_list=membership_list)
                    fleet.play([name for name in names if (plan.round, name) not in missing])
            self._calm[missing] = audit.models_of(simulation)
            shutil.rmtree(folder)
        return self._calm[missing]

    def _copy(self, folder: Path) -> Simulation:
        shutil.copytree(self._prepared.folder.path, folder)
        return replace(self._prepared, folder=RunFolder(folder))
