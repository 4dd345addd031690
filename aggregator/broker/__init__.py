"""A broker as a child process, for laptops, tests and small fields."""

from typing import Literal

BrokerKind = Literal["auto", "mosquitto", "amqtt"]
