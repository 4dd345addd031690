"""Runs the device's side of the protocol (docs/wire.md): one thread, one loop over the link's events.

`step` takes one event, then does everything that can be done now: fetch the task, answer the open round, train, send.
The fields of `tasks` and `rounds` hold the work in progress; the store holds everything that must survive a restart.
A lost link stops only the sending, and after `LinkUp` everything continues where it was.

Only the update is derived from the device's data and leaves it, with the exceptions in docs/privacy.md ("What declines
tell"). The reasons of a `Decline` are constant or about budgets and memory; only simulations write metrics, to a file.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from hushfleet.edge_client.board.budget_clock import BudgetClock
from hushfleet.edge_client.board.config import DeviceConfig
from hushfleet.edge_client.board.notes import Kind, WaitingNote, advice_on_silence
from hushfleet.edge_client.board.process import Supervisor
from hushfleet.edge_client.download import BlobSource
from hushfleet.edge_client.duties import Duty
from hushfleet.edge_client.optional import retention
from hushfleet.edge_client.rate_limits import EnrolmentRetry, RejectedMessages
from hushfleet.edge_client.rounds import RoundHandler
from hushfleet.edge_client.storage.declines import decline_reason
from hushfleet.edge_client.storage.state_files import FEATURES, WAITING
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.edge_client.store_check import StoreCheck
from hushfleet.edge_client.subscriptions import Subscriptions
from hushfleet.edge_client.tasks import TaskHandler
from hushfleet.edge_client.upload import Upload
from hushfleet.edge_client.verifier import MessageVerifier
from hushfleet.edge_client.worker.handover import Handover
from hushfleet.edge_client.worker.job import Workshop
from hushfleet.edge_client.worker.process import ChildProcess
from hushfleet.errors import CopiedStore, HushfleetError, LinkLost, StoreError, TooLarge, WireError
from hushfleet.version import __version__
from hushfleet.wire.format.messages import (
    Birth,
    Decline,
    DeviceStatus,
    Known,
    Message,
    NotEnrolled,
    Offer,
    ServerState,
    encode_message,
)
from hushfleet.wire.format.topics import Topics
from hushfleet.wire.link.interface import Delivery, Link, LinkDown, LinkEvent, LinkUp, Will

LONGEST_SLEEP_S = 1.0  # how soon a stop is noticed; nothing is sent for it

if TYPE_CHECKING:
    from hushfleet.edge_client.fleet.health import BoardHealth
    from hushfleet.wire.format.health import ErrorCode

_log = logging.getLogger("hushfleet.edge")


class Agent:
    """The client of one device.

    :param connect: creates the link from the will that the broker must publish when the link dies.
    :param store: opened by the caller, who also closes it.
    :param clock: monotonic seconds.
    :param stop: ends the work loop once it is set.
    :param supervisor: receives the sign that the work loop is alive (systemd's watchdog).
    :param workshop: does the training; None: a process of its own.
    :param duties: work for its fleet besides training.
    :param health: reports the board's health to its fleet; None if there is no fleet.
    :param budget_clock: counts time for the owner's limits; None to count with `clock`.
    """

    def __init__(
        self,
        config: DeviceConfig,
        connect: Callable[[Will], Link],
        store: DeviceStore,
        *,
        clock: Callable[[], float] = time.monotonic,
        stop: threading.Event | None = None,
        supervisor: Supervisor | None = None,
        workshop: Workshop | None = None,
        duties: Sequence[Duty] = (),
        health: BoardHealth | None = None,
        budget_clock: BudgetClock | None = None,
    ) -> None:
        self.config = config
        self.store = store
        self.device = config.device.id
        self.topics = Topics(config.device.federation)
        self.rejected = RejectedMessages(clock)
        self.store_check = StoreCheck(store, now=clock())
        self._clock = clock
        self._supervisor = supervisor or Supervisor(None, None)
        self._duties = duties
        self._memory_mib = config.memory_mib
        self._session = self.store_check.session
        self._verifier = MessageVerifier(store, config.server_key, federation=self.topics.federation)
        self._enrolment = EnrolmentRetry(self.device, store.identity.public_key)
        self._server: ServerState | None = None
        self._is_heard = False  # True if the server state has arrived over the present connection
        self._ready_epoch: int | None = None  # epoch of the last aggregator that was ready
        self._early: dict[str, bytes] = {}  # retained messages that came before the aggregator's key
        self.stop = stop or threading.Event()
        self._up = False
        self._down_because = "no connection yet"
        self._status: DeviceStatus = "ready"
        self.health = health
        note = None if config.simulation else config.store_path.with_name(WAITING)
        advice = advice_on_silence(self.device, self.topics.federation)
        self._waiting = WaitingNote(note, advice, clock=clock)
        self._retention: retention.Retention | None = None
        if config.data.keep or config.data.max_mib:
            folder = config.store_path.parent
            self._retention = retention.Retention(config.data, folder, arrived=store.arrivals.of_file)
        if config.simulation is not None:
            _log.warning(
                "SIMULATION: the noise of this device comes from the seed %d and protects nobody; "
                "remove the section [simulation] before the device goes into the field",
                config.simulation.seed,
            )
        self.link = connect(Will(self.topics.state(self.device), self._birth("lost")))
        topics = self.topics
        filters = [topics.down(self.device), topics.server, topics.task, topics.round]
        filters += (each for duty in duties for each in duty.filters)
        self._subscriptions = Subscriptions(self.link, filters, now=clock())
        self.blobs = BlobSource(store, self.link, self.topics, clock)
        waits = config.simulation is None
        self._budget_clock = budget_clock or BudgetClock(store.ledger, monotonic=clock, waits=waits)
        self.tasks = TaskHandler(config, store, self.blobs, self._budget_clock.now)
        self.rounds = RoundHandler(
            config,
            store,
            self.blobs,
            self.tasks,
            self.store_check,
            handover=Handover(
                config, store, workshop or ChildProcess(config.store_path.with_name(FEATURES)), clock=clock
            ),
            announce=self._announce,
            quiet=self._is_quiet,
            clock=clock,
            listens=self._budget_clock.listens,
        )

    # the loop

    def run(self) -> None:
        """Works until `stop` is set or, in a simulation, until the task has finished.

        Raises `CopiedStore` if the aggregator's answer shows that the store is not the only or newest one.
        """
        self.start()
        try:
            while not self.stop.is_set() and not (self.rounds.finished and self.config.simulation):
                self.step(LONGEST_SLEEP_S)
        finally:
            self.close()

    def start(self) -> None:
        """Opens the link; `step` does the rest."""
        self._subscriptions.begin()
        self.link.open()
        self._supervisor.ready()
        _log.info("device %s, federation %s, session %d", self.device, self.topics.federation, self._session)

    def step(self, longest_s: float) -> None:
        """Waits for one event, at most `longest_s` seconds, and does what can be done then."""
        self._supervisor.alive()
        if self._retention is not None:
            self._retention.advance(self._clock())
        self._budget_clock.tick()
        if self.rounds.is_quiet:
            if self.stop.wait(self.rounds.rests_s(LONGEST_SLEEP_S)):
                return  # nothing may tell whether the training had ended
        elif (event := self.link.receive(self._sleep_s(self.rounds.rests_s(longest_s)))) is not None:
            self._on_event(event)
        if not self.blobs.is_fetching:
            self.tasks.advance()
        self.rounds.advance()
        if self._up and not self.rounds.is_quiet:
            try:
                self._send_due()
            except LinkLost as error:
                self._up = False
                _log.debug("not sent: %s", error)
        self._waiting.is_(*self._waits_for())

    def close(self) -> None:
        """Announces that the device sleeps, and closes the link. The store is safe at any time."""
        self._supervisor.stopping()
        self.rounds.stop()
        with contextlib.suppress(HushfleetError):  # of a damaged ledger: each round reports it
            self._budget_clock.save()
        self._announce("sleeping")
        self.link.close()

    def rests_s(self, longest_s: float) -> float:
        """Returns how long `step` would wait now if no event comes."""
        rests_s = self.rounds.rests_s(longest_s)
        return rests_s if self.rounds.is_quiet else self._sleep_s(rests_s)

    def _sleep_s(self, longest_s: float) -> float:
        if not self._up:
            return longest_s
        now, upload = self._clock(), self._confirmed_upload
        if upload is not None and upload.busy:
            return 0.0
        question = None if self._verifier.key is None else self.store_check
        waiting = (question, self.blobs, upload, self._subscriptions, *self._duties)
        due = (each.due_at for each in waiting if each is not None)
        return min([longest_s, *(max(0.0, at - now) for at in due)])

    # incoming messages

    def _on_event(self, event: LinkEvent) -> None:
        if isinstance(event, LinkUp):
            _log.info("connected")
            self._up, self._is_heard = True, False
            self._subscriptions.connected(self._clock())
            for duty in self._duties:
                duty.connected()
            self.store_check.ask_again(self._clock())
            self._announce(self._status)
            self._resume()
        elif isinstance(event, LinkDown):
            _log.warning("no connection: %s", event.reason)
            self._up, self._down_because = False, event.reason
            for duty in self._duties:
                duty.lost()
        else:
            try:
                self._on_delivery(event)
            except CopiedStore:
                raise
            except WireError as error:
                self.rejected.add(event.topic, error)
            except StoreError as error:
                self._on_full_disk(error)
            except Exception:  # a retained message would meet the client again after every restart
                self._note_error("other")
                _log.exception("a message on %.120r could not be handled", event.topic)

    def _on_delivery(self, delivery: Delivery) -> None:
        topic = self.topics.parse(delivery.topic)
        payload = delivery.payload
        if topic.kind == "blob" and topic.digest is not None:
            self.blobs.on_chunk(topic.digest, payload)
        elif topic.kind == "down":
            self._on_down(self._verifier.verify(payload))
        elif topic.kind in ("fleet", "release"):
            for duty in self._duties:
                duty.take(topic, payload)
        elif not payload:
            return  # a retained message was cleared: nothing new is known
        elif topic.kind == "server":
            self._on_server(payload, retained=delivery.retained)
        elif topic.kind in ("task", "round") and self._verifier.key is None:
            self._early[delivery.topic] = payload
        elif topic.kind == "task":
            if self.tasks.on_notice(self._verifier.verify(payload)):
                self.rounds.on_new_task()
        elif topic.kind == "round":
            self.rounds.on_plan(self._verifier.verify(payload))

    def _on_down(self, message: Message) -> None:
        if isinstance(message, NotEnrolled):
            self._enrolment.refused(message, self._clock())
        elif isinstance(message, ServerState):  # the aggregator has not heard what this device announced
            self._announce(self._status)
        elif not isinstance(message, Known):
            self.rounds.on_answer(message)
        elif self.store_check.on_known(message, self._clock()):
            self._verifier.note_progress(message)

    def _on_server(self, payload: bytes, *, retained: bool) -> None:
        server = self._verifier.verify_server_state(payload)
        early, self._early = self._early, {}
        for topic in (self.topics.task, self.topics.round):
            if topic in early:
                self._on_event(Delivery(topic, early[topic], True))
        before, self._server, self._is_heard = self._server, server, True
        if server.state != "ready" or (server == before and retained):
            return
        is_new = server.epoch != self._ready_epoch
        if before is not None:
            self.store_check.aggregator_is_back(self._clock())
            if is_new or not retained:
                # The aggregator reads this device's state from the broker: another client may have overwritten it,
                # and some brokers retain nothing. With the first server state this is not needed: the device asks the
                # aggregator, which answers if it has received no state.
                self._announce(self._status)
        if is_new:
            self._ready_epoch = server.epoch
            self._resume()

    def _resume(self) -> None:
        self.blobs.ask_at_once()
        self.rounds.take("resume")

    def _on_full_disk(self, error: StoreError) -> None:
        self._note_error("disk")
        if self.tasks.notice is not None and self.tasks.runtime is None:
            self.tasks.decline(error)
        else:
            self.rounds.take("decline", decline_reason(error))

    def _is_quiet(self, quiet: bool) -> None:
        """Lets the link rest while a training's duration is hidden: not even an acknowledgement is sent meanwhile."""
        if quiet:
            self.link.pause()
        else:
            self.link.resume()

    # outgoing messages

    @property
    def _confirmed_upload(self) -> Upload | None:
        """The upload in progress; None while it is unknown whether the store is the newest one."""
        return self.rounds.upload if self.store_check.confirmed else None

    @property
    def _lacks_news(self) -> bool:
        """True if a retained message of the aggregator has not arrived: its state, the task or the plan."""
        plan = self.rounds.plan
        if not self._is_heard or self._server is None or self._server.state != "ready":
            return not self._is_heard
        return plan is None or plan.task != self.tasks.name or self._verifier.is_ahead_of(plan)

    def _send_due(self) -> None:
        """Sends at most one message of each kind, so that the link is read in between."""
        now, messages = self._clock(), self.topics.msg(self.device)
        if self._subscriptions.again(now, lacks=self._lacks_news):
            self._announce(self._status)  # the broker may have dropped this announcement, too
        if self._enrolment.is_due(now):
            self._announce(self._status)
        if self.rounds.decline is not None and self.rounds.decline_due:
            self._publish(messages, self.rounds.decline)
            self.rounds.decline_due = False
        if self._verifier.key is not None and (ask := self.store_check.question(now)) is not None:
            self._publish(messages, ask)
        if (want := self.blobs.want(now)) is not None:
            self._publish(messages, want)
        self._do_duties(now)
        upload = self._confirmed_upload
        if upload is None:
            return
        if upload.offer_due or (not upload.busy and now >= upload.due_at):
            self._publish(messages, upload.offer)
            upload.offered(now)
        elif (frame := upload.next_chunk()) is not None:
            try:
                self.link.publish(self.topics.chunk(self.device), frame)
            except TooLarge as error:
                _log.error("the update cannot be sent: %s; the task needs smaller wire.chunk_bytes", error)
                self.rounds.drop_upload()
            else:
                upload.chunk_sent(now)

    def _do_duties(self, now: float) -> None:
        busy = self.blobs.is_fetching or self.rounds.upload is not None
        for duty in self._duties:
            if now >= duty.due_at:
                duty.advance(self.link, now, busy=busy)
        if self.health is not None and now >= self.health.due_at:
            self.health.chosen = self.store.accelerator()
            health = self.health.message(now, session=self._session, hides_duration=self.tasks.hides_duration)
            self.link.publish(self.topics.health(self.device), self._encoded(health), retain=True)

    def _publish(self, topic: str, message: Message) -> None:
        self.link.publish(topic, self._encoded(message))
        if self.health is not None and isinstance(message, Decline | Offer):
            self.health.last_decline = message.code if isinstance(message, Decline) else None

    def _announce(self, status: DeviceStatus) -> None:
        self._status = status
        if status == "training" and self.rounds.plan is not None:
            self._waiting.is_("nothing", f"round {self.rounds.plan.round}: training")
        if self._up:
            try:
                self.link.publish(self.topics.state(self.device), self._birth(status), retain=True)
            except LinkLost:
                self._up = False  # announced again after the next `LinkUp`

    def _birth(self, status: DeviceStatus) -> bytes:
        birth = Birth(
            device=self.device,
            session=self._session,
            state=status,
            board=self.config.device.board,
            version=__version__,
            public_key=self.store.identity.public_key,
            memory_mib=self._memory_mib,
        )
        return self._encoded(birth)

    # the event that it waits for

    def _waits_for(self) -> tuple[Kind, str]:
        server = self._server
        if not self._up:
            return "broker", f"the broker {self.config.broker.url.rpartition('@')[2]}: {self._down_because}"
        if self.rounds.finished and not self.blobs.is_fetching:
            return "round", "the next task; the last one has ended"
        if server is None:
            return "aggregator", f"an aggregator: none was heard of in the federation {self.topics.federation}"
        if server.state != "ready":
            return "away", "the aggregator, which is away"
        if self._enrolment.reason is not None and not self.store_check.confirmed:
            return "operator", self._enrolment.reason
        if not self.store_check.confirmed:
            return "answer", "the aggregator, which has not answered yet"
        return self.rounds.waits_for

    def _note_error(self, code: ErrorCode) -> None:
        if self.health is not None:
            self.health.last_error = code

    def _encoded(self, message: Message) -> bytes:
        return encode_message(message, self.store.identity, federation=self.topics.federation)
