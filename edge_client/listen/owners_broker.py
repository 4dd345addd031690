"""Tells Home Assistant what is heard, by MQTT discovery, at the broker that the owner has named; off by default.

What is heard is private, and no ledger charges it. Therefore it goes only to the owner's own broker; the fleet's is
refused.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, suppress

from hushfleet.data.form import NORMAL
from hushfleet.edge_client.board.config import DeviceConfig
from hushfleet.edge_client.listen.listener import Heard
from hushfleet.errors import BadInput, LinkLost
from hushfleet.wire.link.address import BrokerAddress
from hushfleet.wire.link.discovery import OFFLINE, ONLINE, description, encoded
from hushfleet.wire.link.interface import LinkDown, LinkUp, Will
from hushfleet.wire.link.mqtt import MqttLink

AGAIN_S = 60.0
_SENSORS: dict[str, dict[str, str]] = {
    "sound": {},
    "alarm": {},
    "score": {"state_class": "measurement"},
    "probability": {"unit_of_measurement": "%", "state_class": "measurement"},
    "loudness": {"unit_of_measurement": "dB", "device_class": "sound_pressure"},
}
"""Home Assistant's sensors, by the key of their value."""

_log = logging.getLogger("hushfleet.edge")


class OwnersBroker(AbstractContextManager["OwnersBroker"]):
    """The connection to the owner's broker. Raises `BadInput` for an address that is wrong, or the fleet's.

    What is heard is told if the likeliest class or the alarm has changed, and again once a minute.

    :param clock: monotonic seconds.
    """

    def __init__(self, config: DeviceConfig, url: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        address, fleet = BrokerAddress.parse(url), config.fleet
        urls = [config.broker.url] if fleet is None else [config.broker.url, fleet.enrol_url]
        if (address.host, address.port) in [(each.host, each.port) for each in map(BrokerAddress.parse, urls)]:
            raise BadInput(f"listen.mqtt = {str(address)!r}: must be a broker of your own, and not the fleet's")
        name = f"hushfleet-listen/{config.device.id}"
        self._states, self._available = f"{name}/state", f"{name}/available"
        self._device, self._clock = config.device.id, clock
        self._told: tuple[str, str] | None = None
        self._again_at, self._said = 0.0, False
        client_id = f"hushfleet-listen-{config.device.id}"
        self._link = MqttLink(address, client_id=client_id, will=Will(self._available, OFFLINE))
        self._link.open()

    def tell(self, heard: Heard) -> None:
        """Publishes what was heard, if it is new; without a connection it is told when there is one."""
        while (event := self._link.receive(0.0)) is not None:
            if isinstance(event, LinkUp):
                self._told, self._said = None, False
            elif isinstance(event, LinkDown) and not self._said:
                _log.warning("Home Assistant is told nothing: %s", event.reason)
                self._said = True
        sound, probability = heard.classes[0] if heard.classes else ("", 0.0)
        value = {"probability": round(100 * probability, 1)}
        if heard.score is not None:
            sound, value = heard.alarm or NORMAL, {"score": round(heard.score, 3)}
        now, news = self._clock(), (sound, heard.alarm)
        if news == self._told and now < self._again_at:
            return
        state = {"sound": sound, "alarm": heard.alarm, **value, "loudness": round(heard.dbfs, 1)}
        with suppress(LinkLost):
            if self._told is None or now >= self._again_at:
                self._link.publish(*self._description(state), retain=True)
                self._link.publish(self._available, ONLINE, retain=True)
                self._again_at = now + AGAIN_S
            self._link.publish(self._states, encoded(state), retain=True)
            self._told = news

    def _description(self, keys: Collection[str]) -> tuple[str, bytes]:
        unique, about = f"hushfleet_listen_{self._device}", {"name": f"{self._device} listens"}
        sensors = {
            key: {"platform": "sensor", "name": key, "unique_id": f"{unique}_{key}", **more}
            | {"value_template": f"{{{{ value_json.{key} }}}}"}
            for key, more in _SENSORS.items()
            if key in keys
        }
        return description(unique, about, sensors, states=self._states, availability=self._available)

    def __exit__(self, *_: object) -> None:
        with suppress(LinkLost):
            self._link.publish(self._available, OFFLINE, retain=True)
        self._link.close()
