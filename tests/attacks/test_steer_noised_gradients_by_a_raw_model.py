"""The aggregator gives one task a second package, for the model that a device has kept of the first.

With the unit `device` a device's personalized head is trained without noise, since it never leaves. With the unit
`record` no noise is added but to gradients, so all that they are computed of must have noise already. A device that
went on from its raw head turned the direction of all gradients by a single record: here 128 clip norms, where noise for
one was charged.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hushfleet.data.samples import Samples
from hushfleet.edge_client.board.config import LimitsSection
from hushfleet.edge_client.storage.declines import Declined
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.edge_client.worker.randomness import FieldRandomness
from hushfleet.edge_client.worker.trainer import DeviceRound, Trainer
from hushfleet.methods import method_of
from hushfleet.methods.state import PublicState
from hushfleet.params import ParamLayout
from hushfleet.wire.format.messages import RoundPlan
from hushfleet.wire.format.spec import BlobRef, ModelSpec, PrivacySpec, TaskSpec, WireSpec

LAYOUT, RECORDS = ParamLayout(("body.weight", "head.weight"), ((1,), (1,))), 64
SAMPLES = Samples(np.zeros((RECORDS, 1, 2, 2), np.uint8), np.zeros(RECORDS, np.int64), (0.0,), (1.0,))
FIRST = TaskSpec(
    task="two-packages",
    rounds=3,
    method="fedper",
    method_config={"optimizer": "sgd", "learning_rate": 1.0, "batch_size": RECORDS, "local_steps": 1},
    privacy=PrivacySpec("device", "strict", clip_norm=1.0, noise_multiplier=50.0, delta=1e-5),
    wire=WireSpec(codec="float32"),
    model=ModelSpec(
        "tiny", LAYOUT, (1, 2, 2), ("a", "b"), (0.0,), (1.0,), (), BlobRef.of(b"gradient"), BlobRef.of(b"inference")
    ),
    memory_mib=1,
)
SECOND = replace(FIRST, privacy=PrivacySpec("record", "strict", clip_norm=1.0, noise_multiplier=2.0, delta=1e-5))


def gradient(params: np.ndarray, x: np.ndarray, y: np.ndarray, dropout: Any = (), out: Any = None, **_: Any) -> Any:
    """The head follows whether a record is bright, and the body the head's sign."""
    out[:] = 100 * np.sign(params[1]), 1 - 1000 * x.max(initial=0)
    return 0.5, out


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DeviceStore]:
    with DeviceStore(tmp_path / "store.sqlite", device="one") as store:
        yield store


def run_round(store: DeviceStore, spec: TaskSpec, round: int) -> None:
    trainer = Trainer(
        device="one",
        store=store,
        spec=spec,
        method=method_of(spec),
        gradient=gradient,
        logits_of=lambda params, x: np.zeros((len(x), 2), np.float32),
        samples=lambda: SAMPLES,
        randomness=FieldRandomness(),
        limits=LimitsSection(epsilon_server=10.0),
    )
    held = trainer.method.init_state().public if round == 1 else store.load_state(spec.task).public
    cohort = {"one": held.digest()}
    plan = RoundPlan(spec.task, round, spec.rounds, "open", bytes(32), 4 * LAYOUT.size, cohort, 1, 60.0)
    DeviceRound(trainer, plan).run(np.zeros(LAYOUT.size, np.float32))


def test_a_device_trains_for_no_second_package_of_a_task(store: DeviceStore) -> None:
    run_round(store, FIRST, 1)
    with pytest.raises(Declined) as declined:
        run_round(store, SECOND, 2)
    assert declined.value.reason.code == "error"
    assert "another package" in declined.value.reason.reason
    assert store.ledger.rounds_charged() == 1
    run_round(store, FIRST, 2)


def test_another_task_begins_without_what_the_device_has_kept(store: DeviceStore) -> None:
    run_round(store, FIRST, 1)
    run_round(store, replace(SECOND, task="another"), 1)
    assert store.ledger.rounds_charged() == 2


def test_what_an_earlier_client_has_kept_goes_on_with_one_package(store: DeviceStore) -> None:
    """It did not note of which, so with the unit `record` there is none to go on with."""
    run_round(store, FIRST, 1)
    store._set_facts("forget", **{f"package {FIRST.task}": None})
    with pytest.raises(Declined, match="did not note by which package"):
        run_round(store, SECOND, 2)
    assert store.ledger.rounds_charged() == 1
    run_round(store, FIRST, 2)
    with pytest.raises(Declined):
        run_round(store, SECOND, 3)
    assert isinstance(store.load_state(FIRST.task).public, PublicState)
