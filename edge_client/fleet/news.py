"""Receives the statements that say who signs releases, and which release is the newest."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from pathlib import Path

from hushfleet.edge_client.board.config import DeviceConfig
from hushfleet.edge_client.duties import Duty
from hushfleet.edge_client.fleet.freshness import SAVE_EVERY_S, Freshness
from hushfleet.edge_client.fleet.installed import Installed
from hushfleet.errors import BadInput, Malformed, StoreError
from hushfleet.wire.format.fleet_messages import ReleaseNews
from hushfleet.wire.format.messages import decode_message, peek_kind
from hushfleet.wire.format.topics import ParsedTopic, Topics
from hushfleet.wire.link.interface import Link

_log = logging.getLogger("hushfleet.edge")


class News(Duty):
    """The duty of a board that receives the statements about release keys and the newest release.

    :param clock: monotonic seconds.
    """

    def __init__(self, config: DeviceConfig, *, clock: Callable[[], float] = time.monotonic) -> None:
        assert config.fleet is not None
        self._service = config.service_key
        self._topics = Topics(config.device.federation)
        self.filters = (self._topics.fleet(config.device.id),)
        self._installed = Installed.of(config)
        self._freshness = Freshness(Path(config.device.state_dir))
        self._clock = clock
        self._counted = self._saved = clock()
        self.due_at = self._counted + SAVE_EVERY_S

    def lost(self) -> None:
        self._count()

    def take(self, topic: ParsedTopic, payload: bytes) -> None:
        """Raises a `WireError` or `StoreError`."""
        if topic.kind != "fleet" or not payload or peek_kind(payload) is not ReleaseNews:
            return
        news = decode_message(payload, federation=self._topics.federation, public_key=self._service)
        assert isinstance(news, ReleaseNews)
        if self._installed.state() is None:  # this board takes no releases
            return
        try:
            keys, newest = news.keys.decode("ascii"), news.newest.decode("ascii")
            before = self._installed.trust().number
            trust = self._installed.hear_keys(keys)
            if trust.number > before:
                _log.info("root has said who signs releases from now on, in statement %d", trust.number)
            if self._freshness.hear(newest, key=trust.in_force().newest_key):
                _log.info("the newest release: %s", self._freshness.describe())
        except (BadInput, UnicodeDecodeError) as error:
            raise Malformed(f"the statement about releases cannot be used: {error}") from error

    def advance(self, link: Link, now: float, *, busy: bool) -> None:
        self._count()
        self.due_at = now + SAVE_EVERY_S

    def close(self) -> None:
        """Saves the count when the client ends."""
        self._saved = -SAVE_EVERY_S
        self._count()

    def _count(self) -> None:
        """Counts the time since the last call, with or without a connection. Saves the count from time to time."""
        now = self._clock()
        self._freshness.count(max(0.0, now - self._counted))
        self._counted = now
        if now - self._saved >= SAVE_EVERY_S:
            self._saved = now
            with contextlib.suppress(StoreError):  # counting goes on, and the count is saved when there is room
                self._freshness.save()
