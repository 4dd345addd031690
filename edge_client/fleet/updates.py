"""Fetches an offered release, if it passes the checks, and hands it to `slots.py`, which tries it.

The offer is signed with the fleet service's key, the release with the release key. `slots.py` repeats, as root, all
checks that it depends on. No chunk is requested while a round transfers data. The client ends for the first start of
the new release when no round transfers data, or after `PATIENCE_S` at the latest.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from hushfleet.at_need import at_need
from hushfleet.edge_client.board.config import DeviceConfig
from hushfleet.edge_client.duties import Duty
from hushfleet.edge_client.fleet.installed import Installed
from hushfleet.edge_client.fleet.slot_state import SlotsError
from hushfleet.edge_client.rate_limits import Backoff
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.errors import BadInput, BadSignature, HushfleetError, Malformed, StoreError, WireError
from hushfleet.wire.format.chunks import Ranges
from hushfleet.wire.format.fleet_messages import ReleaseOffer
from hushfleet.wire.format.messages import Want, decode_as, encode_message, peek_kind
from hushfleet.wire.format.topics import ParsedTopic, Topics
from hushfleet.wire.link.interface import Link

if TYPE_CHECKING:
    from hushfleet.edge_client.fleet import release_file
else:
    release_file = at_need("hushfleet.edge_client.fleet.release_file")

FIRST_WAIT_S, LONGEST_WAIT_S = 3.0, 300.0
LOOK_EVERY_S = 5.0  # between looks at slots.json
BUSY_WAIT_S = 2.0
PATIENCE_S = 600.0  # the longest time that the new release waits for the end of a round's transfer

_log = logging.getLogger("hushfleet.edge")


class RestartForRelease(HushfleetError):
    """The client should end: the next start runs another release."""


class ReleaseDuty(Duty):
    """The duty of a board that takes releases.

    :param now: monotonic seconds.
    """

    def __init__(self, config: DeviceConfig, store: DeviceStore, *, now: float) -> None:
        assert config.fleet is not None
        self._device, self._identity = config.device.id, store.identity
        self._service = config.service_key
        self._topics = Topics(config.device.federation)
        self.filters = (self._topics.fleet(self._device),)
        self._installed = Installed.of(config)
        self._offer: ReleaseOffer | None = None
        self._file: release_file.ReleaseFile | None = None
        self._subscribed: str | None = None
        self._asked_up_to = 0  # chunks
        self._backoff = Backoff(FIRST_WAIT_S, LONGEST_WAIT_S, now=now)
        self._staged_at: float | None = None
        self._now = now
        self.due_at = now

    def connected(self) -> None:
        self._backoff.reset(self._now)
        self.due_at = self._now

    # incoming messages

    def take(self, topic: ParsedTopic, payload: bytes) -> None:
        """Raises a `WireError` or `StoreError`."""
        if topic.kind == "release":
            if self._file is not None and self._offer is not None and topic.digest == self._offer.digest:
                self._on_chunk(self._file, self._offer, payload)
        elif topic.kind == "fleet" and payload and peek_kind(payload) is ReleaseOffer:
            offer = decode_as(ReleaseOffer, payload, federation=self._topics.federation, public_key=self._service)
            if offer.device != self._device:
                raise Malformed(f"an offer for {offer.device} came to this board")
            self._on_offer(offer)

    def _on_offer(self, offer: ReleaseOffer) -> None:
        state, installed = self._installed.state(), self._installed
        if offer == self._offer or state is None or offer.version in (state.good, state.trial):
            return
        if installed.was_answered(offer.attempt) or installed.waits or state.trial:
            return
        if self._file is not None:
            self._file.drop()
        self._file = self._offer = None
        installed.heard(offer.attempt)
        try:
            manifest = installed.judge(offer.manifest)
            if (manifest.version, len(offer.manifest) + manifest.payload_bytes) != (offer.version, offer.size):
                raise Malformed(f"the offer of release {offer.version} does not fit its manifest")
            installed.room_for(manifest)
            self._file = release_file.ReleaseFile(installed.incoming, offer.digest, offer.size)
        except (StoreError, BadSignature) as error:  # later there may be room, or root may name the key
            _log.error("release %s is not fetched: %s", offer.version, error)
        except (WireError, BadInput, SlotsError) as error:
            _log.error("release %s is refused: %s", offer.version, error)
            installed.answered(offer.version, offer.attempt)
        else:
            _log.info("release %s is offered, %d KiB", offer.version, offer.size >> 10)
            self._offer = offer
            self._backoff.reset(self._now)
            self.due_at = self._now

    def _on_chunk(self, file: release_file.ReleaseFile, offer: ReleaseOffer, frame: bytes) -> None:
        if file.add(frame):
            missing = file.missing()
            self._backoff.reset(self._now, wait=bool(missing) and missing[0][0] < self._asked_up_to)
            self.due_at = min(self.due_at, self._backoff.due_at)
        if file.complete:
            self._hand_over(file, offer)

    def _hand_over(self, file: release_file.ReleaseFile, offer: ReleaseOffer) -> None:
        """Raises `StoreError`, or `Malformed` if another release has arrived: the offered one is then fetched again."""
        file.finish(self._installed.incoming / f"{offer.version}.hfr")
        self._file = None
        self._installed.answered(offer.version, offer.attempt)
        _log.info("release %s is here, and is being installed", offer.version)
        self.due_at = self._now

    # regular work

    def advance(self, link: Link, now: float, *, busy: bool) -> None:
        """Does what is due. Raises `RestartForRelease`, or `LinkLost`."""
        self._now = now
        self._restart_if_staged(now, busy=busy)
        self._follow(link)
        if self._file is None or self._offer is None:
            self.due_at = now + LOOK_EVERY_S
        elif busy:
            self.due_at = now + BUSY_WAIT_S
        else:
            self.due_at = now + LOOK_EVERY_S
            if now >= self._backoff.due_at:
                self._backoff.tried(now)
                if not self._file.complete:
                    self._ask(link, self._file.missing(), self._offer)
                else:  # no chunk will come: the client ended too early, or the disk failed
                    try:
                        self._hand_over(self._file, self._offer)
                    except (WireError, StoreError) as error:
                        _log.error("%s", error)
            self.due_at = min(self.due_at, self._backoff.due_at)

    def _ask(self, link: Link, missing: Ranges, offer: ReleaseOffer) -> None:
        self._asked_up_to = missing[-1][1]
        want = Want(offer.digest, offer.size, missing)
        frame = encode_message(want, self._identity, federation=self._topics.federation)
        link.publish(self._topics.wants(self._device), frame)

    def close(self) -> None:
        """Closes the file; received chunks stay."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _restart_if_staged(self, now: float, *, busy: bool) -> None:
        state = self._installed.state()
        if state is None or not state.trial or state.starts:
            self._staged_at = None
            return
        if self._staged_at is None:
            self._staged_at = now
        if not busy or now - self._staged_at >= PATIENCE_S:
            raise RestartForRelease(
                f"release {state.trial} is installed; this client ends, and the next start tries it"
            )

    def _follow(self, link: Link) -> None:
        wanted = None if self._file is None or self._offer is None else self._topics.release(self._offer.digest)
        if wanted != self._subscribed:
            if self._subscribed is not None:
                link.unsubscribe(self._subscribed)
            if wanted is not None:
                link.subscribe(wanted)
            self._subscribed = wanted
