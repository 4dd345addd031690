"""kill -9 of the guardian or of its worker, at named points of both and of the pipe, with a real store in a real file.

Afterwards the ledger, the update and the state are all there, or none is; and the bytes of an update never differ
between two sends, however often the client begins anew.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hushfleet.edge_client.board.config import DeviceConfig
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.edge_client.worker import process
from hushfleet.edge_client.worker.allowed import AllowedRound
from hushfleet.edge_client.worker.handover import Handover
from hushfleet.edge_client.worker.job import Died, Finished
from hushfleet.edge_client.worker.process import ChildProcess
from hushfleet.edge_client.worker.runtime import TaskRuntime
from hushfleet.methods.state import PublicState
from hushfleet.wire.format.messages import RoundPlan
from hushfleet.wire.format.update_values import SIGNED
from support.edge import DEVICE, Package
from support.kill import CALL, KillPoints, forked

ROUNDS, SPREAD = 2, 6

NAMED = {
    "the job is made": (CALL, ("Handover.begin_round",)),
    "the worker is started": (CALL, ("ChildProcess.begin",)),
    "a part of the outcome has come": (CALL, ("Frames.add",)),
    "the outcome is read": (CALL, ("Frames.next",)),
    "the outcome is checked": (CALL, ("Handover._checked",)),
    "the update is signed": (CALL, ("signed",)),
    "the transaction begins": (CALL, ("DeviceStore._transaction",)),
    "the charge is written": ("execute", ("Ledger.charge",)),
    "update and state are written": ("execute", ("DeviceStore.commit_coded",)),
    "the round is committed": (CALL, ("DeviceStore.commit_coded",)),
}

WORKER_POINTS = {
    "it has limited itself": ("limits", "close", "after"),
    "it begins to train": ("LoadedTask", "begins", "before"),
    "the noise is drawn": ("SecureNoise", "normal", "before"),
    "the noise was drawn": ("SecureNoise", "normal", "after"),
    "the update is encoded": ("JobStore", "commit_round", "before"),
    "the round is done": ("JobStore", "commit_round", "after"),
}


def write(journal: Path, line: dict[str, Any]) -> None:
    with journal.open("a") as file:
        file.write(json.dumps(line) + "\n")


def play(folder: Path, config: DeviceConfig, package: Package) -> None:
    """All rounds, each asked for twice, as a plan that comes again does; a worker that dies is started again."""
    board = replace(config, simulation=None, device=replace(config.device, state_dir=str(folder)))
    with DeviceStore(board.store_path, device=DEVICE) as store:
        for digest, blob in {**package.blobs}.items():
            if store.blob(digest) is None:
                store.put_blob(digest, blob)
        (digest,) = (each for each in package.blobs if package.blobs[each] == package.data)
        task = TaskRuntime(digest=digest, spec=package.spec, config=board, store=store)
        handover = Handover(board, store, ChildProcess())
        for number in range(1, ROUNDS + 1):
            for _ in range(2):
                entry = store.outbox(package.spec.task, number)
                if entry is None:
                    entry = trained(handover, task, plan_of(package, number), package)
                charged = [each.payload_digest.hex() for each in store.ledger.entries() if each.round == number]
                write(folder / "journal", {"sent": number, "digest": entry.digest.hex(), "charged": charged})


def trained(handover: Handover, task: TaskRuntime, plan: RoundPlan, package: Package) -> Any:
    round = AllowedRound(task.party, plan)
    _ = round.charge
    for _ in range(3):
        model = package.initial.astype("<f4").tobytes()
        handover.begin_round(task, round, model, nominal_s=None, known=None, again=False)
        while (outcome := handover.poll(task)) is None:
            time.sleep(0.002)
        if isinstance(outcome, Finished):
            return handover.commit(outcome, round, task)
        assert isinstance(outcome, Died)
        process._ENTRY = ENTRY  # it is killed once
    raise AssertionError("workers die again and again")


ENTRY = process._ENTRY


def plan_of(package: Package, round: int) -> RoundPlan:
    size = package.spec.model.layout.size
    before = PublicState.initial(size).digest()
    return RoundPlan(package.spec.task, round, 5, "open", bytes(32), 4 * size, {DEVICE: before}, 1, 60.0)


def check(folder: Path, package: Package, *, whole: bool) -> None:
    """What must hold at any moment.

    :param whole: nothing was killed, so that each round is there.
    """
    journal, task = folder / "journal", package.spec.task
    lines = [json.loads(line) for line in journal.read_text().splitlines()] if journal.exists() else []
    if not (folder / "store.sqlite").exists():
        assert not lines
        return
    with DeviceStore(folder / "store.sqlite", device=DEVICE) as store:
        stored = {round: store.outbox(task, round) for round in range(1, ROUNDS + 1)}
        kept = {round: entry.digest.hex() for round, entry in stored.items() if entry is not None}
        charged = [(entry.round, entry.payload_digest.hex()) for entry in store.ledger.entries()]
        state, key = store.load_state(task), store.identity.public_key
    assert not whole or len(kept) == ROUNDS
    assert charged == sorted(kept.items()), "each stored update is charged, once, and nothing else is"
    assert (state.public.participations if state else 0) == len(kept), "the state is of the last stored update"
    for line in lines:
        assert line["charged"] == [line["digest"]], "what leaves was charged before"
        assert line["digest"] == kept[line["sent"]], "a round has one update"
    for entry in stored.values():
        if entry is not None and entry.data:
            header, _ = SIGNED.authenticate(entry.data, public_key=key)
            assert header.multiplier_server == package.spec.privacy.noise_multiplier


def test_a_guardian_killed_at_any_point_leaves_all_or_nothing(
    tmp_path: Path, config: DeviceConfig, package: Package
) -> None:
    result = tmp_path / "result"
    (tmp_path / "calm").mkdir()
    watched = ("edge_client/worker", "edge_client/storage", "hushfleet/privacy", "hushfleet/wire/format/update.py")
    points = KillPoints(watched, NAMED)
    labels = points.labels(lambda: play(tmp_path / "calm", config, package), result)
    check(tmp_path / "calm", package, whole=True)
    for point, where in points.chosen(labels, spread=SPREAD).items():
        folder = tmp_path / f"kill-{point}"
        folder.mkdir()
        # what is polled while the worker works differs from run to run, so the last points may not come
        killed = forked(lambda: points._counted(lambda: play(folder, config, package), point), result)  # noqa: B023
        assert killed in (-9, 0), where or labels[point]
        check(folder, package, whole=killed == 0)
        assert forked(lambda: play(folder, config, package), result) == 0, where or labels[point]  # noqa: B023
        check(folder, package, whole=True)


def dying(where: str, name: str, when: str) -> str:
    """The entry of a worker that kills itself before or after a call."""
    places = {
        "limits": "hushfleet.edge_client.worker.limits",
        "LoadedTask": "hushfleet.edge_client.worker.loaded_task",
        "JobStore": "hushfleet.edge_client.worker.job_store",
        "SecureNoise": "hushfleet.privacy.noise",
    }
    module = places[where]
    owner = module if where == "limits" else f"{module}.{where}"
    return f"""
import os, resource, sys; pipe = int(sys.argv[1]); sys.path[:] = sys.argv[2:]
import ctypes, {module}
plain = {owner}.{name}
def die():
    ctypes.string_at(0)
def call(*args, **more):
    if {when == "before"}:
        die()
    found = plain(*args, **more)
    die()
{owner}.{name} = call
from hushfleet.edge_client.worker.main import main
main(pipe)
"""


HALF = """
import sys; pipe = int(sys.argv[1]); sys.path[:] = sys.argv[2:]
import os
from hushfleet.edge_client.worker import main
from hushfleet.edge_client.worker.job import Finished
plain = main.frame
def half(message):
    data = plain(message)
    if not isinstance(message, Finished):
        return data
    os.write(pipe, data[: len(data) // 2])
    os._exit(1)
main.frame = half
main.main(pipe)
"""

ENTRIES = {name: dying(*point) for name, point in WORKER_POINTS.items()} | {"half of the outcome is sent": HALF}


@pytest.mark.parametrize("name", ENTRIES)
def test_a_worker_killed_at_any_point_has_spent_nothing(
    tmp_path: Path, config: DeviceConfig, package: Package, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(process, "_ENTRY", ENTRIES[name])
    folder = tmp_path / "board"
    folder.mkdir()
    begun: list[int] = []
    begin = ChildProcess.begin

    def counted(self: ChildProcess, job: Any) -> None:
        begun.append(1)
        begin(self, job)

    monkeypatch.setattr(ChildProcess, "begin", counted)
    play(folder, config, package)
    assert len(begun) == ROUNDS + 1, "it was killed once"
    check(folder, package, whole=True)


@pytest.mark.parametrize("fault", ["no-charge", "sent-before", "noised-again"])
def test_a_planted_fault_is_found(
    tmp_path: Path, config: DeviceConfig, package: Package, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    from hushfleet.privacy.ledger import Ledger

    if fault == "no-charge":
        monkeypatch.setattr(Ledger, "charge", lambda self, charge, **what: None)
    elif fault == "sent-before":
        commit = Handover.commit

        def early(self: Handover, done: Finished, round: AllowedRound, task: TaskRuntime) -> Any:
            write(tmp_path / "journal", {"sent": round.plan.round, "digest": "of what was not stored", "charged": []})
            return commit(self, done, round, task)

        monkeypatch.setattr(Handover, "commit", early)
    else:
        outbox = DeviceStore.outbox

        def forgets(self: DeviceStore, task: str, round: int) -> Any:
            self._connection.execute("DELETE FROM outbox WHERE round = ?", (round,))
            return outbox(self, task, round)

        monkeypatch.setattr(DeviceStore, "outbox", forgets)
        monkeypatch.setattr(Ledger, "charge", lambda self, charge, **what: None)
    play(tmp_path, config, package)
    monkeypatch.undo()
    with pytest.raises(AssertionError):
        check(tmp_path, package, whole=True)
