"""Runs the rounds of a task in a world whose boards train with zeros, for a forecast.

The results are outcomes of rounds, and what each device has spent (`FleetDevice.spent`); what was charged is read from
the devices' own ledgers.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from hushfleet.aggregator.config.round_section import RoundSection
from hushfleet.aggregator.payloads.prepare import PreparedTask
from hushfleet.aggregator.rounds.policy import PLAN_ENTRY_BYTES
from hushfleet.edge_client.board.config import LimitsSection
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.errors import BadInput, HushfleetError
from hushfleet.simulator.schedule import Schedule
from hushfleet.simulator.world.board import WorldBoard, ZeroTraining, board_config
from hushfleet.simulator.world.clock import WorldClock
from hushfleet.simulator.world.hub import LocalHub
from hushfleet.simulator.world.outcomes import STARTS, Arrival, FleetDevice, RoundOutcome
from hushfleet.simulator.world.run import LinkOptions, World, WorldServer
from hushfleet.simulator.world.short_cuts import MOST_BOARDS, MOST_PARAMETERS, SmallerFleet, SmallerNetwork, short_cuts
from hushfleet.simulator.world.sizes import sizes_of
from hushfleet.simulator.world.times import Costs

_LONGEST_ROUND_S = 90 * 86400.0

NO_WINDOW = (
    "no round ever opens: the schedule's first window begins after its last day (schedule.until, or the end of --days)"
)


T = TypeVar("T")


class WorldFleet:
    """The rounds of one fleet, once.

    :param fleet: new devices, in the fleet's order; `spent` is filled while the rounds run.
    :param seed: the task's seed.
    :param starts: date and time of the start.
    :param short: whether short-cuts are taken (`short_cuts`). `most_parameters`: then a larger network is scaled down;
        `most_boards`: and of a larger fleet, in `fleet` afterwards, each device stands for `weight` devices.
    """

    def __init__(
        self,
        prepared: PreparedTask,
        rules: RoundSection,
        fleet: Sequence[FleetDevice],
        *,
        costs: Costs,
        schedule: Schedule,
        seed: int,
        starts: datetime = STARTS,
        options: LinkOptions | None = None,
        short: bool = False,
        most_parameters: int = MOST_PARAMETERS,
        most_boards: int = MOST_BOARDS,
    ) -> None:
        self._short = short
        is_secure = prepared.spec.privacy.secure is not None  # whose committee and masks depend on the whole fleet
        smaller = SmallerFleet(fleet, rules, costs, most=most_boards if short and not is_secure else len(fleet))
        self._whole, self.weight, rules = smaller.whole, smaller.weight, smaller.rules
        self.fleet, self._costs, self._schedule = smaller.boards, smaller.costs, smaller.of(schedule)
        task = replace(prepared.task, round=rules, data=replace(prepared.task.data, devices=len(self.fleet)))
        whole = replace(prepared, task=task, evaluate_global=None)
        sizes = sizes_of(whole, name_bytes=len(fleet[0].name))
        self._network = SmallerNetwork(whole, sizes, most=most_parameters if short else whole.spec.model.layout.size)
        self.prepared = self._network.prepared
        self._rules, self._seed = rules, seed
        self._by_name = {device.name: device for device in self.fleet}
        self._starts = starts
        self._options = options or LinkOptions()
        self._cohorts: dict[int, list[str]] = {}
        self._unsettled: tuple[int, int, list[str]] = (0, 0, [])  # round, cohort, and who had not charged at its close

    def rounds(self) -> Iterator[RoundOutcome]:
        """Yields one round after the other. Raises `HushfleetError` if a round never opens or never closes."""
        memory = tempfile.TemporaryDirectory(prefix="hushfleet-world-", dir=_memory_folder())
        with memory as folder, short_cuts() if self._short else nullcontext():
            self.world = self._made(Path(folder))
            self.world.start()
            try:
                if math.isinf(self.world.server.opens):
                    raise BadInput(NO_WINDOW)
                yield from self._rounds()
            finally:
                self._end()

    def _made(self, folder: Path) -> World:
        prepared, clock = self.prepared, WorldClock()
        hub = LocalHub(clock=clock)
        hub.packet_bytes = self._packet_bytes
        server = WorldServer(
            prepared,
            folder / "server",
            clock=clock,
            hub=hub,
            starts=self._starts,
            accept_s=self._costs.accept_s,
            close_s=self._costs.close_s,
            on_opened=self._opened,
        )
        train = ZeroTraining(prepared.spec, prepared.method)

        def made(index: int, device: FleetDevice) -> WorldBoard:
            state, name = folder / device.name, device.name
            limits = LimitsSection.of_simulation(
                prepared.spec.privacy, memory_mib=self._schedule.memory_mib.get(name, 0)
            )
            return WorldBoard(
                name,
                clock=clock,
                hub=hub,
                times=replace(device.times, write_s_per_byte=device.times.write_s_per_byte * self._network.scale),
                config=board_config(
                    name, index=index, seed=self._seed, board=device.board, folder=str(state), limits=limits
                ),
                store=lambda: DeviceStore(state / "store.sqlite", device=name, durable=False),
                train=train,
            )

        boards = [made(index, device) for index, device in enumerate(self.fleet)]
        return World(clock, hub, server, boards, schedule=self._schedule, options=self._options, seed=self._seed)

    def _packet_bytes(self, topic: str, payload_bytes: int) -> int:
        """Returns the bytes of a packet, with those devices of a plan that others of its cohort stand for."""
        coordinator = self.world.server.coordinator
        if self.weight > 1 and topic.endswith("/round") and coordinator is not None:
            count, entry_bytes = len(coordinator.engine.cohort), len(self.fleet[0].name) + PLAN_ENTRY_BYTES
            if payload_bytes > count * entry_bytes:  # otherwise it names no cohort
                payload_bytes += (self._whole(count) - count) * entry_bytes
        return self._network.weigh(topic, payload_bytes, self._is_model)

    def _is_model(self, digest: bytes) -> bool:
        coordinator = self.world.server.coordinator
        return coordinator is None or all(ref.digest != digest for ref in coordinator.engine.model.differences.refs)

    def _opened(self, round: int, cohort: list[str]) -> None:
        self._cohorts[round] = cohort
        if self._rules.has_cohort:
            for name in cohort:
                self._by_name[name].spent.chosen += 1
        self.world.round_opened(round)

    def _rounds(self) -> Iterator[RoundOutcome]:
        world, closed = self.world, 0
        log = _Log(world.server.events_path)
        give_up_at = self.world.server.opens + _LONGEST_ROUND_S
        while not world.server.finished:
            if not world.advance(give_up_at):
                raise HushfleetError(world.server.stuck)
            coordinator = world.server.coordinator
            if coordinator is None or coordinator.engine.closed_rounds == closed:
                continue
            closed = coordinator.engine.closed_rounds
            yield from self._outcomes(log.read())
            give_up_at = self.world.server.opens + _LONGEST_ROUND_S

    def _outcomes(self, events: list[dict[str, Any]]) -> Iterator[RoundOutcome]:
        """Yields the rounds that these events close."""
        for event in events:
            self._note(event)
            if event["event"] == "round_close":
                yield self._outcome(event)

    def _note(self, event: dict[str, Any]) -> None:
        kind, at = event["event"], event["at"]
        if kind == "round_open":
            self._opened_s, self._declined, self._extensions = at, {}, 0
            self._arrivals: dict[tuple[str, int], Arrival] = {}
        elif kind == "round_extended":
            self._extensions += 1
        elif kind == "update" and event.get("code", "accepted") == "accepted":
            round = event["round"] - event.get("staleness", 0)
            self._arrivals[event["device"], round] = Arrival(event["device"], at, event["bytes"], round)
        elif kind == "decline":
            self._declined[event["device"]] = event["code"]

    def _outcome(self, event: dict[str, Any]) -> RoundOutcome:
        used = len(self._arrivals) >= self._rules.min_updates and bool(event.get("participants", True))
        fates = self._fates(event["round"], used) if self._rules.has_cohort else self._fates_of_updates(used)
        return RoundOutcome(
            round=event["round"],
            opened_s=self._opened_s,
            closed_s=event["at"],
            cohort=tuple(self._cohorts[event["round"]]),
            arrivals=tuple(self._arrivals.values()),
            late=tuple(fates["late"]),
            given_up=tuple(fates["given_up"]),
            declined=tuple(fates["declined"]),
            lost=tuple(fates["lost"]),
            extensions=self._extensions,
            used=used,
        )

    def _fates(self, round: int, used: bool) -> dict[str, list[str]]:
        """Counts what became of each device of a cohort; returns their names by the field of `Spent`."""
        self._settle()
        cohort, boards, arrived = self._cohorts[round], self.world.boards, {name for name, _ in self._arrivals}
        size = self._whole(len(cohort))
        fates: dict[str, list[str]] = defaultdict(list)
        for name in cohort:
            board, spent = boards[name], self._by_name[name].spent
            charged = self._is_charged(name, round)
            if name in arrived:
                fate = "used"
            elif charged:
                fate = "late"
            elif name in self._declined:
                fate = "declined"
            else:
                fate = "given_up" if board.has_heard_of(round) else "lost"
            fates[fate].append(name)
            setattr(spent, fate, getattr(spent, fate) + 1)
            if charged:
                spent.charged[size] += 1
                spent.unused[size] += fate == "late" or not used
        self._unsettled = round, size, fates["given_up"]
        return fates

    def _fates_of_updates(self, used: bool) -> dict[str, list[str]]:
        """Counts the updates of buffered rounds: one that is charged may go into a model of many rounds later."""
        for arrival in self._arrivals.values() if used else ():
            self._by_name[arrival.device].spent.used += 1
        for name in self._declined:
            self._by_name[name].spent.declined += 1
        self._count_charged()
        return defaultdict(list, declined=list(self._declined))

    def _count_charged(self) -> None:
        """Reads from all ledgers how many updates were charged; those that are in no model so far are late."""
        task, size = self.prepared.spec.task, self._whole(len(self.fleet))
        for name, device in self._by_name.items():
            spent, made = device.spent, self._asked(name, lambda store: store.ledger.rounds_charged(task), 0)
            spent.charged[size] += made - spent.charged.total()
            spent.unused[size] = spent.late = made - spent.used
            spent.chosen = made + spent.declined

    def _settle(self) -> None:
        """Counts who committed an update before it had heard that its round was over."""
        round, size, names = self._unsettled
        for name in names:
            if self._is_charged(name, round):
                spent = self._by_name[name].spent
                spent.given_up, spent.late = spent.given_up - 1, spent.late + 1
                spent.charged[size] += 1
                spent.unused[size] += 1
        self._unsettled = round, size, []

    def _is_charged(self, name: str, round: int) -> bool:
        """Returns whether a device has charged a round."""
        return self._asked(name, lambda store: store.is_charged(self.prepared.spec.task, round), False)

    def _asked(self, name: str, read: Callable[[DeviceStore], T], without: T) -> T:
        """Returns what `read` finds in a device's store; one that is switched off is asked in its file."""
        board = self.world.boards[name]
        if board.store is None:
            return without
        if board.is_on:
            return read(board.store)
        with DeviceStore(board.store.path, device=name, inspect=True) as store:
            return read(store)

    def _end(self) -> None:
        """Fills in what the devices have spent, and closes the stores."""
        (self._settle if self._rules.has_cohort else self._count_charged)()
        world = self.world
        for name, board in world.boards.items():
            spent = self._by_name[name].spent
            spent.up_bytes, spent.down_bytes = float(board.cables.up.bytes), float(board.cables.down.bytes)
            spent.on_s, spent.compute_s = board.on_s, board.compute_s
            spent.unused = Counter({size: count for size, count in spent.unused.items() if count})
            board.kill(will_after_s=0.0)
        world.server.kill()


class _Log:
    """Reads an event log while it grows."""

    def __init__(self, path: Path) -> None:
        self._path, self._at = path, 0

    def read(self) -> list[dict[str, Any]]:
        """Returns the new events."""
        with self._path.open("rb") as file:
            file.seek(self._at)
            lines = file.readlines()
            self._at = file.tell()
        return [json.loads(line) for line in lines]


def _memory_folder() -> str | None:
    """Returns a folder in memory, if the system has one: thousands of small stores are written."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None
