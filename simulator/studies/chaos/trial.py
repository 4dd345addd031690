"""One seed: a run through the storm of its plan, and the audit of what it leaves."""

from __future__ import annotations

import os
import random
import shutil
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from hushfleet.aggregator.observe.events import EventLog
from hushfleet.aggregator.rounds.engine import RoundEngine
from hushfleet.aggregator.storage.store import AggregatorStore
from hushfleet.errors import HushfleetError
from hushfleet.simulator.engines.fast.engine import deliver, train_cohort
from hushfleet.simulator.engines.fast.workers import Workers
from hushfleet.simulator.run_folder import RunFolder, Simulation
from hushfleet.simulator.studies.chaos import audit
from hushfleet.simulator.studies.chaos.fleet import ChaosFleet
from hushfleet.simulator.studies.chaos.plan import KINDS, NEEDS_MACHINE, Plan, draw_plan
from hushfleet.simulator.studies.chaos.storm import Storm
from hushfleet.simulator.studies.chaos.tap import Tap
from hushfleet.simulator.studies.chaos.trespass import HostileMember, Stranger

PATIENCE_S = 500.0


@dataclass(frozen=True)
class Outcome:
    """What came of one seed.

    :param played: `KIND of TARGET` -> how often it happened.
    :param bad_updates: how many a hostile member sent.
    :param missing: updates that a device with a full disk, or a hostile one, did not send.
    :param wrong: what did not hold; empty is a pass.
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

    @property
    def passed(self) -> bool:
        return not self.wrong

    def to_plain(self) -> dict[str, Any]:
        """For JSON; `from_plain` reads it."""
        return asdict(self)


class Bench:
    """Runs seeds of one prepared simulation.

    :param prepared: its folder is copied for each run, and never written.
    :param library: of `build_library`; None where there is no compiler.
    :param options: `client` and `aggregator` of `LiveFleet`.
    """

    def __init__(
        self, prepared: Simulation, *, library: Path | None, patience_s: float = PATIENCE_S, **options: Any
    ) -> None:
        self._prepared = prepared
        self._library = library
        self._patience_s = patience_s
        self._options = options
        self._calm: dict[frozenset[tuple[int, str]], dict[str, str]] = {}

    def plan(self, seed: int) -> Plan:
        kinds = KINDS if self._library else tuple(kind for kind in KINDS if kind not in NEEDS_MACHINE)
        names = [device.name for device in self._prepared.fleet.devices]
        return draw_plan(seed, names, rounds=self._prepared.task.round.rounds, kinds=kinds)

    def run(self, seed: int, folder: Path) -> Outcome:
        """Runs it in `folder`, which must not be there."""
        return self.play(self.plan(seed), folder)

    def play(self, plan: Plan, folder: Path) -> Outcome:
        """Runs a plan; see `run`."""
        began = time.monotonic()
        simulation = self._copy(folder)
        fleet = ChaosFleet(simulation, plan, library=self._library, **self._options)
        wrong: list[str] = []
        missing: set[tuple[int, str]] = set()
        stranger = Stranger(plan.tampering, random.Random(f"stranger {plan.seed}")) if plan.tampering else None
        member = (
            HostileMember(simulation, plan.hostile, random.Random(f"hostile {plan.seed}")) if plan.hostile else None
        )
        trespassers = [each for each in (stranger, member) if each]
        tap = Tap(lambda payload: any(each.is_forged(payload) for each in trespassers))
        storm = Storm(fleet, plan, tap, patience_s=self._patience_s)
        try:
            with ExitStack() as stack:
                stack.enter_context(fleet.running())
                stack.callback(fleet.end)
                assert fleet.broker is not None
                for each in trespassers:
                    each.start(fleet.broker.url)
                    stack.callback(each.stop)
                tap.attach(fleet.broker.url)
                stack.callback(tap.close)
                storm.pass_over()
        except HushfleetError as error:
            wrong.append(str(error))
        if not storm.played and not wrong:
            wrong.append("no trouble happened")
        wrong += self._audit(simulation, fleet, plan, storm, tap, missing, finished=not wrong)
        return Outcome(
            seed=plan.seed,
            wrong=wrong,
            seconds=round(time.monotonic() - began, 1),
            broker=plan.broker,
            field_noise=plan.field_noise,
            tampering=list(plan.tampering),
            slow_links=len(plan.links),
            bad_updates=member.sent if member else 0,
            missing=len(missing),
            played=dict(Counter(f"{kind} of {_part(target)}" for kind, target in storm.played)),
        )

    def _audit(
        self,
        simulation: Simulation,
        fleet: ChaosFleet,
        plan: Plan,
        storm: Storm,
        tap: Tap,
        missing: set[tuple[int, str]],
        *,
        finished: bool,
    ) -> list[str]:
        """:param finished: what a run that was broken off still says is about privacy."""
        honest = fleet.honest
        try:
            wrong = audit.check_tap(simulation, tap, devices=honest)
            wrong += audit.check_outboxes(simulation, honest)
            wrong += audit.check_metrics(simulation, honest)
            if finished:
                found, unexplained = audit.missing_of(simulation, storm.may_decline)
                missing |= found
                wrong += unexplained + audit.check_stores(simulation, missing=missing)
                models = audit.models_of(simulation)
                calm = self.calm(frozenset(missing))
                if plan.field_noise and models == calm:
                    wrong.append("the model is the calm run's, although the noise was drawn")
                elif not plan.field_noise and models != calm:
                    wrong.append("the models are not those of the calm run")
        except HushfleetError as error:
            return [f"a store cannot be read: {error}"]
        return wrong

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
                engine = RoundEngine(store, simulation.prepared)
                while not engine.finished:
                    plan = engine.open_round(names)
                    devices = [name for name in names if (plan.round, name) not in missing]
                    for answer in train_cohort(simulation, workers, plan, devices):
                        deliver(answer, engine, plan, events)
                    engine.close()
            self._calm[missing] = audit.models_of(simulation)
            shutil.rmtree(folder)
        return self._calm[missing]

    def _copy(self, folder: Path) -> Simulation:
        shutil.copytree(self._prepared.folder.path, folder)
        return replace(self._prepared, folder=RunFolder(folder))


def _part(name: str) -> str:
    return name if name in ("aggregator", "broker") else "device"
