"""Was anything lost? Every promise of docs/wire.md that a run's files can prove or disprove, one by one."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from hushfleet.aggregator.observe.events import EventLog, iterate_events
from hushfleet.aggregator.storage.store import AggregatorStore
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.simulator.engines.fast.engine import run_rounds
from hushfleet.simulator.engines.fast.workers import Workers
from hushfleet.simulator.run_folder import Simulation, begin

ALL_CLOSED = "every round was closed"
ALL_UPDATES = "every round has an update of every device"


@dataclass(frozen=True)
class Finding:
    """One promise: kept or not, and what was found."""

    promise: str
    kept: bool
    found: str


def audit(simulation: Simulation, *, refusals_are_fine: bool) -> list[Finding]:
    """Reads the stores of the aggregator and of all devices.

    :param refusals_are_fine: something was killed, so that chunks of forgotten offers may have come.
    """
    names = [device.name for device in simulation.fleet.devices]
    task, wanted = simulation.prepared.spec.task, simulation.task.round.rounds
    with AggregatorStore(simulation.folder.aggregator) as store:
        rounds = store.rounds()
        accepted = {row.round: {update.device for update in store.updates(row.round)} for row in rounds}
        digests = {(row.round, update.device): update.digest for row in rounds for update in store.updates(row.round)}
        charged = Counter(charge.device for charge in store.charges())
        refusals: Counter[str] = Counter()
        for codes in store.refusals().values():
            refusals.update(codes)
        declines = len(store.declines())
    closed = [row.round for row in rounds if row.phase == "closed"]
    whole = [number for number, devices in accepted.items() if devices == set(names)]
    same_ledger, acked, same_bytes = 0, 0, 0
    for name in names:
        with DeviceStore(simulation.folder.device(name).store, device=name, inspect=True) as device:
            same_ledger += device.ledger.rounds_charged(task) == charged[name] == wanted
            for number in closed:
                entry = device.outbox(task, number)
                acked += entry is not None and entry.status == "acked"
                same_bytes += entry is not None and entry.digest == digests.get((number, name))
    updates = wanted * len(names)
    codes = Counter(
        event["code"] for event in iterate_events(simulation.folder.events) if event["event"] == "update"
    )
    return [
        Finding(ALL_CLOSED, closed == list(range(1, wanted + 1)), f"{len(closed)} of {wanted}"),
        Finding(ALL_UPDATES, len(whole) == wanted, f"{len(whole)} of {wanted}"),
        Finding("nobody declined", declines == 0, f"{declines} declines"),
        Finding("every ledger holds what was charged", same_ledger == len(names), f"{same_ledger} of {len(names)}"),
        Finding("every update was acknowledged on its device", acked == updates, f"{acked} of {updates}"),
        Finding("the bytes are those that the devices committed", same_bytes == updates, f"{same_bytes} of {updates}"),
        Finding("no update was refused", set(codes) <= {"accepted", "duplicate"}, _shown(codes)),
        Finding("no message was refused", refusals_are_fine or not refusals, _shown(refusals)),
    ]


def is_whole(findings: list[Finding]) -> bool:
    """Whether there are all updates of all rounds to take figures from."""
    return all(finding.kept for finding in findings if finding.promise in (ALL_CLOSED, ALL_UPDATES))


def compare_with_fast(simulation: Simulation, folder: Path) -> Finding:
    """Runs the same task and seed by the fast engine; all global models must be the same to the last bit."""
    fast = begin(simulation.task, folder, data_dir=simulation.data_dir)
    with Workers() as workers, EventLog(fast.folder.events) as events:
        run_rounds(fast, workers, events, evaluate_every=1 << 30, evaluate_last=0)
    ours, theirs = (_models(each) for each in (simulation, fast))
    same = sum(one == other for one, other in zip(ours, theirs, strict=False))
    kept = len(ours) > 0 and ours == theirs
    return Finding("the global models are those of the fast engine, bit by bit", kept, f"{same} of {len(theirs)}")


def _models(simulation: Simulation) -> list[bytes | None]:
    with AggregatorStore(simulation.folder.aggregator) as store:
        return [row.result_digest for row in store.rounds()]


def _shown(counted: Counter[str]) -> str:
    return ", ".join(f"{count:,} {code}" for code, count in sorted(counted.items())) or "none"
