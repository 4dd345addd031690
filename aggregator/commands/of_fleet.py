"""Reads what a fleet's folder brings to its aggregator's run: options, members, limits, and whether the task pays."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from hushfleet.aggregator.config.task import Task
from hushfleet.aggregator.fleet.tasks.pay import pay_of_fleet
from hushfleet.aggregator.fleet.tasks.seasons import Seasons
from hushfleet.aggregator.fleet.tasks.spending import Spending
from hushfleet.aggregator.fleet.tasks.task_check import useless_for
from hushfleet.aggregator.fleet.trust.folder import FleetFolder
from hushfleet.aggregator.fleet.trust.keys import sum_facts
from hushfleet.aggregator.fleet.watching.ended import noted_end
from hushfleet.aggregator.planning.pay import PayAnswer
from hushfleet.aggregator.results.answers import EvaluationRow
from hushfleet.aggregator.results.result import Lifetime
from hushfleet.aggregator.results.server_sees import SumFacts
from hushfleet.aggregator.rounds.budgets import Budgets
from hushfleet.aggregator.rounds.charge_book import ChargeBook
from hushfleet.aggregator.rounds.engine import RoundEngine
from hushfleet.aggregator.rounds.thresholds import RunningThresholds
from hushfleet.aggregator.storage.fleet_members import FleetMembers
from hushfleet.errors import BadInput
from hushfleet.privacy.budget import Budget

if TYPE_CHECKING:
    from hushfleet.aggregator.commands.field_options import AggregatorOptions


def members_of(fleet: FleetFolder) -> FleetMembers:
    """Returns who may take part in a fleet, as its aggregator knows it. Raises `BadInput` and `StoreError`."""
    return FleetMembers(
        fleet.aggregator,
        file=fleet.admissions,
        authority=fleet.ca / "ca.pem",
        federation=fleet.config.federation,
    )


class OfFleet:
    """The run of a fleet's present task."""

    def __init__(self, path: Path) -> None:
        self.folder = FleetFolder(path)
        self._began_in = self.folder.run
        self._limits = self.folder.config.device.get("limits", {})

    @cached_property
    def members(self) -> FleetMembers:
        return members_of(self.folder)

    def options(self, given: AggregatorOptions) -> AggregatorOptions:
        """Returns the options of a run, whose broker, certificates, key and folder are those of the fleet."""
        fleet = self.folder
        return replace(
            given,
            broker=fleet.local_broker,
            federation=fleet.config.federation,
            out=fleet.run,
            resume=True,
            identity=fleet.aggregator / "identity.key",
            membership_list=fleet.membership_list,
            ca_file=fleet.ca / "ca.pem",
            cert_file=fleet.aggregator / "cert.pem",
            key_file=fleet.aggregator / "cert.key",
        )

    @property
    def is_replaced(self) -> bool:
        """Whether the fleet was given another task, for which this run is left."""
        with contextlib.suppress(BadInput):  # a task file that is being written by hand
            return self.folder.run != self._began_in
        return False

    @contextlib.contextmanager
    def noted_end(self) -> Iterator[None]:
        """Notes the error with which the block ends, for status and page."""
        with noted_end(self.folder):
            yield

    @property
    def sums(self) -> SumFacts:
        """Who could unmask its boards."""
        return sum_facts(self.folder)

    def pay(self, task: Task, *, boards: int, evaluation: EvaluationRow | None) -> PayAnswer | None:
        """Answers whether the fleet pays with these boards."""
        seasons, now = Seasons.of(self.folder), time.time()
        lasts_s = None if seasons is None else seasons.view(now).lasts_s(now)
        return pay_of_fleet(task, self.folder, boards=boards, evaluation=evaluation, lasts_s=lasts_s)

    def check_use(self, task: Task, *, boards: int, needed: int) -> None:
        """Raises `BadInput` if nothing could be learned from the task's evaluations."""
        if (useless := useless_for(task, self.folder, boards=boards, needed=needed)) is not None:
            raise BadInput(useless)

    def charges(self, engine: RoundEngine) -> ChargeBook:
        """Returns the book of what its boards spend in all runs."""
        budget = Budget.of(self._limits)
        return ChargeBook(self.members, engine, None if budget is None else Budgets(self.members, budget))

    def thresholds(self, task: Task) -> RunningThresholds:
        """Returns how many devices and updates a round needs, which the operator may change while it runs."""
        return RunningThresholds(task, self.folder.round, self.folder.task)

    def lifetimes(self, engine: RoundEngine) -> Mapping[str, Lifetime]:
        """Returns what its boards have spent over all tasks."""
        spec = engine.spec
        return Spending(self._limits).lifetimes(self.members, spec.task, window_s=spec.data_window_s)
