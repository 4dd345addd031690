"""Sends the aggregator's signed messages, on a link whose will announces that the aggregator is lost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from hushfleet.aggregator.payloads.blobs import Frame
from hushfleet.wire.format.identity import Identity
from hushfleet.wire.format.messages import Message, RoundPlan, ServerState, TaskNotice, encode_message
from hushfleet.wire.format.spec import BlobRef
from hushfleet.wire.format.topics import Topics
from hushfleet.wire.link.interface import Link, Will


class Outbox:
    """The outgoing messages. Every method that sends raises `LinkLost` if there is no connection.

    :param connect: creates the link from the will that the broker must publish when the link dies.
    :param epoch: the number of this start of the key.
    """

    def __init__(self, connect: Callable[[Will], Link], *, identity: Identity, epoch: int, federation: str) -> None:
        self.topics, self.identity, self.epoch = Topics(federation), identity, epoch
        self.link = connect(Will(self.topics.server, self._encoded(self._state("lost"))))

    def send(self, device: str, message: Message) -> None:
        """Publishes a message to one device."""
        self._publish(self.topics.down(device), message)

    def call(self, device: str) -> None:
        """Makes one device announce itself again."""
        self.send(device, self._state("ready"))

    def state(self, state: Literal["ready", "lost"]) -> None:
        """Publishes the aggregator's state, retained."""
        self._publish(self.topics.server, self._state(state), retain=True)

    def task(self, task: str, package: BlobRef) -> None:
        """Publishes the id and the package of the task, retained."""
        notice = TaskNotice(task, package.digest, package.size, self.epoch)
        self._publish(self.topics.task, notice, retain=True)

    def round(self, plan: RoundPlan) -> None:
        """Publishes the plan of a round, retained."""
        self._publish(self.topics.round, replace(plan, epoch=self.epoch), retain=True)

    def frame(self, frame: Frame) -> None:
        """Publishes a chunk of a blob to all devices that want it."""
        self.link.publish(self.topics.blob(frame.digest), frame.data)

    def _state(self, state: Literal["ready", "lost"]) -> ServerState:
        return ServerState(self.epoch, state, self.identity.public_key)

    def _encoded(self, message: Message) -> bytes:
        return encode_message(message, self.identity, federation=self.topics.federation)

    def _publish(self, topic: str, message: Message, *, retain: bool = False) -> None:
        self.link.publish(topic, self._encoded(message), retain=retain)
