"""An aggregator that has moved, and its old copy: the broker remembers which was started last."""

from __future__ import annotations

from pathlib import Path

import pytest

from hushfleet.aggregator.commands import older_copy
from hushfleet.aggregator.commands.older_copy import refuse_older_copy
from hushfleet.aggregator.storage.identity_file import epoch_file, last_epoch, load_or_create, next_epoch
from hushfleet.errors import BadInput
from hushfleet.simulator.world.hub import LocalHub
from hushfleet.wire.format.identity import Identity
from hushfleet.wire.format.messages import ServerState, encode_message
from hushfleet.wire.format.topics import Topics
from hushfleet.wire.link.interface import LinkDown

TOPIC = Topics("plants").server


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> LocalHub:
    monkeypatch.setattr(older_copy, "ANSWERS_IN_S", 0.01)
    return LocalHub()


def started(hub: LocalHub, identity: Identity, epoch: int) -> None:
    state = ServerState(epoch, "ready", identity.public_key)
    link = hub.link("aggregator")
    link.open()
    link.publish(TOPIC, encode_message(state, identity, federation="plants"), retain=True)
    link.close()


def check(hub: LocalHub, key: Path) -> None:
    last, counter = last_epoch(key), epoch_file(key)
    refuse_older_copy(hub.link("aggregator"), load_or_create(key), federation="plants", last=last, counter=counter)


def test_a_copy_that_was_left_behind_is_refused_until_its_counter_is_set(hub: LocalHub, tmp_path: Path) -> None:
    key = tmp_path / "identity.key"
    identity = load_or_create(key)
    assert last_epoch(key) == 0
    started(hub, identity, next_epoch(key, clock=lambda: 1000.0))
    check(hub, key)  # the same folder, started again
    started(hub, identity, 2000)  # on the other machine
    with pytest.raises(BadInput, match=r"this is an old copy: .* start 2000 .* has 1000.*write 2000 into"):
        check(hub, key)
    epoch_file(key).write_text("2000\n")
    check(hub, key)
    assert next_epoch(key, clock=lambda: 1500.0) == 2001


def test_what_others_say_counts_for_nothing(hub: LocalHub, tmp_path: Path) -> None:
    key = tmp_path / "identity.key"
    load_or_create(key)
    next_epoch(key, clock=lambda: 1000.0)
    check(hub, key)  # the broker retains nothing
    started(hub, Identity.generate(), 2000)
    check(hub, key)


def test_a_broker_that_cannot_be_reached_holds_nobody_up(
    hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = tmp_path / "identity.key"
    monkeypatch.setattr(older_copy, "CONNECTS_IN_S", 1e9)
    link = hub.link("aggregator")
    monkeypatch.setattr(link, "receive", lambda timeout_s: LinkDown("connection refused"))
    refuse_older_copy(link, load_or_create(key), federation="plants", last=1, counter=epoch_file(key))
