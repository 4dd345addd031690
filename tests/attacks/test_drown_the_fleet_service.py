"""Strangers send requests for certificates without end: the service stays cheap, and boards come in all the same."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hushfleet.aggregator.fleet import service as service_module
from hushfleet.aggregator.fleet.software.cards import choose_boards
from hushfleet.aggregator.fleet.trust.registry import MAX_REFUSED_REQUESTS
from hushfleet.simulator.world.hub import LocalHub
from hushfleet.wire.format.identity import Identity
from hushfleet.wire.format.messages import encode_message
from hushfleet.wire.link.interface import Delivery
from support.desk import FEDERATION
from support.enroller import Asker, Desk

BOARD = "greenhouse-01"


def test_a_flood_is_not_read_and_leaves_little_behind(tmp_path: Path) -> None:
    desk, hub, now, read = Desk(tmp_path), LocalHub(), [0.0], []
    service = desk.service(hub, clock=lambda: now[0])
    answer = desk.enroller.answer
    desk.enroller.answer = lambda request: read.append(request) or answer(request)  # type: ignore[method-assign]
    stranger = Asker(BOARD, "guess", seed=9)
    frames = []
    for _ in range(40):
        stranger.identity = Identity.from_bytes(os.urandom(32))
        frames.append(encode_message(stranger.request(), stranger.identity, federation=FEDERATION))
    service._enrolment_link.publish = lambda *_: None  # type: ignore[method-assign]
    for number in range(4000):
        now[0] = number / 1000  # a thousand a second
        delivery = Delivery(service.topics.request(BOARD), frames[number % len(frames)], False)
        service._on_event(delivery, "", service._on_request)
    allowed = service_module.MAX_REQUESTS_BURST + 4 * service_module.REQUESTS_A_SECOND
    assert len(read) <= allowed + 1
    assert len(desk.registry.refused_requests()) <= MAX_REFUSED_REQUESTS
    assert desk.registry.rows("SELECT COUNT(*) FROM certificates") == [(0,)]
    now[0] += 1.0
    board = Asker(BOARD, desk.token(BOARD))
    frame = encode_message(board.request(), board.identity, federation=FEDERATION)
    assert service._answered(BOARD, frame).verdict == "granted"
    desk.close()


def test_a_flood_of_strangers_or_of_one_board_stops_no_renewal(tmp_path: Path) -> None:
    """Who has a certificate comes in at the fleet's broker; what strangers spend is not what its renewal takes."""
    desk, hub = Desk(tmp_path), LocalHub()
    service = desk.service(hub, clock=lambda: 0.0)  # no bucket fills again
    service.start()
    calm, wild = (
        Asker(name, desk.token(name), seed=seed) for seed, name in enumerate(("greenhouse-01", "greenhouse-02"), 1)
    )
    stranger = Asker("greenhouse-03", "guess", seed=9)
    answers = [hub.link(name) for name in ("calm", "out")]
    answers[0].subscribe(service.topics.fleet(calm.device))
    answers[1].subscribe(service.topics.answer(stranger.device))
    for link in answers:
        link.open()

    def asks(asker: Asker, topic: str) -> None:
        frame = encode_message(asker.request(), asker.identity, federation=FEDERATION)
        answers[1].publish(topic, frame)

    def answered(link: Any) -> int:
        events = iter(lambda: link.receive(0.0), None)
        return sum(isinstance(event, Delivery) for event in events)

    for board in (calm, wild):
        assert desk.ask(board).verdict == "granted"
    for _ in range(service_module.MAX_REQUESTS_BURST + 10):
        asks(stranger, service.topics.request(stranger.device))
    for _ in range(service_module.MAX_RENEWALS_BURST + 10):
        asks(wild, service.topics.renewal(wild.device))
    asks(stranger, service.topics.request(calm.device))  # in the name of the board, too
    asks(calm, service.topics.renewal(calm.device))
    for _ in range(service_module.MAX_REQUESTS_BURST + 50):
        service.step(0.0)
    assert answered(answers[1]) == service_module.MAX_REQUESTS_BURST, "strangers have spent what they can"
    assert answered(answers[0]) == 1
    renewal = Delivery(service.topics.renewal(calm.device), b"", False)
    for _ in range(service_module.MAX_RENEWALS_BURST):
        service._on_event(renewal, "", service._on_request)  # at the strangers' broker this is nobody's topic
    asks(calm, service.topics.renewal(calm.device))
    for _ in range(4):
        service.step(0.0)
    assert answered(answers[0]) == 1
    desk.close()


def test_a_flood_of_strangers_stops_no_board_whose_certificate_has_ended(tmp_path: Path) -> None:
    """It comes in where strangers do, and is known by its key, which they do not have."""
    desk, hub = Desk(tmp_path), LocalHub()
    service = desk.service(hub, clock=lambda: 0.0)  # no bucket fills again
    answers: list[str] = []
    service._enrolment_link.publish = lambda topic, _: answers.append(topic)  # type: ignore[method-assign]
    service._fleet.publish = lambda topic, *_, **__: answers.append(topic)  # type: ignore[method-assign]
    away, out, guessed = (f"greenhouse-{number:02}" for number in (1, 2, 3))
    boards = [Asker(name, desk.token(name), seed=seed) for seed, name in enumerate((away, out), 1)]
    for board in boards:
        assert desk.ask(board).verdict == "granted"
    desk.registry.block(out, "lost")
    desk.now += 800 * 86400.0  # both certificates have ended

    def asks(asker: Asker, name: str, times: int = 1, identity: Identity | None = None) -> int:
        frame = encode_message(asker.request(device=name), identity or asker.identity, federation=FEDERATION)
        before = len(answers)
        for _ in range(times):
            service._on_event(Delivery(service.topics.request(name), frame, False), "", service._on_request)
        return len(answers) - before

    stranger = Asker(guessed, "guess", seed=9)
    assert asks(stranger, guessed, service_module.MAX_REQUESTS_BURST + 50) == service_module.MAX_REQUESTS_BURST
    for name in (guessed, away, out, "nobody"):
        assert asks(stranger, name, 50) == 0, "nothing is left of what strangers have"
    assert asks(boards[1], out) == 0, "locked out"
    assert asks(boards[0], away) == 1
    with_the_key = asks(boards[0], away, 50, stranger.identity)
    assert with_the_key == 0, "the signature of another"
    assert asks(boards[0], away) == 0, "who has the board's public key can spend its rate here"
    frame = encode_message(boards[0].request(), boards[0].identity, federation=FEDERATION)
    service._on_event(Delivery(service.topics.renewal(away), frame, False), "", service._on_delivery)
    assert answers[-1] == service.topics.fleet(away), "and not that of its renewals in time"
    assert service._returns._of.keys() == {away}
    desk.close()


def test_asking_in_the_name_of_boards_takes_no_card_from_them(tmp_path: Path) -> None:
    """The ids of a fleet can be guessed: greenhouse-01, greenhouse-02, ..."""
    desk = Desk(tmp_path, boards=3)
    for number in (1, 2, 3):
        assert desk.ask(Asker(f"greenhouse-{number:02}", "guess", seed=number)).verdict == "refused"
    chosen = choose_boards(desk.registry, count=3, now=desk.now)
    assert [row.device for row in chosen] == ["greenhouse-01", "greenhouse-02", "greenhouse-03"]
    desk.token("greenhouse-01")
    assert len(choose_boards(desk.registry, count=2, now=desk.now)) == 2, "of the others"
    desk.close()
