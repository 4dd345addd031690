"""Enrolment, renewal and lock-out with real brokers, over TLS."""

from __future__ import annotations

import contextlib
import datetime
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography.x509 import DNSName, GeneralName, SubjectAlternativeName, load_pem_x509_certificate

from hushfleet.aggregator.commands.of_fleet import members_of
from hushfleet.aggregator.fleet.trust.access import apply, reload_brokers
from hushfleet.aggregator.fleet.trust.authority import Authority, read_request
from hushfleet.aggregator.fleet.trust.folder import FILE_NAME, FleetFolder
from hushfleet.aggregator.fleet.trust.registry import FleetRegistry
from hushfleet.aggregator.storage import board as boards
from hushfleet.aggregator.storage.identity_file import load_or_create
from hushfleet.edge_client.agent import Agent
from hushfleet.edge_client.fleet.renewal import Renewal
from hushfleet.errors import BadInput, LinkLost
from hushfleet.secure.membership_list import MembershipList
from hushfleet.wire.format.messages import ServerState, encode_message
from hushfleet.wire.link.address import BrokerAddress
from hushfleet.wire.link.interface import Delivery, LinkDown, LinkUp
from hushfleet.wire.link.mqtt import MqttLink
from support.command import hushfleet
from support.desk import Board, event_of, make_folder, served, until

FIRST, SECOND = "greenhouse-01", "greenhouse-02"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetFolder]:
    folder = make_folder(tmp_path_factory.mktemp("fleet") / "greenhouse", boards=9)
    with served(folder):
        yield folder


def operator_key(folder: FleetFolder) -> bytes:
    return load_or_create(folder.operator_key).public_key


def test_a_blank_board_enrols_and_is_known_to_all(fleet: FleetFolder, tmp_path: Path) -> None:
    board = Board(fleet, tmp_path, FIRST)
    assert board.enrol()
    assert not board.token_file.exists(), "the token is erased"
    assert board.tls.key_file.stat().st_mode & 0o777 == 0o600
    key = board.store.identity.public_key
    with FleetRegistry(fleet.path) as registry, members_of(fleet) as register:
        row = registry.board(FIRST)
        assert (row.standing, row.public_key, registry.tokens(FIRST, now=time.time())) == ("enrolled", key, [])
        known = until(lambda: register.device(FIRST))
        assert (known.public_key, known.standing) == (key, "enrolled")
    membership_list = MembershipList.from_bytes(fleet.membership_list.read_bytes(), operator=operator_key(fleet))
    assert membership_list.key(membership_list.devices.index(FIRST)) == key
    link = board.link(board.topics.fleet(FIRST))
    event_of(link, LinkUp)
    assert board.enrol(), "its key is known: a certificate that was lost comes again without a token"
    link.close()


def grow_old(fleet: FleetFolder, board: Board, *, days: float) -> None:
    """Gives it a certificate of 730 days that was signed so many days ago: in its first half none is renewed."""
    authority = Authority.load(fleet.ca)
    then = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=days)
    key = read_request(board.tls.request(), device=board.device)
    issued = authority.sign_client(board.device, key, days=730, now=then)
    with FleetRegistry(fleet.path) as registry:
        registry.write(
            "UPDATE certificates SET serial = ?, pem = ?, not_after = ? WHERE id = ?",
            (f"{issued.serial:x}", issued.pem, issued.not_after, board.device),
        )
    board.tls.keep(issued.pem)


def test_a_certificate_is_renewed_at_two_thirds_of_its_life(fleet: FleetFolder, tmp_path: Path) -> None:
    board = Board(fleet, tmp_path, SECOND)
    assert board.enrol()
    grow_old(fleet, board, days=500)
    before, validity = board.tls.certificate_file.read_bytes(), board.tls.validity()
    assert validity is not None
    now = [validity.renew_at - 1]
    renewal = Renewal(board.config, board.store, board.tls, wall=lambda: now[0])
    link = board.link(*renewal.filters)
    event_of(link, LinkUp)
    renewal.connected()
    renewal.advance(link, time.monotonic(), busy=False)
    assert link.receive(0.2) is None, "nothing is asked before"
    now[0] += 2
    renewal.advance(link, time.monotonic(), busy=False)
    answer = event_of(link, Delivery)
    renewal.take(board.topics.parse(answer.topic), answer.payload)
    assert board.tls.certificate_file.read_bytes() != before
    link.close()
    again = board.link()
    event_of(again, LinkUp)
    again.close()


def test_a_board_is_locked_out_while_it_is_connected(fleet: FleetFolder, tmp_path: Path) -> None:
    """Without a restart of the broker; others stay connected."""
    board, other = (Board(fleet, tmp_path / name, name) for name in ("greenhouse-03", "greenhouse-04"))
    assert board.enrol()
    assert other.enrol()
    links = [each.link(each.topics.server, each.topics.fleet(each.device)) for each in (board, other)]
    for link in links:
        event_of(link, LinkUp)
    pid = (fleet.broker / "mosquitto.pid").read_text()
    with FleetRegistry(fleet.path) as registry:
        registry.block(board.device, "stolen")
        apply(fleet, registry)
        with members_of(fleet) as register:
            assert register.device(board.device).reason == "by the fleet's operator: stolen"
        membership_list = MembershipList.from_bytes(fleet.membership_list.read_bytes(), operator=operator_key(fleet))
        assert board.device not in membership_list.devices
        assert other.device in membership_list.devices
        announcer = aggregator_link(fleet)
        event_of(announcer, LinkUp)

        def is_deaf() -> bool:
            """The broker reads its lists a moment after it is told to; the other board hears all the time."""
            announcer.publish(board.topics.server, b"hello")
            assert event_of(links[1], Delivery).payload == b"hello"
            return not isinstance(links[0].receive(0.3), Delivery)

        until(is_deaf)
        announcer.subscribe(board.topics.msg(board.device))
        with contextlib.suppress(LinkLost):
            links[0].publish(board.topics.msg(board.device), b"x")
        assert announcer.receive(0.5) is None, "and is not heard"

        def is_out() -> bool:
            """The service ends its connection a moment later."""
            try:
                links[0].publish(board.topics.msg(board.device), b"x")
            except LinkLost:
                return True
            return False

        until(is_out)
        assert not isinstance(links[1].receive(0.5), LinkDown), "others stay"
        links[0].close()
        refused = board.link()
        event_of(refused, LinkDown)  # its certificate is revoked
        refused.close()
        assert not board.enrol(patience_s=1.0)
        assert (fleet.broker / "mosquitto.pid").read_text() == pid
        registry.unblock(board.device)
        apply(fleet, registry)
    back = board.link()
    event_of(back, LinkUp)
    for link in (back, links[1], announcer):
        link.close()


def test_a_signal_that_the_broker_forgets_is_sent_again(fleet: FleetFolder, tmp_path: Path) -> None:
    """As it does with one that comes while it reads its lists."""
    board = Board(fleet, tmp_path, "greenhouse-06")
    assert board.enrol()
    link = board.link()
    event_of(link, LinkUp)
    pid_file, hidden = fleet.broker / "mosquitto.pid", fleet.broker / "hidden.pid"
    pid_file.rename(hidden)
    with FleetRegistry(fleet.path) as registry:
        registry.block(board.device, "stolen")
        apply(fleet, registry)
    hidden.rename(pid_file)
    event_of(link, LinkDown)
    link.close()
    refused = board.link()
    event_of(refused, LinkDown)
    refused.close()


def test_a_board_that_came_before_the_broker_had_read_its_lists_is_heard(fleet: FleetFolder, tmp_path: Path) -> None:
    """Mosquitto takes its subscriptions and drops all the rest, and sends by itself nothing of it later."""
    board = Board(fleet, tmp_path, "greenhouse-09")
    assert board.enrol()
    key, access = load_or_create(fleet.aggregator / "identity.key"), fleet.broker / "access.acl"
    announcer, stop, lists = aggregator_link(fleet), threading.Event(), access.read_text()
    announcer.subscribe(board.topics.state(board.device))
    event_of(announcer, LinkUp)
    state = encode_message(ServerState(1, "ready", key.public_key), key, federation=board.topics.federation)
    announcer.publish(board.topics.server, state, retain=True)
    access.write_text(f"{lists}\nuser {board.device}\ntopic deny hushfleet/1/#\n")
    probe = until(lambda: deaf_link(fleet, board))
    probe.close()
    address, device = board.config.broker_address, board.device
    agent = Agent(board.config, lambda will: MqttLink(address, client_id=device), board.store, stop=stop)
    thread = threading.Thread(target=agent.run)
    thread.start()
    try:
        until(lambda: agent._up)
        assert announcer.receive(1.0) is None, "not heard"
        access.write_text(lists)
        reload_brokers(fleet)
        until(lambda: agent._server)
        assert event_of(announcer, Delivery).topic == board.topics.state(board.device)
    finally:
        stop.set()
        thread.join()
        announcer.publish(board.topics.server, b"", retain=True)
        announcer.close()


def deaf_link(fleet: FleetFolder, board: Board) -> MqttLink | None:
    """Once the broker has read that the board is denied."""
    reload_brokers(fleet)
    link = board.link(board.topics.server)
    event_of(link, LinkUp)
    if link.receive(0.5) is None:
        return link
    link.close()
    return None


@pytest.mark.parametrize(("change", "device"), [("forget", "greenhouse-07"), ("expect_new_card", "greenhouse-08")])
def test_a_board_that_is_forgotten_or_gets_a_new_card_does_not_stay_connected(
    fleet: FleetFolder, tmp_path: Path, change: str, device: str
) -> None:
    board = Board(fleet, tmp_path, device)
    assert board.enrol()
    link = board.link()
    event_of(link, LinkUp)
    with FleetRegistry(fleet.path) as registry:
        getattr(registry, change)(device)  # the service sees it
        event_of(link, LinkDown)
        link.close()
        if change == "forget":
            registry.add([boards.Board(device, "generic-x86")])
    again = Board(fleet, tmp_path / "again", device)
    assert again.enrol()
    link = again.link()
    event_of(link, LinkUp)
    assert not isinstance(link.receive(4.0), LinkDown), "the next card stays"
    link.close()


def test_the_brokers_take_a_new_certificate_while_boards_stay_connected(fleet: FleetFolder, tmp_path: Path) -> None:
    board = Board(fleet, tmp_path, "greenhouse-05")
    assert board.enrol()
    link = board.link(board.topics.server)
    event_of(link, LinkUp)
    ports = fleet.config.broker.port, fleet.config.broker.enrolment_port
    before = [ssl.get_server_certificate(("127.0.0.1", port)) for port in ports]
    file = fleet.path / FILE_NAME
    text = file.read_text()
    file.write_text(text.replace('names = ["127.0.0.1"]', 'names = ["127.0.0.1", "broker.example"]'))
    assert "2 of 2 brokers" in renew(fleet)

    def taken() -> bool:
        found = [ssl.get_server_certificate(("127.0.0.1", port)) for port in ports]
        return all(DNSName("broker.example") in names_of(pem) for pem in found) and not set(before) & set(found)

    until(taken)
    announcer = aggregator_link(fleet)  # with its former file, or the new one
    event_of(announcer, LinkUp)
    announcer.publish(board.topics.server, b"hello")
    assert event_of(link, Delivery).payload == b"hello", "it was never disconnected"
    file.write_text(text)
    with pytest.raises(BadInput, match=r"boards may know the broker as broker\.example"):
        renew(fleet)
    assert "2 of 2 brokers" in renew(fleet, "--drop-names")
    for each in (link, announcer):
        each.close()


def renew(fleet: FleetFolder, *words: str) -> str:
    return hushfleet("fleet", "renew", fleet.path, "--broker", *words)


def names_of(pem: str) -> list[GeneralName]:
    certificate = load_pem_x509_certificate(pem.encode())
    return [*certificate.extensions.get_extension_for_class(SubjectAlternativeName).value]


def aggregator_link(fleet: FleetFolder) -> MqttLink:
    mine = fleet.aggregator
    address = BrokerAddress.parse(
        fleet.local_broker, ca_file=fleet.ca / "ca.pem", cert_file=mine / "cert.pem", key_file=mine / "cert.key"
    )
    link = MqttLink(address, client_id="aggregator")
    link.open()
    return link


def test_a_board_waits_for_service_and_broker(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "greenhouse", boards=1)
    board = Board(folder, tmp_path / "board", FIRST)
    granted: list[bool] = []
    thread = threading.Thread(target=lambda: granted.append(board.enrol(patience_s=60)))
    thread.start()
    time.sleep(0.5)
    assert thread.is_alive()
    with served(folder):
        thread.join(60)
    assert granted == [True]
