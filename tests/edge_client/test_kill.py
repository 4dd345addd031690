"""kill -9 at any point of a device's round: afterwards there is nothing of it, or ledger, update and state.

A child process plays three rounds with a hook that counts every call inside the packages, and kills itself at a given
one; another child looks at what is there and plays on. Whatever leaves a device is what `run_round` returns, so it is
written down at once, with the ledger as it is then; so is every draw of the noise. The noise is the field's: a second
noising of a round would be other bytes.

The same checks are then turned on clients with planted faults, and must find every one of them, by an assertion.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hushfleet.edge_client.board.config import LimitsSection
from hushfleet.edge_client.storage.round_commit import OutboxEntry, RoundCommit
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.edge_client.worker.randomness import FieldRandomness
from hushfleet.edge_client.worker.trainer import DeviceRound, Trainer
from hushfleet.methods import method_of
from hushfleet.methods.state import PublicState
from hushfleet.params import ParamLayout
from hushfleet.privacy.ledger import Ledger
from hushfleet.privacy.mechanism import GaussianMechanism
from hushfleet.privacy.noise import SecureNoise
from hushfleet.wire.format.messages import RoundPlan
from hushfleet.wire.format.spec import BlobRef, ModelSpec, PrivacySpec, TaskSpec, WireSpec
from hushfleet.wire.format.update_values import decode_update
from support.kill import CALL, NETWORK, KillPoints, forked

ROUNDS = 3
SPREAD = 12
MULTIPLIER, CLIP_NORM = 2.0, 1.0

NAMED = {
    "the noise is drawn": (CALL, ("SecureNoise.normal",)),
    "the update is encoded": (CALL, ("encode_update",)),
    "the transaction begins": (CALL, ("DeviceStore._transaction",)),
    "the charge is written": ("execute", ("Ledger.charge",)),
    "update and state are written": ("execute", ("DeviceStore.commit_coded",)),
    "the round is committed": ("execute", ("DeviceStore._transaction",)),
    "the round is done": (CALL, ("DeviceRound.commit",)),
}

LAYOUT = ParamLayout(("body.weight", "head.weight"), ((50, 40), (10, 50)))
SPEC = TaskSpec(
    task="kill-1",
    rounds=ROUNDS,
    method="dp-fedavg",
    method_config={"batch_size": 4, "local_epochs": 1},
    privacy=PrivacySpec("device", "strict", clip_norm=CLIP_NORM, noise_multiplier=MULTIPLIER, delta=1e-5),
    wire=WireSpec(codec="float32"),
    model=ModelSpec(
        "tiny", LAYOUT, (1, 2, 2), ("a", "b"), (0.0,), (1.0,), (), BlobRef.of(b"gradient"), BlobRef.of(b"inference")
    ),
    memory_mib=1,
)


class WrittenNoise(SecureNoise):
    """The field's noise; each draw leaves a line."""

    def __init__(self, journal: Path, round: int) -> None:
        super().__init__()
        self._line = (journal, {"drawn": round})

    def normal(self, size: int) -> np.ndarray:
        write(*self._line)
        return super().normal(size)


class WrittenRandomness(FieldRandomness):
    def __init__(self, journal: Path) -> None:
        self._journal = journal

    def noise(self, round: int) -> SecureNoise:
        return WrittenNoise(self._journal, round)


def write(journal: Path, line: dict[str, Any]) -> None:
    with journal.open("a") as file:
        file.write(json.dumps(line) + "\n")


def plan_of(round: int) -> RoundPlan:
    before = PublicState.initial(LAYOUT.size).digest()
    return RoundPlan(SPEC.task, round, ROUNDS, "open", bytes(32), 4 * LAYOUT.size, {"one": before}, 1, 60.0)


def trainer_of(store: DeviceStore, folder: Path) -> Trainer:
    return Trainer(
        device="one",
        store=store,
        spec=SPEC,
        method=method_of(SPEC),
        **NETWORK,
        randomness=WrittenRandomness(folder / "journal"),
        limits=LimitsSection(epsilon_server=float("inf")),
    )


def play(folder: Path) -> None:
    """All rounds, each asked for twice, as a plan that comes again does."""
    with DeviceStore(folder / "store.sqlite", device="one") as store:
        trainer = trainer_of(store, folder)
        for round in range(1, ROUNDS + 1):
            for _ in range(2):
                entry = DeviceRound(trainer, plan_of(round)).run(np.zeros(LAYOUT.size, np.float32))
                charged = [each.payload_digest.hex() for each in store.ledger.entries() if each.round == round]
                write(folder / "journal", {"sent": round, "digest": entry.digest.hex(), "charged": charged})


def check(folder: Path, *, whole: bool) -> None:
    """What must hold at any moment.

    :param whole: nothing was killed, so that each round is there.
    """
    journal = folder / "journal"
    lines = [json.loads(line) for line in journal.read_text().splitlines()] if journal.exists() else []
    sent = [line for line in lines if "sent" in line]
    if not (folder / "store.sqlite").exists():
        assert not sent
        return
    with DeviceStore(folder / "store.sqlite", device="one") as store:
        stored = {round: store.outbox(SPEC.task, round) for round in range(1, ROUNDS + 1)}
        kept = {round: entry.digest.hex() for round, entry in stored.items() if entry is not None}
        charged = [(entry.round, entry.payload_digest.hex()) for entry in store.ledger.entries()]
        state = store.load_state(SPEC.task)
        key = store.identity.public_key
    assert not whole or len(kept) == ROUNDS
    assert charged == sorted(kept.items()), "each stored update is charged, once, and nothing else is"
    assert (state.public.participations if state else 0) == len(kept), "the state is of the last stored update"
    for line in sent:
        assert line["charged"] == [line["digest"]], "what leaves was charged before"
        assert line["digest"] == kept[line["sent"]], "a round has one update"
    for round, entry in stored.items():
        draws = [place for place, line in enumerate(lines) if line.get("drawn") == round]
        leaves = [place for place, line in enumerate(lines) if line.get("sent") == round]
        assert not leaves or not draws or draws[-1] < leaves[0], "nothing is noised again that has left"
        if entry is not None and entry.data:
            header, values, _ = decode_update(entry.data, public_key=key, counts=[2000, 500])
            # The update itself is at most the clip norm long; the rest of 2,500 values is noise.
            noise = float(np.linalg.norm(values)) / LAYOUT.size**0.5
            assert header.multiplier_server == MULTIPLIER
            assert 0.9 < noise / (MULTIPLIER * CLIP_NORM) < 1.1, "the noise is as large as the ledger says"


def test_killed_at_any_point_nothing_is_torn_and_nothing_is_noised_again(tmp_path: Path) -> None:
    result = tmp_path / "result"
    (tmp_path / "calm").mkdir()
    points = KillPoints(("edge_client", "hushfleet"), NAMED)
    labels = points.labels(lambda: play(tmp_path / "calm"), result)
    check(tmp_path / "calm", whole=True)
    for point, where in points.chosen(labels, spread=SPREAD).items():
        folder = tmp_path / f"kill-{point}"
        folder.mkdir()
        points.kill(lambda: play(folder), point, result)  # noqa: B023
        check(folder, whole=False)
        assert forked(lambda: play(folder), result) == 0, where or labels[point]  # noqa: B023
        check(folder, whole=True)


# planted faults


def noise_again(patch: pytest.MonkeyPatch) -> None:
    """A committed round is trained and noised again; its ledger entry is left as it is."""
    run, outbox, charge = DeviceRound.run, DeviceStore.outbox, Ledger.charge
    patch.setattr(DeviceStore, "outbox", lambda self, task, round: None)

    def charge_once(self: Ledger, charged: Any, **what: Any) -> None:
        if all(entry.round != what["round"] for entry in self.entries()):
            charge(self, charged, **what)

    def forgetful(self: DeviceRound, params: np.ndarray, **more: Any) -> OutboxEntry:
        self.store._connection.execute("DELETE FROM outbox WHERE round = ?", (self.plan.round,))
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(DeviceStore, "outbox", lambda self, task, round: None)
            return run(self, params, **more)

    patch.setattr(DeviceStore, "outbox", outbox)
    patch.setattr(Ledger, "charge", charge_once)
    patch.setattr(DeviceRound, "run", forgetful)


def no_charge(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Ledger, "charge", lambda self, charge, **what: None)


def charge_afterwards(patch: pytest.MonkeyPatch) -> None:
    """The ledger is written after the update was published, in the next transaction."""
    charge, plain = Ledger.charge, DeviceRound.run
    late: list[tuple[Ledger, Any, dict[str, Any]]] = []
    patch.setattr(Ledger, "charge", lambda self, charged, **what: late.append((self, charged, what)))

    def run(self: DeviceRound, params: np.ndarray, **more: Any) -> OutboxEntry:
        while late:
            ledger, charged, what = late.pop()
            with self.store._transaction("charge"):
                charge(ledger, charged, **what)
        return plain(self, params, **more)

    patch.setattr(DeviceRound, "run", run)


def half_the_noise(patch: pytest.MonkeyPatch) -> None:
    add_noise = GaussianMechanism.add_noise

    def add(self: GaussianMechanism, update: np.ndarray, *args: Any, **more: Any) -> np.ndarray:
        return (add_noise(self, update, *args, **more) + update) / 2

    patch.setattr(GaussianMechanism, "add_noise", add)


def state_left_behind(patch: pytest.MonkeyPatch) -> None:
    commit = DeviceStore.commit_round

    def old_state(self: DeviceStore, made: RoundCommit) -> OutboxEntry:
        state = self.load_state(made.task)
        return commit(self, made if state is None else replace(made, state=state))

    patch.setattr(DeviceStore, "commit_round", old_state)


@pytest.mark.parametrize("fault", [noise_again, no_charge, charge_afterwards, half_the_noise, state_left_behind])
def test_a_planted_fault_is_found_by_an_assertion(
    fault: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        fault(patch)
        play(tmp_path)
    with pytest.raises(AssertionError):
        check(tmp_path, whole=True)


def test_a_committed_round_is_returned_and_not_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with DeviceStore(tmp_path / "store.sqlite", device="one") as store:
        trainer = trainer_of(store, tmp_path)
        params = np.zeros(LAYOUT.size, np.float32)
        first = DeviceRound(trainer, plan_of(1)).run(params)
        for part in ("gradient", "randomness"):
            monkeypatch.setattr(trainer, part, None)
        assert DeviceRound(trainer, plan_of(1)).run(params) == first
