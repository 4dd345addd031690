"""The part of the fleet service that tells boards who signs releases, and once a day which release is the newest."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from hushfleet import atomic_file
from hushfleet.aggregator.fleet.service import FleetService, ServicePart
from hushfleet.aggregator.fleet.software.releases import keys_in_force, offered_releases
from hushfleet.aggregator.fleet.software.rollout import HEARD_S, current
from hushfleet.aggregator.fleet.trust.folder import FleetFolder
from hushfleet.aggregator.fleet.trust.registry import FleetRegistry
from hushfleet.aggregator.storage.identity_file import load
from hushfleet.errors import BadInput, HushfleetError
from hushfleet.release.statements import Newest, Signed
from hushfleet.wire.format.fleet_messages import ReleaseNews

LOOK_EVERY_S = 1.0
SIGN_EVERY_S = 86400.0
TELL_AGAIN_S = 3600.0
"""A board that stays connected receives the news again after this time, because a message may be lost."""


class TellingNewest(ServicePart):
    """Tells each board that was heard in the last `HEARD_S` seconds; release offers have the same condition.

    `service/newest` has the last statement, so that a clock that was set back does not make the next one older.

    :param wall: unix seconds.
    """

    every_s = LOOK_EVERY_S
    fails_as = "boards are not told which release is the newest"

    def __init__(self, folder: FleetFolder, registry: FleetRegistry, *, wall: Callable[[], float] = time.time) -> None:
        self._folder, self._registry, self._wall = folder, registry, wall
        self._news: ReleaseNews | None = None
        self._made_of: object = None  # the values that the news was made from
        self._sign_at = 0.0  # monotonic seconds
        self._sent: dict[str, tuple[ReleaseNews, float]] = {}  # device -> what, and when in monotonic seconds

    def act(self, service: FleetService, now: float) -> None:
        news, wall = self._newest_news(now), self._wall()
        for seen in self._registry.boards():
            device = seen.device
            if seen.standing != "enrolled" or seen.health_at is None or wall - seen.health_at > HEARD_S:
                continue
            if seen.health is None or seen.health.slot == "trial":  # a release on trial listens to nothing
                continue
            what, at = self._sent.get(device, (None, 0.0))
            if what is news and now - at < TELL_AGAIN_S:
                continue
            service.publish(service.topics.fleet(device), news)
            self._sent[device] = news, now

    def _newest_news(self, now: float) -> ReleaseNews:
        """Returns the news, made once a day, at the service's start, and when keys or the roll-out have changed."""
        named = keys_in_force(self._folder)
        keys, versions = self._folder.release_keys.read_bytes(), self._versions()
        if self._news is None or now >= self._sign_at or self._made_of != (keys, versions):
            line = self._say(versions, named.newest_key)
            self._news = ReleaseNews(keys, line.encode())
            self._made_of, self._sign_at = (keys, versions), now + SIGN_EVERY_S
        return self._news

    def _say(self, versions: dict[str, str], named: str) -> str:
        """Signs the statement, and stores it before any board receives it.

        Raises `BadInput` for a key that root has not named.
        """
        key, file = load(self._folder.newest_key), self._folder.service / "newest"
        if key.public_key.hex() != named:
            raise BadInput(
                f"root has not named the key in {self._folder.newest_key}; see: hushfleet release keys --help"
            )
        last = 0
        with contextlib.suppress(OSError, HushfleetError):
            last = Signed.from_line(Newest, file.read_text("utf-8")).statement.said_at
        said = Newest(max(int(self._wall()), last + 1), versions)
        line = Signed(said).with_signature(key).to_line()
        atomic_file.write_whole(file, line.encode(), durable=True)
        return line

    def _versions(self) -> dict[str, str]:
        """Returns the version that boards should run, by platform: the release of the roll-out in force.

        There is none if it was withdrawn.
        """
        rollout = current(self._registry)
        if rollout is None or rollout.state not in ("running", "paused"):
            return {}
        offered = offered_releases(self._registry)
        return {each.platform: each.version for each in offered if each.version == rollout.version}
