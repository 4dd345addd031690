"""What must hold after any run, whatever happened in it, read from the stores and from what passed the broker.

Each function gives sentences about what does not hold; none is good.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

from chaos.tap import Tap, Transfer
from hushfleet.aggregator.storage.store import AggregatorStore
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.errors import HushfleetError
from hushfleet.simulator.engines.fast.device import CohortDevice, store_of
from hushfleet.simulator.run_folder import Simulation
from hushfleet.wire.format.identity import SIGNATURE_BYTES, verify

Missing = Collection[tuple[int, str]]


def models_of(simulation: Simulation) -> dict[str, str]:
    """File name -> SHA-256 of every global model that is kept."""
    files = sorted(simulation.folder.aggregator.glob("*.safetensors"))
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def missing_of(
    simulation: Simulation, may_decline: Callable[[str, str], bool]
) -> tuple[set[tuple[int, str]], list[str]]:
    """(round, device) of updates that no round has, and what is wrong with that.

    :param may_decline: device and code -> whether there was a reason to decline a round.
    """
    names = [device.name for device in simulation.fleet.devices]
    with AggregatorStore(simulation.folder.aggregator) as store:
        declined = {(round, device): code for round, device, code, _ in store.declines()}
        accepted = {(r, update.device) for r in _rounds(simulation) for update in store.updates(r)}
    missing = {(r, name) for r in _rounds(simulation) for name in names} - accepted
    wrong = [
        f"round {r} has no update of {name} (declined: {declined.get((r, name), 'no')})"
        for r, name in sorted(missing)
        if not may_decline(name, declined.get((r, name), ""))
    ]
    return missing, wrong


def check_stores(simulation: Simulation, *, missing: Missing = ()) -> list[str]:
    """Every update counted once, every round charged once, and what was counted is what was charged.

    :param missing: (round, device) of updates that are rightly not there.
    """
    return list(_check_stores(simulation, missing))


def _check_stores(simulation: Simulation, missing: Missing) -> Iterator[str]:
    names = [device.name for device in simulation.fleet.devices]
    rounds = _rounds(simulation)
    task = simulation.prepared.spec.task
    with AggregatorStore(simulation.folder.aggregator) as store:
        rows = store.rounds()
        accepted = {(r, update.device): update for r in rounds for update in store.updates(r)}
        charges = {(charge.round, charge.device): charge for charge in store.charges()}
    if (phases := [(row.round, row.phase) for row in rows]) != [(r, "closed") for r in rounds]:
        yield f"rounds {phases}"
    expected = {(r, name) for r in rounds for name in names} - set(missing)
    for row in rows:
        counted, wanted = (row.metrics or {}).get("participants"), sum(r == row.round for r, _ in expected)
        if counted != wanted:
            yield f"round {row.round} counted {counted} updates, not {wanted}"
    if set(accepted) != expected or set(charges) != expected:
        yield f"stored updates are {sorted(accepted)}, charges {sorted(charges)}, expected were {sorted(expected)}"
    for name in names:
        try:
            with _store_of(simulation, name) as store:
                entries, digests = store.ledger.entries(), _charged(store, simulation)
        except HushfleetError as error:
            if any(device == name for _, device in expected):
                yield f"the ledger of {name}: {error}"
            continue
        charged = {entry.round: entry for entry in entries}
        if len(charged) != len(entries) or {entry.task for entry in entries} - {task}:
            yield f"the ledger of {name} has {[(entry.task, entry.round) for entry in entries]}"
        if unsent := set(charged) - {r for r, device in expected if device == name}:
            yield f"{name} was charged for rounds {sorted(unsent)}, which have no update of it"
        for r, device in sorted(expected & set(accepted)):
            if device != name:
                continue
            entry, charge = charged.get(r), charges.get((r, name))
            if entry is None or accepted[r, name].digest not in digests[r]:
                yield f"round {r} counted an update of {name} that its ledger does not have"
            elif charge is None or (charge.device_rounds, charge.noise_multiplier) != (
                sum(number <= r for number in charged),
                entry.charge.noise_multiplier,
            ):
                yield f"round {r}: {name} was charged {entry.charge}, the aggregator's book has {charge}"


def check_at_death(simulation: Simulation, device: str, tap: Tap) -> list[str]:
    """Of a device that is down now: what has left it so far is in its ledger already. Works on a copy of its store."""
    path = simulation.folder.device(device).store
    if not path.exists():
        return [f"{device} sent something before it had a store"] if tap.sent(device) else []
    with tempfile.TemporaryDirectory(dir=path.parent.parent) as folder:
        for name in (path.name, f"{path.name}-wal"):
            if (file := path.with_name(name)).exists():
                shutil.copy(file, folder)
        with DeviceStore(Path(folder) / path.name, device=device, inspect=True) as store:
            key, charged = store.identity.public_key, set().union(*_charged(store, simulation).values())
    left = {*tap.offered(device, key), *(t.digest for t in tap.transfers if _is_of(t, device, key))}
    short = len(left - charged)
    return [f"when {device} was struck down, {short} updates had left it that its ledger did not have"] if short else []


def check_outboxes(simulation: Simulation, devices: Collection[str]) -> list[str]:
    """What a device holds as its update of a round is what its ledger has."""
    wrong, task = [], simulation.prepared.spec.task
    for name in devices:
        with _store_of(simulation, name) as store:
            charged = {entry.round: entry.payload_digest for entry in store.ledger.entries(task)}
            for r in _rounds(simulation):
                held = store.outbox(task, r)
                if (held and held.digest) != charged.get(r):
                    wrong.append(f"{name} holds an update of round {r} that is not the one in its ledger")
    return wrong


def check_tap(simulation: Simulation, tap: Tap, *, devices: Collection[str] | None = None) -> list[str]:
    """Whatever left a device was charged before, and of each round only one noising ever left, and answers for one
    set of devices.

    :param devices: those that are honest; all by default. What others said in their names does not count.
    """
    names = [device.name for device in simulation.fleet.devices] if devices is None else devices
    wrong = [f"a message on {topic} cannot be read: {error}" for topic, _, error in tap.errors]
    if not tap.transfers:
        wrong.append("no update passed the broker")
    payloads: defaultdict[tuple[str, int], set[bytes]] = defaultdict(set)
    for name in names:
        with _store_of(simulation, name) as store:
            key, charged = store.identity.public_key, _charged(store, simulation)
        for transfer in tap.transfers:
            if _is_of(transfer, name, key):
                payloads[name, transfer.round].add(transfer.payload)
                if transfer.digest not in charged[transfer.round]:
                    wrong.append(f"{name} sent an update of round {transfer.round} that its ledger does not have")
        for digest, offer in tap.offered(name, key).items():
            if digest not in charged[offer.round]:
                wrong.append(f"{name} offered an update of round {offer.round} that its ledger does not have")
    sets: defaultdict[tuple[str, int], set[bytes]] = defaultdict(set)
    for answer in tap.answers:
        sets[answer.device, answer.round].add(answer.included)
    wrong += [f"{name} answered for {len(seen)} sets in round {r}" for (name, r), seen in sets.items() if len(seen) > 1]
    wrong += [f"{name} sent {len(seen)} noisings of round {r}" for (name, r), seen in payloads.items() if len(seen) > 1]
    return wrong


def check_metrics(simulation: Simulation, starts: Mapping[str, int]) -> list[str]:
    """No device trained a round again that it had committed, by its own account.

    It measures a round before it commits it, so that each of its starts but the first may measure one round again.

    :param starts: device -> how often it was started.
    """
    wrong = []
    for name, started in starts.items():
        path = simulation.folder.device(name).metrics
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        rounds = [line.split('"round": ')[1].split(",")[0] for line in lines if '"round": ' in line]
        if len(rounds) - len(set(rounds)) >= max(started, 1):
            times = "once" if started == 1 else f"{started} times"
            wrong.append(f"{name} was started {times} and measured the rounds {rounds}")
    return wrong


def _store_of(simulation: Simulation, device: str) -> DeviceStore | CohortDevice:
    return store_of(simulation.folder, device)


def _rounds(simulation: Simulation) -> list[int]:
    return list(range(1, simulation.prepared.spec.rounds + 1))


def _charged(store: DeviceStore | CohortDevice, simulation: Simulation) -> defaultdict[int, set[bytes]]:
    """Round -> SHA-256 of the update that is charged, in both forms in which it may leave, and of a member's answer."""
    task = simulation.prepared.spec.task
    charged: defaultdict[int, set[bytes]] = defaultdict(set)
    for entry in store.ledger.entries(task):
        held = store.outbox(task, entry.round)
        charged[entry.round] = {entry.payload_digest}
        if held is not None and held.digest == entry.payload_digest and held.attached_digest:
            charged[entry.round].add(held.attached_digest)
    for r in _rounds(simulation):
        if isinstance(store, DeviceStore) and (answer := store.answers.of(task, r)):
            charged[r].add(answer.digest)
    return charged


def _is_of(transfer: Transfer, device: str, public_key: bytes) -> bool:
    try:
        verify(public_key, transfer.data[:-SIGNATURE_BYTES], transfer.data[-SIGNATURE_BYTES:])
    except HushfleetError:
        return False
    return transfer.device == device
