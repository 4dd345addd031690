"""Wanted: to know from an update whether it is a device's, or nothing, more often than its ledger says.

The attacker is the server: it has the update as it decodes it, with header and report, and asks for each round again,
as if an acknowledgement were lost. The attack is shown to work on a device that adds half of its noise, and on one that
forgets a round that it sent; against the code as it is, it stays within the claim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hushfleet.edge_client.storage.round_commit import OutboxEntry
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.privacy.mechanism import GaussianMechanism
from hushfleet.simulator.studies.audit.finding import Finding
from hushfleet.simulator.studies.audit.games import Effort, findings
from hushfleet.simulator.studies.audit.subject import Subject

MakeSubject = Callable[..., Subject]


@pytest.fixture
def attack(audited: MakeSubject, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Finding]:
    monkeypatch.setattr("hushfleet.simulator.studies.audit.game.MEASURED", 16)
    subject = audited("fedglp-adp", codec="float32", noise_multiplier=0.6)
    return lambda trials: next(findings(subject, Effort(trials)))


def test_a_devices_update_tells_no_more_than_is_claimed(attack: Callable[[int], Finding]) -> None:
    found = attack(120)
    assert found.verdict == "holds"
    assert found.measured_round_of_form < found.claimed_round


def test_half_of_the_noise_tells_more(attack: Callable[[int], Finding], monkeypatch: pytest.MonkeyPatch) -> None:
    add_noise = GaussianMechanism.add_noise
    half = lambda self, x, stds, *rest, **named: add_noise(self, x, np.asarray(stds) / 2, *rest, **named)  # noqa: E731
    monkeypatch.setattr(GaussianMechanism, "add_noise", half)
    found = attack(120)
    assert found.verdict == "VIOLATED"
    assert found.noise_measured < found.noise_claimed


def test_a_round_that_is_noised_again_tells_more(
    attack: Callable[[int], Finding], monkeypatch: pytest.MonkeyPatch
) -> None:
    def forgetful(self: DeviceStore, commit: Any) -> OutboxEntry:
        return OutboxEntry(commit.task, commit.round, commit.update, bytes(32), commit.public_before, "pending")

    monkeypatch.setattr(DeviceStore, "commit_round", forgetful)
    assert attack(300).verdict == "VIOLATED"
