"""Decides which devices may take part: births of devices are compared with the register of known devices.

Closed enrolment, the default, accepts only the devices of the register. Open enrolment adds every device that comes,
with the first key that is seen for its id. In both a key belongs to one id, and a blocked device stays out.

A birth of a device that is not accepted is dropped unread when a token bucket is empty. The signatures of all others
are checked, and the changes of many births are committed in one transaction (`settle`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from hushfleet.aggregator.storage.activity import RefusedBirth
from hushfleet.aggregator.storage.board import Board
from hushfleet.aggregator.storage.fleet_members import FleetMembers, Members
from hushfleet.aggregator.storage.store import AggregatorStore
from hushfleet.errors import BadSignature, Malformed, StoreError
from hushfleet.secure.membership_list import MembershipList
from hushfleet.wire.format.messages import Birth, Message, decode_message

MAX_DEVICES = 100_000
UNKNOWN_A_SECOND = 20.0
MAX_UNKNOWN_BURST = 200
MAX_REFUSED_BIRTHS = 256
MAX_BATCH = 1000
BATCH_S = 0.05
REFRESH_S = 1.0
NOTE_S = 5.0

log = logging.getLogger("hushfleet.aggregator")


class NotAccepted(BadSignature):
    """A valid birth of a device that must not take part; the error's text is for the device's log.

    :param public_key: the key that the device announced.
    """

    def __init__(self, device: str, public_key: bytes, reason: str) -> None:
        super().__init__(reason)
        self.device = device
        self.public_key = public_key


class Changes(NamedTuple):
    """Changes of devices since the last call.

    :param out: former key and reason of devices that were removed, blocked or have another key, by id.
    :param accepted: ids that are accepted now, or with another key, or whose birth could not be committed: the
        messages that the broker retains of them must be read again.
    :param replaced: ids of devices that have come with another key.
    """

    out: dict[str, tuple[bytes, str]]
    accepted: set[str]
    replaced: set[str]


class TokenBucket:
    """Limits a rate: each event takes a token, and is refused if there is none.

    :param rate: tokens per second.
    :param most: the largest number of tokens, which is also the first one.
    """

    def __init__(self, rate: float, most: int, *, now: float) -> None:
        self._rate, self._most = rate, most
        self._tokens, self._at = float(most), now

    def take(self, now: float) -> bool:
        """Takes a token, if there is one."""
        self._tokens = min(self._most, self._tokens + self._rate * max(0.0, now - self._at))
        self._at = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


class Enrolment:
    """Decides which devices' births count.

    :param store: the run's store; if the run is older than registers, its devices count as known.
    :param register: opened by the caller, who also closes it.
    :param closed: False accepts every device that comes.
    :param clock: monotonic seconds.
    :param wall: unix seconds.

    `blocked` is how many devices of the register may not take part.
    """

    def __init__(
        self,
        store: AggregatorStore,
        register: Members,
        *,
        closed: bool = True,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.register = register
        self.closed, self._of_fleet = closed, isinstance(register, FleetMembers)
        self._store = store
        self._clock, self._wall = clock, wall
        if store.get("register") is None:
            register.take_over(
                Board(row.device, public_key=row.public_key, standing="pinned") for row in store.devices()
            )
            store.put("register", b"1")
        self._known: dict[str, Board] = {}
        self._owners: dict[bytes, str] = {}
        self._out: dict[str, tuple[bytes, str]] = {}
        self._accepted: set[str] = set()
        self._unheard: set[str] = set()  # devices whose births could not be committed
        self._after_round: set[str] = set()  # devices whose births are refused because of the open round
        self._sessions: dict[str, tuple[bytes, int]] = {}
        self._load()
        self._accepted.clear()  # the broker sends all births at the start
        self._taken: list[Birth] = []
        self._unsaved: dict[str, Birth] = {}
        self._replaced: set[str] = set()
        self._settled_new_keys: set[str] = set()  # replaced devices whose births are committed
        self._taken_at = 0.0
        self._bucket = TokenBucket(UNKNOWN_A_SECOND, MAX_UNKNOWN_BURST, now=clock())
        self._refused = {(birth.device, birth.public_key): birth for birth in reversed(register.refused_births())}
        self._has_news = self._is_stale = False
        self._refreshed_at = self._noted_at = clock()

    # who is who

    def key(self, device: str) -> bytes | None:
        """Returns the key of an accepted device, 32 bytes; None for all others, also for blocked devices."""
        row = self._known.get(device)
        return row.public_key if row is not None and not row.is_blocked else None

    def session(self, device: str) -> int:
        """Returns the newest session of the device with its current key; 0 before the first."""
        key, session = self._sessions.get(device, (None, 0))
        return max(session, 0) if key == self.key(device) else 0

    def has_new_key(self, device: str) -> bool:
        """Returns whether a birth of the device with another key than before waits to be committed."""
        return device in self._replaced

    def waits(self, device: str) -> bool:
        """Returns whether a birth of the device was taken, and waits to be committed with others."""
        return any(birth.device == device for birth in self._taken)

    def is_another(self, device: str) -> bool:
        """Returns whether the device's last birth in this run had another key than the one that is accepted now."""
        key, _ = self._sessions.get(device, (None, 0))
        return key is not None and key != self.key(device)

    def is_listed(self, device: str) -> bool:
        """Returns whether the device is in the register, also if it is blocked."""
        return device in self._known

    def membership_list(self) -> MembershipList | None:
        """Returns a membership list of the accepted devices that have announced themselves in this run; None without
        any."""
        seen = {device: key for device, (key, _) in self._sessions.items()}
        keys = {device: key for device, key in seen.items() if key is not None and key == self.key(device)}
        return MembershipList.of(keys) if keys else None

    @property
    def accepted(self) -> list[str]:
        """The devices that may take part."""
        return [device for device, row in self._known.items() if not row.is_blocked]

    @property
    def count(self) -> int:
        """The number of devices that may take part."""
        return len(self._known) - self.blocked

    def block(self, device: str, reason: str) -> None:
        """Blocks a device: its messages are ignored and its updates refused, also in the open round. Raises
        `StoreError`.

        The coordinator applies it in its next step, in the same way as `hushfleet fleet block`.
        """
        self.register.block(device, reason)
        key, row = self.key(device), self._known.get(device, Board(device))
        self.blocked += not row.is_blocked
        self._known[device] = row.blocked(reason)
        if key is not None:
            self._out[device] = key, self._reason(device)

    def take_changes(self) -> Changes:
        """Returns what has changed; checks once a second whether the operator has changed the register."""
        now = self._clock()
        if now - self._refreshed_at >= REFRESH_S and not self._taken:
            self._refreshed_at = now
            self._accepted |= self._unheard
            self._unheard = set()
            try:
                self._is_stale |= self.register.was_changed()
                if self._is_stale:
                    self._load()
                    self._is_stale = False
            except StoreError as error:  # must not end the run: the old state holds until the register can be read
                log.warning("%s", error)
        changes = Changes(self._out, self._accepted, self._settled_new_keys)
        self._out, self._accepted, self._settled_new_keys = {}, set(), set()
        return changes

    def _load(self) -> None:
        before, rows = self._known, self.register.devices()
        self._known = {row.device: row for row in rows}
        self._owners = {row.public_key: row.device for row in self._known.values() if row.public_key is not None}
        self.blocked = sum(row.is_blocked for row in rows)
        self._sessions = {row.device: (row.public_key, row.last_session) for row in self._store.devices()}
        for device, row in before.items():
            if not row.is_blocked and row.public_key is not None and self.key(device) != row.public_key:
                self._out[device] = row.public_key, self._reason(device)
        for device, row in self._known.items():
            was = before.get(device)
            if not row.is_blocked and (was is None or was.is_blocked or was.public_key != row.public_key):
                self._accepted.add(device)

    # births

    @property
    def due_at(self) -> float:
        """The time from which the taken births no longer wait for others; inf if there are none."""
        if not self._taken:
            return float("inf")
        is_enough = not self._unsaved or len(self._taken) >= MAX_BATCH
        return self._taken_at + (0.0 if is_enough else BATCH_S)

    def take(self, device: str, payload: bytes, *, federation: str) -> None:
        """Takes a birth that came on the topic of `device`; it counts after `settle` has committed it.

        Raises `NotAccepted` if the device must receive the reason, and `BadSignature` or `Malformed` if the message is
        only counted.
        """
        row, now = self._known.get(device), self._clock()
        if not self._may_be_accepted(row, payload):
            if not self._bucket.take(now):
                raise BadSignature("too many unaccepted devices announce themselves; this one is not read")
            row = row or self._enrolled_since(device)
        birth = _verified(payload, federation)
        if not isinstance(birth, Birth):
            raise Malformed(f"expected a device's state, got a {type(birth).__name__}")
        if birth.device != device:
            raise BadSignature(f"the state of {birth.device} came on the topic of {device}")
        self._check(birth, row)
        key, session = self._sessions.get(device, (birth.public_key, -1))
        if key == birth.public_key and birth.session < session:
            return  # a will that came after the device's next start
        if not self._taken:
            self._taken_at = now
        self._taken.append(birth)
        if key != birth.public_key:
            self._replaced.add(device)
        if (key, session) != (birth.public_key, birth.session):
            self._unsaved[device] = birth
            self._sessions[device] = birth.public_key, birth.session
        if row is None or row.public_key is None:
            self._known[device] = Board(device, public_key=birth.public_key, standing="pinned")
            self._owners[birth.public_key] = device

    def settle(self) -> list[Birth]:
        """Commits the changes of all births together, and returns the births in their order. Raises `StoreError`.

        Births that cannot be committed are dropped, and requested again by `Changes.accepted`.
        """
        births, unsaved, replaced = self._taken, self._unsaved, self._replaced
        self._taken, self._unsaved, self._replaced = [], {}, set()
        try:
            if unsaved:
                keys = {device: birth.public_key for device, birth in unsaved.items()}
                self.register.pin(keys, may_add=not self.closed)
                rows = ((device, birth.public_key, birth.board, birth.session) for device, birth in unsaved.items())
                self._store.add_devices(rows, replaced=replaced)
        except StoreError:
            self._unheard.update(birth.device for birth in births)
            self._load()
            raise
        self._settled_new_keys |= replaced
        return [birth for birth in births if self.key(birth.device) == birth.public_key]

    def _enrolled_since(self, device: str) -> Board | None:
        """Returns the register's row of a device that was not there when the register was last read, up to 1 s ago."""
        try:
            row = self.register.device(device)
        except StoreError as error:
            log.warning("%s", error)
            return None
        if row is not None:
            self._known[device] = row
            self.blocked += row.is_blocked
            if row.public_key is not None:
                self._owners[row.public_key] = device
        return row

    def _may_be_accepted(self, row: Board | None, payload: bytes) -> bool:
        """Checks before parsing that the birth contains an accepted key."""
        if row is None:
            return not self.closed
        return not row.is_blocked and (row.public_key is None or row.public_key in payload)

    def _check(self, birth: Birth, row: Board | None) -> None:
        device, key = birth.device, birth.public_key
        owner = self._owners.get(key, device)
        if row is None and not self.closed and len(self._known) >= MAX_DEVICES:
            reason = f"this aggregator knows {MAX_DEVICES} devices already and accepts no more"
        elif owner != device:
            reason = f"{device} came with the key of {owner}; no two devices may share a store"
        elif row is None or row.is_blocked or row.public_key not in (None, key):
            if row is None and not self.closed:
                return
            reason = self._reason(device, key)
        elif self._sessions.get(device, (key,))[0] != key and self._store.has_open_update(device):
            reason = "the open round has an update with the former key of this device; it is accepted after the round"
            self._after_round.add(device)
        else:
            return
        self._note_refused(birth)
        raise NotAccepted(device, key, reason)

    def _reason(self, device: str, key: bytes | None = None) -> str:
        """Returns the reason why `device`, with `key`, must not take part."""
        row = self._known.get(device)
        if row is not None and row.is_blocked:
            return f"this aggregator has blocked {device}: {row.reason}"
        if row is not None and row.public_key is not None:
            cure = f"Give it a new card: hushfleet fleet renew DIR {device} --new-card"
            return (
                f"this aggregator knows {device} by another key: two boards have one id, or a state directory was "
                f"lost. {cure if self._of_fleet else 'Give the newer board an id of its own'}"
            )
        if self._of_fleet:
            return f"{device} is not a board of this fleet, or has not enrolled; see: hushfleet fleet status DIR"
        command = f"hushfleet fleet add RUN {device}" + ("" if key is None else f" --key {key.hex()}")
        return f"this aggregator does not know {device}; its operator can accept it with: {command}"

    # what the operator sees

    def round_closed(self) -> None:
        self._unheard |= self._after_round
        self._after_round = set()

    def note(self, *, force: bool = False) -> None:
        """Writes the refused births for `hushfleet fleet status`, at most every few seconds."""
        now = self._clock()
        if not self._has_news or (now - self._noted_at < NOTE_S and not force):
            return
        self._noted_at = now
        try:
            self.register.put_refused_births(self._refused.values())
        except StoreError as error:
            log.warning("%s", error)
            return
        self._has_news = False

    def _note_refused(self, birth: Birth) -> None:
        name = birth.device, birth.public_key
        before = self._refused.pop(name, None)  # moves it to the end: the first one has been silent for longest
        if before is None and len(self._refused) >= MAX_REFUSED_BIRTHS:
            del self._refused[next(iter(self._refused))]
        self._refused[name] = RefusedBirth(*name, 1 if before is None else before.count + 1, self._wall())
        self._has_news = True


@lru_cache(maxsize=1 << 14)
def _verified(payload: bytes, federation: str) -> Message:
    """Verifies and decodes a birth. Each state of a session has one signature, and comes once or twice a round."""
    return decode_message(payload, federation=federation)
