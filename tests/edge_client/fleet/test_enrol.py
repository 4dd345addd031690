"""What a board makes of answers, in which order, whatever is killed when."""

from __future__ import annotations

import contextlib
import datetime
import gc
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from hushfleet.aggregator.fleet.trust import keys
from hushfleet.aggregator.fleet.trust.authority import make_key
from hushfleet.edge_client.board.process import Supervisor
from hushfleet.edge_client.duties import Duty
from hushfleet.edge_client.fleet.client_files import ChargeLine
from hushfleet.edge_client.fleet.enrol import CertificateRequest, enrol
from hushfleet.edge_client.fleet.health import BoardHealth
from hushfleet.edge_client.fleet.membership import run_in_fleet
from hushfleet.edge_client.fleet.renewal import AskAgain
from hushfleet.edge_client.fleet.second_place import SecondPlace
from hushfleet.edge_client.storage.state_files import CHARGED
from hushfleet.errors import BadSignature, CopiedStore, Malformed, StoreError
from hushfleet.privacy.charge import Charge
from hushfleet.schema import pack
from hushfleet.wire.format.fleet_messages import EnrolAnswer, EnrolRequest
from hushfleet.wire.format.identity import Identity
from hushfleet.wire.format.messages import decode_message, encode_message
from hushfleet.wire.format.topics import Topics
from hushfleet.wire.link.interface import Delivery, Link, LinkDown, LinkEvent, LinkUp
from support.desk import FEDERATION, Board
from support.edge import Clock
from support.enroller import Desk

DEVICE = "greenhouse-01"


class Talk:
    """A board and the desk that answers it, without a network."""

    def __init__(self, folder: Path) -> None:
        self.desk = Desk(folder)
        self.board = Board(self.desk.folder, folder / "board", DEVICE, token=self.desk.token(DEVICE))
        self.service = keys.service(self.desk.folder)
        charge = pack(Charge("device", "one device's update", "gaussian", 2.0))
        self.desk.register.note_charges("small-00000000", 3, {DEVICE: charge}, certain=False)

    def answer(self, frame: bytes, **changes: Any) -> bytes:
        request = decode_message(frame, federation=FEDERATION)
        assert isinstance(request, EnrolRequest)
        answer = self.desk.enroller.answer(request)
        fields = {name: getattr(answer, name) for name in EnrolAnswer.__dataclass_fields__}
        return encode_message(EnrolAnswer(**{**fields, **changes}), self.service, federation=FEDERATION)


@pytest.fixture
def talk(tmp_path: Path) -> Iterator[Talk]:
    made = Talk(tmp_path)
    yield made
    made.board.store.close()
    made.desk.close()


@pytest.mark.parametrize("dies_at", ["note_enrolled", "keep", "_erase_token"])
def test_a_kill_at_any_step_leaves_nothing_uncounted(talk: Talk, dies_at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    board = talk.board
    asking = board.asking()
    target = {"note_enrolled": board.store, "keep": board.tls, "_erase_token": asking}[dies_at]

    def die(*_: object) -> None:
        raise StoreError("killed here")

    answer = talk.answer(asking.frame())
    with monkeypatch.context() as patch:
        patch.setattr(target, dies_at, die)
        with pytest.raises(StoreError, match="killed here"):
            asking.take(answer)
    rounds = [entry.round for entry in board.store.ledger.entries()]
    assert not board.tls.is_usable() or rounds == [3], "with a certificate, the ledger is complete"
    assert board.token_file.exists()
    again = board.asking()  # the next start
    again.take(talk.answer(again.frame()))
    assert again.granted
    assert board.store.is_enrolled
    assert [entry.round for entry in board.store.ledger.entries()] == [3]
    assert not board.token_file.exists()


def test_answers_of_others_are_not_believed(talk: Talk) -> None:
    asking, other = talk.board.asking(), Identity.generate()
    frame = asking.frame()
    good = talk.answer(frame)
    answer = decode_message(good, federation=FEDERATION, public_key=talk.service.public_key)
    forged = encode_message(answer, other, federation=FEDERATION)
    with pytest.raises(BadSignature):
        asking.take(forged)
    issued = talk.desk.authority.sign_client(
        DEVICE, make_key().public_key(), days=1, now=datetime.datetime.now(datetime.UTC)
    )
    foreign = talk.answer(frame, certificate=issued.pem)
    with pytest.raises(Malformed, match="another key"):
        asking.take(foreign)
    assert not talk.board.tls.is_usable()
    earlier = talk.board.asking()
    earlier.take(good)  # to another start of this board: another nonce
    assert not earlier.granted
    asking.take(good)
    assert asking.granted


def test_a_board_waits_as_long_as_it_is_told(talk: Talk) -> None:
    now = [0.0]
    asking = CertificateRequest(talk.board.config, talk.board.store, talk.board.tls, clock=lambda: now[0])
    frame = asking.frame()
    asking.take(talk.answer(frame, verdict="refused", certificate=b"", reason="no", retry_s=600, carried=()))
    assert asking.due_at == 600.0
    asking.take(talk.answer(frame, verdict="pending", certificate=b"", reason="wait", retry_s=10**9, carried=()))
    assert asking.due_at == 3600.0
    asking.connected()
    assert asking.due_at == 0.0


class _Service:
    """A link that fails once, then is up, to a service that gives these verdicts."""

    def __init__(self, talk: Talk, *verdicts: str) -> None:
        self.talk, self.verdicts, self.events = talk, list(verdicts), deque[LinkEvent]([LinkDown("refused"), LinkUp()])

    def publish(self, topic: str, payload: bytes, *, retain: bool = False) -> None:
        if self.verdicts:
            answer = self.talk.answer(payload, verdict=self.verdicts.pop(), certificate=b"", reason="ask Ada")
            self.events.append(Delivery(topic, answer, False))

    def receive(self, timeout_s: float) -> LinkEvent | None:
        return self.events.popleft() if self.events else None

    def open(self) -> None: ...
    def close(self) -> None: ...
    def subscribe(self, topic_filter: str) -> None: ...


def test_a_board_that_enrols_says_what_it_waits_for(talk: Talk) -> None:
    board, said, clock = talk.board, list[tuple[str, str]](), Clock()

    def waits_for(kind: str, words: str) -> None:
        clock.now += 1
        if (kind, words) not in said:
            said.append((kind, words))

    link = cast(Link, _Service(talk, "pending"))
    topics, stop = Topics(FEDERATION), threading.Event()
    asking = CertificateRequest(board.config, board.store, board.tls, clock=clock)
    given = enrol(asking, lambda: link, topics, DEVICE, stop, waits_for=waits_for, patience_s=30, clock=clock)
    assert not given
    assert said == [
        ("certificate", "a certificate of the fleet: no connection yet"),
        ("certificate", "a certificate of the fleet: where certificates are given cannot be reached: refused"),
        ("certificate", "a certificate of the fleet: asked, and not answered yet"),
        ("certificate", "a certificate of the fleet: no certificate yet (pending): ask Ada"),
    ]


class _Desk(_Service):
    """It gives certificates."""

    def publish(self, topic: str, payload: bytes, *, retain: bool = False) -> None:
        self.events.append(Delivery(topic, self.talk.answer(payload), False))


class _Held:
    """As an agent and its handlers, it is referred to by what it refers to."""

    def __init__(self) -> None:
        self.itself = self


def test_what_an_agent_held_is_free_before_the_next_one_begins(talk: Talk) -> None:
    """Else a board holds its images and graphs twice after some lost connections."""
    stop, held, freed = threading.Event(), list[weakref.ref[_Held]](), list[bool]()

    def run_agent(duties: Sequence[Duty], health: BoardHealth) -> None:
        freed.extend(each() is None for each in held)
        if held:
            stop.set()
            return
        held.append(weakref.ref(_Held()))
        raise AskAgain("8 connections in a row have failed")

    connect = cast("Any", lambda: _Desk(talk))
    gc.disable()
    try:
        run_in_fleet(talk.board.config, talk.board.store, run_agent, connect, stop, Supervisor(None, None))
    finally:
        gc.enable()
    assert freed == [True]


@pytest.mark.parametrize("rounds", [0, 5])
def test_a_client_first_compares_its_ledger_with_its_boot_partition(talk: Talk, tmp_path: Path, rounds: int) -> None:
    """Before it connects to anybody; and it keeps the line while its agent runs."""
    board, stop, kept = talk.board, threading.Event(), list[bool]()
    assert board.config.fleet is not None
    config = replace(board.config, fleet=replace(board.config.fleet, releases=str(tmp_path / "opt")))
    line = ChargeLine(board.store.identity.public_key.hex(), rounds, 0.25 * rounds)
    (tmp_path / "opt").mkdir()
    (tmp_path / "opt" / CHARGED).write_text(line.text)

    def run_agent(duties: Sequence[Duty], health: BoardHealth) -> None:
        kept.append(any(isinstance(duty, SecondPlace) for duty in duties))
        stop.set()

    def run() -> None:
        run_in_fleet(config, board.store, run_agent, cast("Any", lambda: _Desk(talk)), stop, Supervisor(None, None))

    if rounds:
        with pytest.raises(CopiedStore, match="the boot partition says that this board's key has charged 5 rounds"):
            run()
    else:
        run()
    assert kept == [True] * (not rounds)


def test_what_twenty_thousand_rounds_have_cost_comes_in_parts(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds here and there that cost the same, and rounds that cost something else each time."""
    spent = {("often-00000000", 2 * number): 4.0 for number in range(18_000)}
    spent |= {("varied-00000000", number): 1.0 + number / 7 for number in range(2_000)}
    packed = {key: pack(Charge("device", "one device's update", "gaussian", cost)) for key, cost in spent.items()}
    with talk.desk.register.transaction():
        rows = [(DEVICE, task, number, charge) for (task, number), charge in packed.items()]
        talk.desk.register.write_all("INSERT INTO charges VALUES (?, ?, ?, ?, 1)", rows)
    spent["small-00000000", 3] = 2.0
    store, asking = talk.board.store, talk.board.asking()
    asked = 0

    def full(*_: object) -> None:
        assert len(store.ledger.entries()) == 0
        raise StoreError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(store, "note_enrolled", full)
        with contextlib.suppress(StoreError):
            while asked < 40:
                asked += 1
                answer = talk.answer(asking.frame())
                asking.take(answer)
                asking.take(answer)  # it came twice
    assert 10 < asked < 40
    assert not store.is_enrolled
    for _ in range(asked):  # all of it again
        assert not asking.granted
        asking.take(talk.answer(asking.frame()))
    assert asking.granted
    assert {(entry.task, entry.round): entry.charge.noise_multiplier for entry in store.ledger.entries()} == spent


def test_parts_that_go_round_in_circles_are_refused(talk: Talk) -> None:
    asking = talk.board.asking()
    asking.take(talk.answer(asking.frame(), up_to=("small-00000000", 3)))
    with pytest.raises(Malformed, match="came after"):
        asking.take(talk.answer(asking.frame(), up_to=("small-00000000", 3)))
    assert not talk.board.store.is_enrolled
