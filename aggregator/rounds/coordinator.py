"""Runs the aggregator's side of the protocol (docs/wire.md): one thread, one loop over the link's events.

`step` takes the events that are there, then does everything that is due: it stores the updates that have arrived in one
transaction, answers their devices, sends chunks that devices want, reports gaps in uploads, and advances rounds
(`hushfleet.aggregator.rounds.cycle`). The engine's store holds everything that must survive; the state here can be lost
at any time, because devices ask again. A message is processed only if it is signed with the key of an accepted device
(`hushfleet.aggregator.storage.enrolment`); all others are counted and dropped.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable

from hushfleet.aggregator.payloads.blobs import ChunkServer
from hushfleet.aggregator.payloads.checked_update import CheckedUpdate
from hushfleet.aggregator.payloads.refusals import RefusalCounter
from hushfleet.aggregator.results.events import EventLog
from hushfleet.aggregator.rounds.charge_book import ChargeBook, charge_of
from hushfleet.aggregator.rounds.cycle import RoundCycle
from hushfleet.aggregator.rounds.engine import RoundEngine
from hushfleet.aggregator.rounds.next_round import NextRound
from hushfleet.aggregator.rounds.outbox import Outbox
from hushfleet.aggregator.rounds.rhythm import Rhythm
from hushfleet.aggregator.rounds.round_events import update_fields
from hushfleet.aggregator.rounds.run_log import RunLog
from hushfleet.aggregator.rounds.thresholds import RunningThresholds
from hushfleet.aggregator.rounds.uploads import Uploads
from hushfleet.aggregator.storage.charged_keys import ChargedKeys
from hushfleet.aggregator.storage.enrolment import (
    MAX_UNKNOWN_BURST,
    UNKNOWN_A_SECOND,
    Enrolment,
    NotAccepted,
    TokenBucket,
)
from hushfleet.aggregator.storage.list_file import ListFile
from hushfleet.errors import (
    BadSignature,
    HushfleetError,
    LinkLost,
    Malformed,
    OtherVersion,
    StoreError,
    TooLarge,
)
from hushfleet.secure.membership_list import MembershipList
from hushfleet.wire.format.identity import Identity
from hushfleet.wire.format.messages import (
    Ask,
    Decline,
    Known,
    Message,
    NotEnrolled,
    Offer,
    Want,
    decode_message,
    peek_kind,
    unverified,
)
from hushfleet.wire.link.interface import Delivery, Link, LinkDown, LinkEvent, LinkUp, Will

BLOCK_AFTER_FAULTS = 3
"""A device is blocked after this many rounds in which an update that it signed was refused."""
LONGEST_SLEEP_S = 0.2
LINGER_S = 2.0
MOST_LINGER_S = 60.0
EVENTS_A_STEP = 64
FRAMES_A_STEP = 8
MAX_WARNED = 100

log = logging.getLogger("hushfleet.aggregator")


class Coordinator:
    """Runs the rounds of an engine with the devices behind a broker.

    :param connect: creates the link from the will that the broker must publish when the link dies.
    :param identity: the key that devices have pinned, the same for every run of a federation.
    :param epoch: the number of this start of the key (`identity_file.next_epoch`), larger than all before it.
    :param enrolment: decides who may take part, on the engine's store; the caller opens and closes it.
    :param membership_list: the membership list of secure aggregation, signed by the operator; None, or no file, for all
        accepted devices.
    :param charges: the charges that each board of a fleet may have spent; None if they are not needed.
    :param thresholds: in a fleet, with how many boards rounds open and close; by default the task's numbers.
    :param seen: the rounds that each device's key has charged, over all runs; None tells devices nothing about them.
    :param rhythm: decides when rounds may be open; by default the task's schedule.
    :param events: the run's event log; None to write none.
    :param clock: monotonic seconds, the same clock as the engine's.
    """

    def __init__(
        self,
        engine: RoundEngine,
        connect: Callable[[Will], Link],
        *,
        identity: Identity,
        epoch: int,
        enrolment: Enrolment,
        membership_list: ListFile[MembershipList] | None = None,
        federation: str = "default",
        charges: ChargeBook | None = None,
        thresholds: RunningThresholds | None = None,
        seen: ChargedKeys | None = None,
        rhythm: Rhythm | None = None,
        events: EventLog | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engine = engine
        self.store = engine.store
        self.epoch, self.enrolment = epoch, enrolment
        self.present: dict[str, str] = {}
        self._log, self._clock, self._seen = RunLog(events, engine), clock, seen
        self._asked: dict[str, Ask] = {}  # for each device, the first question of its newest session
        self._other_versions: set[str] = set()
        self._calls = TokenBucket(UNKNOWN_A_SECOND, MAX_UNKNOWN_BURST, now=clock())  # to devices without a key
        self._refusals = RefusalCounter(self.store, now=clock())
        self._blobs = ChunkServer(engine.find_blob, chunk_bytes=engine.spec.wire.chunk_bytes)
        self._uploads = Uploads(engine, self._refusals, clock=clock)
        self._charged: dict[str, tuple[bytes, str, int, float]] = {}  # for `ChargedKeys.note`, before the replies
        self._replied: list[CheckedUpdate] = []  # updates with their replies
        self._up = False
        self._wanted_at = clock()  # when a device last wanted a blob
        self._outbox = Outbox(connect, identity=identity, epoch=epoch, federation=federation)
        self.link, self.topics = self._outbox.link, self._outbox.topics
        rhythm = rhythm or Rhythm(engine.prepared.task.schedule, engine.store)
        next_round = NextRound(
            engine,
            self._log,
            enrolment=enrolment,
            present=self.present,
            membership_list=membership_list,
            budgets=None if charges is None else charges.budgets,
            of_fleet=charges is not None,
            thresholds=thresholds or RunningThresholds(engine.prepared.task),
            rhythm=rhythm,
            now=clock(),
        )
        self.rounds = RoundCycle(
            engine,
            self._outbox,
            self._log,
            enrolment=enrolment,
            next_round=next_round,
            on_closed=self._end_round,
            membership_list=membership_list,
            charges=charges,
            rhythm=rhythm,
            clock=clock,
        )

    # the loop

    def run(self, stop: threading.Event | None = None, *, linger_s: float = LINGER_S) -> None:
        """Runs until devices were told that the task has finished and none has asked for the final model for `linger_s`
        seconds, or until `stop` is set."""
        self.start()
        try:
            while not (stop is not None and stop.is_set()):
                self.step(LONGEST_SLEEP_S)
                if self._served_all(linger_s):
                    break
        finally:
            self.close()

    def _served_all(self, linger_s: float) -> bool:
        now, finished_at = self._clock(), self.rounds.finished_at
        if finished_at is None:
            return False
        return now - max(finished_at, self._wanted_at) >= linger_s or now - finished_at >= max(linger_s, MOST_LINGER_S)

    def start(self) -> None:
        """Opens the link; everything else follows from its events."""
        self.engine.exclude(*(device for device in self.engine.cohort if self.enrolment.key(device) is None))
        self._log.begin()
        for topic_filter in (self.topics.all_states, self.topics.all_msgs, self.topics.all_chunks):
            self.link.subscribe(topic_filter)
        self.link.open()

    def step(self, longest_s: float) -> None:
        """Waits for an event, at most `longest_s` seconds, takes those that have come, and does what is due then."""
        now = self._clock()
        due_at = min(self._blobs.due_at, self._uploads.due_at, self.enrolment.due_at) if self._up else now + longest_s
        event = self.link.receive(min(longest_s, max(0.0, due_at - now)))
        is_idle, taken = event is None, 0
        try:
            while event is not None:
                self._on_event(event)
                taken += 1
                has_room = taken < EVENTS_A_STEP and not self._uploads.is_full
                event = self.link.receive(0.0) if has_room else None
            self._finish_uploads()
            if is_idle or self._clock() >= self.enrolment.due_at:
                self._settle_births()
            self._advance()
        except LinkLost as error:
            log.debug("nothing was sent: %s", error)
            self._up = False

    def close(self) -> None:
        """Announces that the aggregator goes, and closes the link. The store is safe at any time."""
        self.enrolment.note(force=True)
        self._store_refusals(force=True)
        try:
            self._outbox.state("lost")
        except LinkLost as error:
            log.debug("no goodbye was sent: %s", error)
        self.link.close()

    # incoming messages

    def _on_event(self, event: LinkEvent) -> None:
        if isinstance(event, LinkUp):
            self._up = True
            log.info("connected to the broker")
            self._log.link("up")
            self._outbox.state("ready")
            self._outbox.task(self.engine.spec.task, self.engine.prepared.spec_ref)
            self.rounds.announce_soon()
        elif isinstance(event, LinkDown):
            self._up = False
            self._blobs.clear()
            log.warning("the connection to the broker was lost: %s", event.reason)
            self._log.link("down")
        else:
            self._on_delivery(event)

    def _on_delivery(self, delivery: Delivery) -> None:
        device: str | None = None
        try:
            topic = self.topics.parse(delivery.topic)
            device = topic.device
            if device is None or not delivery.payload:
                return
            if topic.kind == "state":
                self.enrolment.take(device, delivery.payload, federation=self.topics.federation)
            elif topic.kind == "msg" and self._lacks_birth(device, delivery.payload):
                self._outbox.call(device)
            elif topic.kind == "msg" and not self._changes_nothing(device, delivery.payload):
                message = self._verified(device, delivery.payload)
                if self._replied or device in self._charged or self._uploads.has_arrived(device):
                    self._finish_uploads()
                self._on_message(device, message)
            elif topic.kind == "chunk":
                self._key(device)
                self._uploads.chunk(device, delivery.payload)
        except BadSignature as error:
            is_known = device is not None and self.enrolment.key(device) is not None
            self._refuse(device, "bad-signature" if is_known else "unknown-device", error)
            if isinstance(error, NotAccepted):
                self._outbox.send(error.device, NotEnrolled(error.device, error.public_key, str(error)))
        except (Malformed, TooLarge) as error:
            if isinstance(error, OtherVersion):
                self._warn_of_version(device or "?", error)
            self._refuse(device, "malformed", error)
        except StoreError as error:
            self._refuse(device, "store-full", error)

    def _refuse(self, device: str | None, code: str, error: HushfleetError) -> None:
        listed = device is not None and self.enrolment.is_listed(device)
        self._refusals.add(device if listed else None, code, str(error))

    def _warn_of_version(self, device: str, error: OtherVersion) -> None:
        """Warns once for each name, and for at most `MAX_WARNED` names, because anyone may invent more."""
        if device not in self._other_versions and len(self._other_versions) < MAX_WARNED:
            self._other_versions.add(device)
            log.warning("%s cannot take part: %s", device, error)

    def _lacks_birth(self, device: str, payload: bytes) -> bool:
        """Returns whether a device without an accepted key asks and may be answered: its birth was lost, or is late."""
        if self.enrolment.key(device) is not None or peek_kind(payload) not in (Ask, Want):
            return False
        return self._calls.take(self._clock())

    def _changes_nothing(self, device: str, payload: bytes) -> bool:
        """Returns whether an accepted device wants only what is about to be sent to all: whoever signed it."""
        self._key(device)
        want = unverified(Want, payload)
        return want is not None and self._blobs.is_marked(want)

    def _verified(self, device: str, payload: bytes) -> Message:
        return decode_message(payload, federation=self.topics.federation, public_key=self._key(device))

    def _key(self, device: str) -> bytes:
        key = self.enrolment.key(device)
        if key is None:
            raise BadSignature(f"{device} is not an accepted device, or has not announced itself")
        return key

    def _settle_births(self) -> None:
        """Notes the presence of accepted devices."""
        try:
            births = self.enrolment.settle()
        except StoreError as error:
            self._refusals.add(None, "store-full", str(error))
            return
        for birth in births:
            device = birth.device
            self.engine.include(device)
            if birth.state in ("ready", "training"):
                self.present[device] = birth.state
                self.engine.back(device)
            else:
                self.present.pop(device, None)
                self.engine.lost(device)
            self._log.presence(device, birth.state, board=birth.board)
        self.rounds.arrived(birth.device for birth in births if birth.device in self.present)

    def _apply_changes(self) -> None:
        """Applies changes of the register by the operator or a policy, also in the middle of a round."""
        changes = self.enrolment.take_changes()
        for device, (_, reason) in changes.out.items():
            log.warning("%s is put out: %s", device, reason)
            self.engine.exclude(device)
            self._uploads.drop(device)
            self._asked.pop(device, None)
            if self.present.pop(device, None) is not None:
                self._log.presence(device, "lost")
        for device in changes.replaced:
            self._uploads.forget(device)
        for device in changes.accepted:
            # its birth is retained: most brokers send it again after a new subscription
            self.link.subscribe(self.topics.state(device))
            self.link.unsubscribe(self.topics.state(device))
        if changes.replaced and self.engine.keys_changed(changes.replaced) and self._up:
            self.rounds.announce()
        for device, (key, reason) in changes.out.items() if self._up else ():  # last: the link may be lost
            self._outbox.send(device, NotEnrolled(device, key, reason))
        for device in changes.accepted if self._up else ():
            self._outbox.call(device)

    def _on_message(self, device: str, message: Message) -> None:
        if isinstance(message, Want):
            self._wanted_at = self._clock()
            if not self._blobs.want(device, message, now=self._clock()):
                log.info("%s wants %s..., which is not available", device, message.digest.hex()[:16])
        elif isinstance(message, Offer):
            self._log.offer(device, message)
            if self._is_charged(message):
                self._charged[device] = (self._key(device), message.task, message.round, 0.0)
            update = self._uploads.offer(device, message)
            self._replied += [] if update is None else [update]
        elif isinstance(message, Decline):
            self._on_decline(device, message)
        elif isinstance(message, Ask):
            self._on_ask(device, message)
        else:
            raise Malformed(f"expected a device's message, got a {type(message).__name__}")

    def _is_charged(self, offer: Offer) -> bool:
        """Returns whether the device's key has charged a round: a device charges before it offers, and signs the offer.

        The answer of a committee's member is offered in the same way and charges nothing.
        """
        engine = self.engine
        newest = engine.closed_rounds if engine.plan is None else engine.plan.round
        is_update = engine.spec.privacy.secure is None or (engine.collects_updates and offer.round == newest)
        return self._seen is not None and is_update and offer.task == engine.spec.task and offer.round <= newest

    def _finish_uploads(self) -> None:
        """Stores the updates that have arrived, notes what their devices have charged, and answers them.

        A device whose charge cannot be noted gets no answer, and offers again.
        """
        updates = [*self._replied, *self._uploads.take_arrived()]
        self._replied = []
        for update in updates:
            self._log_update(update)
        silent = self._note_charges(updates)
        for update in updates:
            if update.reply is not None and update.device not in silent:
                self._outbox.send(update.device, update.reply)

    def _note_charges(self, updates: Iterable[CheckedUpdate]) -> Collection[str]:
        """Notes the offered rounds, and the charges that accepted updates declare; returns the devices for which this
        failed, whose updates are dropped if they are not stored."""
        charged, self._charged = self._charged, {}
        if self._seen is None:
            return ()
        for update in updates:
            key = self.enrolment.key(update.device)
            if update.charge is not None and update.acknowledged and key is not None:
                charged[update.device] = (key, update.task, update.round, charge_of(update.charge).weight)
        try:
            if charged:
                self._seen.note(charged.values())
        except StoreError as error:
            for device in charged:
                self._refuse(device, "store-full", error)
                self._uploads.drop(device)
            return charged
        return ()

    def _on_decline(self, device: str, message: Decline) -> None:
        if message.task != self.engine.spec.task:
            return
        if self.engine.decline(device, message.code, message.reason, round=message.round):
            self._uploads.drop(device)
            self.rounds.declined(device, message.code)
            self._log.note("decline", round=message.round, device=device, code=message.code, reason=message.reason)

    def _log_update(self, update: CheckedUpdate) -> None:
        """Logs a received update, and blocks its device after some faults.

        `hushfleet fleet unblock` lifts the block; after the same number of further faults the device is blocked again.
        """
        if update.offer is None or update.reply is None:
            return
        device, offer, faults = update.device, update.offer, update.faults
        if update.kind == "update" and update.code == "accepted":
            self.rounds.accepted(device, update.round)
        if update.data:
            self._log.note(update.kind, **update_fields(update, round=offer.round, payload_bytes=offer.size))
        if faults and faults % BLOCK_AFTER_FAULTS == 0:
            reason = f"its updates were refused in {faults} rounds, the last as {update.code}: {update.reason}"
            try:
                self.enrolment.block(device, reason)
                self._log.note("quarantine", device=device, reason=reason)
            except StoreError as error:
                log.warning("%s could not be blocked: %s", device, error)

    def _on_ask(self, device: str, ask: Ask) -> None:
        """Answers a device. Of two processes with one key, the later session continues, or the first of equal ones."""
        if self.enrolment.has_new_key(device):
            self._settle_births()
            self._apply_changes()
        if self.enrolment.is_another(device):
            return  # the known facts are about the earlier board, and this one would consider itself a copy
        newest = max(self.enrolment.session(device), ask.session)
        before = self._asked.get(device)
        if ask.session == newest and (before is None or before.session < newest):
            before = self._asked[device] = ask
        plan = self.rounds.announcement
        last_round, last_digest = self._uploads.latest(device)
        known = Known(
            epoch=self.epoch,
            nonce=ask.nonce,
            session=newest,
            yours=ask.session == newest and ask == before,
            task=plan.task,
            round=plan.round,
            phase=plan.phase,
            last_round=last_round,
            last_digest=last_digest,
            seen=None if self._seen is None else self._seen.of(self._key(device)),
        )
        self.rounds.expect([device])
        if not known.yours:
            self._refusals.add(device, "duplicate", f"session {ask.session} asked, but session {newest} is known")
        self._outbox.send(device, known)
        if device not in self.present and not self.enrolment.waits(device):
            self._outbox.call(device)

    # due work

    def _advance(self) -> None:
        self._store_refusals()
        self.enrolment.note()
        self._apply_changes()
        if self._up:
            for frame in self._blobs.frames(now=self._clock(), limit=FRAMES_A_STEP):
                self._outbox.frame(frame)
            for device, missing in self._uploads.gaps():
                self._outbox.send(device, missing)
        self.rounds.advance(linked=self._up)

    def _end_round(self, unused: set[bytes]) -> None:
        self._store_refusals(force=True)
        for digest in unused:
            self._blobs.forget(digest)
        self._uploads.end_round()

    def _store_refusals(self, *, force: bool = False) -> None:
        for (device, code), count in self._refusals.flush(now=self._clock(), force=force).items():
            self._log.note("refused", device=device, code=code, count=count)
