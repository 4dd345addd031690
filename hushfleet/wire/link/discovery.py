"""Describes a device to Home Assistant, by MQTT discovery: one retained message.

The form is https://www.home-assistant.io/integrations/mqtt/#device-discovery-payload.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from hushfleet.version import __version__

CONFIGS = "homeassistant/device"
ONLINE, OFFLINE = b"online", b"offline"
"""The contents of a topic of availability."""


def description(
    unique: str, about: Mapping[str, str], components: Mapping[str, Any], *, states: str, availability: str
) -> tuple[str, bytes]:
    """Returns the topic and the content of the message.

    :param unique: identifies the device.
    :param about: its name and other texts; empty ones are left out.
    :param components: the properties of its sensors, by their keys in the object on the topic `states`.
    :param availability: the topic that says whether somebody publishes.
    """
    texts = {name: text for name, text in about.items() if text}
    described = {
        "device": {"identifiers": [unique], "manufacturer": "Hushfleet", **texts},
        "origin": {"name": "Hushfleet", "sw_version": __version__},
        "state_topic": states,
        "availability_topic": availability,
        "qos": 1,
        "components": components,
    }
    return f"{CONFIGS}/{re.sub('[^a-zA-Z0-9_-]', '_', unique)}/config", encoded(described)


def encoded(plain: Any) -> bytes:
    """Returns an object as JSON."""
    return json.dumps(plain, allow_nan=False, ensure_ascii=False).encode()
