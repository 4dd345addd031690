"""A board and an aggregator of different wire versions: neither works with the other, and both say why."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from hushfleet.simulator.world.hub import LocalHub
from hushfleet.wire.format.identity import Identity
from hushfleet.wire.format.messages import Birth, Message, ServerState, encode_message
from support.fleet import prepared_task
from support.whole import Whole


def of_version_2(message: Message, identity: Identity) -> bytes:
    """As the release before said it: the version is the third byte, and signed."""
    frame = encode_message(message, identity, federation="default")[:-64]
    frame = frame[:2] + b"\x02" + frame[3:]
    return frame + identity.sign(b"hushfleet default\0" + frame)


def test_each_side_names_the_one_to_update(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole, old = Whole(tmp_path, LocalHub().link), Identity.generate()
    whole.begin(prepared_task())
    board = whole.board("new")
    birth = Birth("old", 1, "ready", "generic-x86", "0.3.0", old.public_key, 900)
    with caplog.at_level(logging.WARNING):
        whole.spy.publish(whole.topics.state("old"), of_version_2(birth, old), retain=True)
        whole.drive(steps=20)
        former = ServerState(9, "ready", old.public_key)
        whole.spy.publish(whole.topics.server, of_version_2(former, old), retain=True)
        whole.drive(steps=20)
    words = "the message has wire version 2, this side speaks 3; update the sender"
    assert f"old cannot take part: {words}" in caplog.text
    assert whole.coordinator.enrolment.key("old") is None
    (ignored,) = [text for record in caplog.records if "were ignored" in (text := record.getMessage())]
    assert words in ignored
    assert board.agent.rejected.counts["OtherVersion"] == 1
    whole.end()
