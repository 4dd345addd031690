"""Receives who signs releases, and which is the newest; if a board no longer hears of it, somebody may hold it back.

Time is counted while the client runs, because a board without a battery has no correct clock. STATE/newest.json stores
the count and the newest statement; an older statement is not accepted.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path

from hushfleet.atomic_file import read_object, write_whole
from hushfleet.edge_client.board.config import DeviceConfig
from hushfleet.edge_client.duties import Duty
from hushfleet.edge_client.fleet.installed import Installed
from hushfleet.edge_client.storage.state_files import NEWEST_RELEASE
from hushfleet.errors import BadInput, BadSignature, Malformed, StoreError
from hushfleet.release.manifest import this_platform, version_order
from hushfleet.release.statements import Newest, Signed
from hushfleet.version import __version__
from hushfleet.wire.format.fleet_messages import ReleaseNews
from hushfleet.wire.format.health import Freeze
from hushfleet.wire.format.messages import decode_as, peek_kind
from hushfleet.wire.format.topics import ParsedTopic, Topics
from hushfleet.wire.link.interface import Link

FROZEN_AFTER_S = 7 * 86400.0
"""Seconds that the client runs without a new statement, or with an older release, until the board counts as frozen."""
SAVE_EVERY_S = 900.0
"""If the client is killed, the time that it has counted since the last save is lost."""

_log = logging.getLogger("hushfleet.edge")


def newest_said_at(state_dir: Path) -> float:
    """Returns the time of the fleet service's newest statement, unix seconds; 0 before the first one."""
    newest = Freshness(state_dir).newest
    return 0.0 if newest is None else float(newest.said_at)


class Freshness:
    """Counts how long no newer statement has arrived.

    :param state_dir: of the board.

    :ivar key: public key that verifies `line`, the newest statement; both are empty before the first one.
    :ivar unheard_s: seconds that the client has run since that statement arrived, or since its first start.
    :ivar older_s: seconds that it has run, without a break, a release that is older than the newest one.
    """

    def __init__(self, state_dir: Path) -> None:
        self._file = state_dir / NEWEST_RELEASE
        self.key = self.line = ""
        self.unheard_s = self.older_s = 0.0
        known = read_object(self._file)
        with contextlib.suppress(ValueError, LookupError, TypeError):
            self.key, self.line = str(known["key"]), str(known["line"])
            self.unheard_s, self.older_s = float(known["unheard_s"]), float(known["older_s"])

    @property
    def newest(self) -> Newest | None:
        """The newest statement; None before the first one."""
        with contextlib.suppress(Malformed):
            return Signed.from_line(Newest, self.line).statement if self.line else None
        return None

    @property
    def version(self) -> str:
        """The newest release for this board; empty if none is known."""
        newest = self.newest
        return "" if newest is None else newest.versions.get("-".join(this_platform()), "")

    @property
    def freeze(self) -> Freeze:
        """The value for `Health.freeze`."""
        if self.unheard_s >= FROZEN_AFTER_S:
            return "unheard"
        return "older" if self.older_s >= FROZEN_AFTER_S else ""

    def hear(self, line: str, *, key: str) -> bool:
        """Accepts a statement that is newer than the last one. Returns whether it was; durable on return.

        :param key: the key that root has named for it. With a new key, any date is accepted once, because a thief of
            the former key could have signed a date far in the future.

        Raises `BadSignature`, `Malformed`, and `StoreFull`.
        """
        signed, known = Signed.from_line(Newest, line), self.newest
        if not signed.is_signed_by(key):
            raise BadSignature(
                f"the statement of the newest release is not signed by the key {key[:16]}..., which root named"
            )
        if known is not None and self.key == key and signed.statement.said_at <= known.said_at:
            return False
        self.key, self.line, self.unheard_s = key, line, 0.0
        self.count(0.0)  # the running release may now be older than the newest one
        self.save()
        return True

    def count(self, seconds: float) -> None:
        """Adds the seconds that the client has run since the last call."""
        self.unheard_s += seconds
        behind = bool(self.version) and version_order(__version__) < version_order(self.version)
        self.older_s = self.older_s + seconds if behind else 0.0

    def save(self) -> None:
        """Saves the count and the statement. Raises `StoreFull`."""
        known = {"key": self.key, "line": self.line, "unheard_s": self.unheard_s, "older_s": self.older_s}
        write_whole(self._file, json.dumps(known).encode(), durable=True)

    def describe(self) -> str:
        """Describes the newest release for `status`."""
        days = f"{FROZEN_AFTER_S / 86400:.0f} days"
        if self.freeze == "unheard":
            return (
                f"no new word of the newest release has come in {days} that this client ran: somebody may hold it back"
            )
        runs = __version__
        if self.freeze == "older":
            return f"the newest is {self.version}, and this board has run the older {runs} for {days} since it heard so"
        if self.newest is None:
            return "no word of the newest release has come yet"
        return f"the newest is {self.version}, this board runs {runs}" if self.version else "none is rolled out"


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
        news = decode_as(ReleaseNews, payload, federation=self._topics.federation, public_key=self._service)
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
