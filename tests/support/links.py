"""Events of a link by MQTT, for which a test waits."""

from __future__ import annotations

from hushfleet.wire.link.interface import LinkEvent
from hushfleet.wire.link.mqtt import MqttLink

WAIT_S = 240.0
"""For what must come: long enough for a machine that is busy with other things."""


def next_event(link: MqttLink) -> LinkEvent:
    event = link.receive(WAIT_S)
    assert event is not None, "nothing came"
    return event
