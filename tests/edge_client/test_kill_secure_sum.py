"""kill -9 at any point of a device's part in secure aggregation: one update and one answer a round, stored before they
leave.

As `test_kill.py`: what leaves is written down at once, with the tables as they are then. The device is killed once, and
started again by an aggregator that has forgotten everything and asks for another set of devices.
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
from hushfleet.edge_client.storage.answers import AnswerEntry, Answers
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.edge_client.worker.randomness import FieldRandomness
from hushfleet.edge_client.worker.trainer import DeviceRound, Trainer
from hushfleet.errors import PrivacyError
from hushfleet.methods import method_of
from hushfleet.params import ParamLayout
from hushfleet.secure.membership_list import MembershipList
from hushfleet.wire.format.identity import Identity
from hushfleet.wire.format.messages import RoundPlan, SecurePlan
from hushfleet.wire.format.spec import BlobRef, ModelSpec, PrivacySpec, SecureSpec, TaskSpec, WireSpec
from support.kill import CALL, NETWORK, KillPoints, forked

ROUNDS, SPREAD, DEVICES = 2, 8, 9

NAMED = {
    "the update is masked": (CALL, ("SecureRound.masked",)),
    "the update is stored": ("execute", ("DeviceStore.commit_coded",)),
    "the answer is made": (CALL, ("SecureRound.answer",)),
    "the answer is written": ("execute", ("Answers.commit",)),
    "the answer is stored": (CALL, ("Answers.commit",)),
}

LAYOUT = ParamLayout(("body.weight", "head.weight"), ((10, 8), (4, 10)))
SPEC = TaskSpec(
    task="kill-sum",
    rounds=ROUNDS,
    method="dp-fedavg",
    method_config={"batch_size": 4, "local_epochs": 1},
    privacy=PrivacySpec(
        "device", "secure", 1.0, 2.0, 1e-5, secure=SecureSpec(16, min_devices=6, honest_devices=6, honest_fraction=1.0)
    ),
    wire=WireSpec(codec="masked"),
    model=ModelSpec(
        "tiny", LAYOUT, (1, 2, 2), ("a", "b"), (0.0,), (1.0,), (), BlobRef.of(b"gradient"), BlobRef.of(b"inference")
    ),
    memory_mib=1,
)
OTHERS = {f"other-{number}": Identity.from_bytes(bytes([number] * 32)).public_key for number in range(1, DEVICES)}
EVERYBODY, ALL_BUT_ONE = b"\xff\x80", b"\xff\x00"


def write(folder: Path, line: dict[str, Any]) -> None:
    with (folder / "journal").open("a") as file:
        file.write(json.dumps(line) + "\n")


def play(folder: Path, included: bytes = EVERYBODY) -> None:
    """All rounds; each update and each answer is asked for twice."""
    with DeviceStore(folder / "store.sqlite", device="one") as store:
        membership_list = MembershipList.of({**OTHERS, "one": store.identity.public_key})
        trainer = Trainer(
            device="one",
            store=store,
            spec=SPEC,
            method=method_of(SPEC),
            **NETWORK,
            randomness=FieldRandomness(),
            limits=LimitsSection.of_simulation(SPEC.privacy),
        )
        for number in range(1, ROUNDS + 1):
            secure = SecurePlan(BlobRef.of(membership_list.to_bytes()), 1.0)
            plan = RoundPlan(
                SPEC.task, number, ROUNDS, "open", bytes(32), 4 * LAYOUT.size, {}, 1, 60.0, secure=secure
            )  # fmt: skip
            for _ in range(2):
                entry = DeviceRound(trainer, plan, membership_list).run(np.zeros(LAYOUT.size, np.float32))
                charged = [each.payload_digest.hex() for each in store.ledger.entries() if each.round == number]
                write(folder, {"update": number, "digest": entry.digest.hex(), "charged": charged})
            asks = replace(plan, phase="unmask", secure=replace(secure, included=included))
            for _ in range(2):
                try:
                    answer = DeviceRound(trainer, asks, membership_list).answer()
                except PrivacyError:
                    continue
                stored = store.answers.of(SPEC.task, number)
                write(folder, {"answer": number, "digest": answer.digest.hex(), "stored": stored == answer})


def check(folder: Path) -> None:
    journal = folder / "journal"
    lines = [json.loads(line) for line in journal.read_text().splitlines()] if journal.exists() else []
    for number in range(1, ROUNDS + 1):
        updates = [line for line in lines if line.get("update") == number]
        answers = [line for line in lines if line.get("answer") == number]
        assert len({line["digest"] for line in updates}) <= 1, "one masked update a round"
        assert all(line["charged"] == [line["digest"]] for line in updates), "what leaves was charged before"
        assert len({line["digest"] for line in answers}) <= 1, "one answer a round, for one set"
        assert all(line["stored"] for line in answers), "an answer is stored before it leaves"


def test_killed_at_any_point_a_round_has_one_update_and_one_answer(tmp_path: Path) -> None:
    result = tmp_path / "result"
    (tmp_path / "calm").mkdir()
    points = KillPoints(("edge_client", "hushfleet"), NAMED)
    labels = points.labels(lambda: play(tmp_path / "calm"), result)
    check(tmp_path / "calm")
    for point, where in points.chosen(labels, spread=SPREAD).items():
        folder = tmp_path / f"kill-{point}"
        folder.mkdir()
        points.kill(lambda: play(folder), point, result)  # noqa: B023
        check(folder)
        assert forked(lambda: play(folder, ALL_BUT_ONE), result) == 0, where or labels[point]  # noqa: B023
        check(folder)


def forgets(patch: pytest.MonkeyPatch) -> None:
    """Answers leave without being stored."""
    commit = Answers.commit

    def forgetful(self: Answers, task: str, round: int, **answer: bytes) -> AnswerEntry:
        entry = commit(self, task, round, **answer)
        self._connection.execute("DELETE FROM answers")
        return entry

    patch.setattr(Answers, "commit", forgetful)


def answers_any_set(patch: pytest.MonkeyPatch) -> None:
    """An answer that was stored is not looked at before another is made."""
    answer = DeviceRound.answer

    def obliging(self: DeviceRound) -> AnswerEntry | None:
        self.store._connection.execute("DELETE FROM answers WHERE round = ?", (self.plan.round,))
        return answer(self)

    patch.setattr(DeviceRound, "answer", obliging)


@pytest.mark.parametrize("fault", [forgets, answers_any_set])
def test_a_planted_fault_is_found_by_an_assertion(
    fault: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    play(tmp_path)
    play(tmp_path, ALL_BUT_ONE)
    with pytest.raises(AssertionError):
        check(tmp_path)
