"""The emulated network: what the link model computes, and what really passes through sockets.

Against the clock there are lower bounds only: a loaded machine is slower, never faster, than the link.
"""

from __future__ import annotations

import itertools
import math
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hushfleet.errors import BadInput, HushfleetError
from hushfleet.simulator.world.link_model import BURST_S, Direction, LinkConditions, jitters, stalls
from hushfleet.simulator.world.network import EmulatedNetwork, Traffic

NOTHING_S = 0.25  # how long we look that nothing comes
PATIENCE_S = 30.0

UNSTEADY = LinkConditions(jitter_ms=20, stall_every_s=4.0, stall_s=0.5)


# the model


def test_what_a_link_draws_is_repeatable_and_differs_by_seed_device_and_direction() -> None:
    def drawn(seed: int, device: str, direction: str) -> list[object]:
        return [
            list(itertools.islice(stalls(UNSTEADY, direction, seed=seed, device=device), 20)),
            list(itertools.islice(jitters(UNSTEADY, direction, seed=seed, device=device), 20)),
        ]

    cases = list(itertools.product((1, 2), ("device-1", "device-2"), ("up", "down")))
    assert [drawn(*case) for case in cases] == [drawn(*case) for case in cases]
    for part in (0, 1):
        assert len({tuple(drawn(*case)[part]) for case in cases}) == len(cases)


def test_draws_have_the_means_that_were_asked_for() -> None:
    windows = list(itertools.islice(stalls(UNSTEADY, "up", seed=3, device="d"), 4000))
    gaps = [later.begins_s - earlier.ends_s for earlier, later in itertools.pairwise(windows)]
    lengths = [window.ends_s - window.begins_s for window in windows]
    assert all(gap > 0 for gap in gaps)
    assert sum(gaps) / len(gaps) == pytest.approx(4.0, rel=0.1)
    assert sum(lengths) / len(lengths) == pytest.approx(0.5, rel=0.05)
    assert min(lengths) >= 0.25 - 1e-9
    assert max(lengths) <= 0.75 + 1e-9
    late = list(itertools.islice(jitters(UNSTEADY, "up", seed=3, device="d"), 4000))
    assert 0 <= min(late) <= max(late) < 0.02
    assert sum(late) / len(late) == pytest.approx(0.01, rel=0.05)


def test_a_steady_link_never_stalls() -> None:
    steady = LinkConditions(jitter_ms=5)
    assert list(stalls(steady, "up", seed=0, device="d")) == []


def test_rate_and_latency_by_hand() -> None:
    link = LinkConditions(up_mbit_s=8, down_mbit_s=80, latency_ms=100)
    up = Direction(link, "up", seed=0, device="d", made_at=5.0)
    assert up.passage(5.0, 1000) == pytest.approx((5.001, 5.101))
    assert up.passage(5.0, 2000) == pytest.approx((5.003, 5.103)), "queues behind"
    assert up.passage(9.0, 20_000) == pytest.approx((9.01, 9.11)), "10 of its 20 ms lay in the pause before"
    assert up.bytes_passed == 23_000
    down = Direction(link, "down", seed=0, device="d", made_at=5.0)
    assert down.passage(5.0, 1000) == pytest.approx((5.0001, 5.1001))
    free = Direction(LinkConditions(), "up", seed=0, device="d", made_at=5.0)
    assert free.passage(6.0, 1 << 30).delivered_at == 6.0


def test_what_is_due_in_a_stall_comes_when_it_ends() -> None:
    conditions = LinkConditions(stall_every_s=1.0, stall_s=0.4)
    first, second = itertools.islice(stalls(conditions, "up", seed=9, device="d"), 2)
    up = Direction(conditions, "up", seed=9, device="d", made_at=100.0)
    due = [first.begins_s - 1e-6, first.begins_s, first.ends_s - 1e-6, first.ends_s, second.begins_s + 1e-6]
    came = [up.passage(100.0 + at, 1).delivered_at - 100.0 for at in due]
    assert came == pytest.approx([due[0], first.ends_s, first.ends_s, first.ends_s, second.ends_s])


@given(
    pieces=st.lists(st.tuples(st.floats(0, 2), st.integers(1, 60_000)), min_size=1, max_size=30),
    rate=st.floats(0.1, 100),
)
def test_no_more_passes_than_the_rate_allows(pieces: list[tuple[float, int]], rate: float) -> None:
    link = Direction(LinkConditions(up_mbit_s=rate), "up", seed=0, device="d", made_at=0.0)
    now, sent, before = 0.0, 0, 0.0
    for pause_s, size in pieces:
        now += pause_s
        passage = link.passage(now, size)
        sent += size
        assert sent <= (passage.sent_at + BURST_S) * rate * 1e6 / 8 * (1 + 1e-9) + 1e-6
        assert passage.sent_at >= before, "in order"
        assert passage.delivered_at >= max(now, passage.sent_at)
        before = passage.sent_at


@pytest.mark.parametrize(
    "wrong", [{"up_mbit_s": 0}, {"down_mbit_s": -1}, {"latency_ms": math.inf}, {"jitter_ms": -1}, {"stall_s": math.nan}]
)
def test_conditions_that_make_no_sense(wrong: dict[str, float]) -> None:
    with pytest.raises(BadInput, match=f"{next(iter(wrong))} of a link must be"):
        LinkConditions(**wrong)


# sockets


class Server:
    """Stands in the broker's place."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = self.listener.getsockname()

    def accept(self) -> socket.socket:
        self.listener.settimeout(PATIENCE_S)
        connection, _ = self.listener.accept()
        connection.settimeout(PATIENCE_S)
        return connection

    def hears_of_nobody(self) -> bool:
        self.listener.settimeout(NOTHING_S)
        try:
            self.listener.accept()[0].close()
        except TimeoutError:
            return True
        return False


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    with closing(server.listener):
        yield server


@pytest.fixture
def network(server: Server) -> Iterator[EmulatedNetwork]:
    with EmulatedNetwork(*server.address) as network:
        yield network


def dial(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)


def talk_until_it_breaks(port: int) -> None:
    with dial(port) as device:
        for _ in range(2000):
            device.sendall(b"x")
            time.sleep(0.005)


def all_of(sock: socket.socket) -> bytes:
    received = bytearray()
    while piece := sock.recv(1 << 16):
        received += piece
    return bytes(received)


def comes(sock: socket.socket) -> bytes | None:
    """The next bytes; None if none come for a while."""
    sock.settimeout(NOTHING_S)
    try:
        return sock.recv(1 << 16)
    except TimeoutError:
        return None
    finally:
        sock.settimeout(PATIENCE_S)


def test_all_bytes_pass_in_order_both_ways_over_a_bad_link(server: Server, network: EmulatedNetwork) -> None:
    bad = LinkConditions(up_mbit_s=40, down_mbit_s=80, latency_ms=3, jitter_ms=8, stall_every_s=0.05, stall_s=0.02)
    with dial(network.add("d", bad, seed=1)) as device, server.accept() as broker:
        up, down = os.urandom(700_000), os.urandom(400_000)
        heard: dict[str, bytes] = {}
        threads = [threading.Thread(target=lambda: heard.update(up=all_of(broker)))]
        threads += [threading.Thread(target=lambda: heard.update(down=all_of(device)))]
        threads += [threading.Thread(target=lambda: (device.sendall(up), device.shutdown(socket.SHUT_WR)))]
        threads += [threading.Thread(target=lambda: (broker.sendall(down), broker.shutdown(socket.SHUT_WR)))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert heard["up"] == up
        assert heard["down"] == down
        assert network.traffic("d") == Traffic(700_000, 400_000)


def test_a_slow_link_takes_its_time_whatever_the_number_of_connections(
    server: Server, network: EmulatedNetwork
) -> None:
    port = network.add("d", LinkConditions(up_mbit_s=2), seed=1)
    with dial(port) as one, server.accept() as first, dial(port) as two, server.accept() as second:
        began = time.monotonic()
        for device in (one, two):
            threading.Thread(target=lambda s: (s.sendall(bytes(125_000)), s.shutdown(1)), args=(device,)).start()
        assert [len(all_of(broker)) for broker in (first, second)] == [125_000, 125_000]
        assert time.monotonic() - began > 0.95, "250 kB are 2 Mbit"


def test_latency_is_felt_each_way(server: Server, network: EmulatedNetwork) -> None:
    with dial(network.add("d", LinkConditions(latency_ms=60), seed=1)) as device, server.accept() as broker:
        began = time.monotonic()
        device.sendall(b"ping")
        assert broker.recv(4) == b"ping"
        broker.sendall(b"pong")
        assert device.recv(4) == b"pong"
        assert time.monotonic() - began > 0.12


def test_a_slow_link_slows_its_sender(server: Server, network: EmulatedNetwork) -> None:
    with dial(network.add("d", LinkConditions(up_mbit_s=0.001), seed=1)) as device, server.accept():
        device.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
        device.settimeout(NOTHING_S)
        with pytest.raises(TimeoutError):
            device.sendall(bytes(20_000_000))
        assert network.traffic("d").up_bytes < 1 << 17


def test_a_receiver_that_does_not_read_stops_its_sender(server: Server, network: EmulatedNetwork) -> None:
    with dial(network.add("d", LinkConditions(up_mbit_s=8000), seed=1)) as device, server.accept():
        device.settimeout(NOTHING_S)
        with pytest.raises(TimeoutError):
            device.sendall(bytes(60_000_000))
        assert network.traffic("d").up_bytes < 12_000_000, "what the kernel's buffers take"


def test_a_cut_link_lets_nothing_pass_and_goes_on_when_mended(server: Server, network: EmulatedNetwork) -> None:
    with dial(network.add("d", LinkConditions(), seed=1)) as device, server.accept() as broker:
        device.sendall(b"before")
        assert broker.recv(6) == b"before"
        network.cut("d")
        device.sendall(b"up")
        broker.sendall(b"down")
        assert comes(broker) is None
        assert comes(device) is None
        network.mend("d")
        assert broker.recv(2) == b"up"
        assert device.recv(4) == b"down"


def test_a_cut_concerns_one_device(server: Server, network: EmulatedNetwork) -> None:
    ports = [network.add(name, LinkConditions(), seed=1) for name in ("a", "b")]
    network.cut("a")
    with dial(ports[0]), dial(ports[1]) as device, server.accept() as broker:
        device.sendall(b"b")
        assert broker.recv(1) == b"b"
        assert network.traffic("a") == Traffic(0, 0)


def test_new_connections_over_a_cut_link_wait_and_the_impatient_are_never_heard_of(
    server: Server, network: EmulatedNetwork
) -> None:
    port = network.add("d", LinkConditions(), seed=1)
    network.cut("d")
    with dial(port) as impatient:
        impatient.sendall(b"impatient")
    with dial(port) as patient:
        patient.sendall(b"patient")
        assert server.hears_of_nobody()
        network.mend("d")
        with server.accept() as broker:
            assert broker.recv(20) == b"patient"
        assert server.hears_of_nobody()


def test_a_reset_reaches_both_ends_and_a_new_connection_works(server: Server, network: EmulatedNetwork) -> None:
    port = network.add("d", LinkConditions(), seed=1)
    with dial(port) as device, server.accept() as broker:
        device.sendall(b"x")
        assert broker.recv(1) == b"x"
        network.reset("d")
        for end in (device, broker):
            with pytest.raises(ConnectionResetError):
                end.recv(1)
    with dial(port) as device, server.accept() as broker:
        device.sendall(b"again")
        assert broker.recv(5) == b"again"


def test_an_end_that_breaks_breaks_the_other(server: Server, network: EmulatedNetwork) -> None:
    with dial(network.add("d", LinkConditions(), seed=1)) as device:
        broker = server.accept()
        broker.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        broker.close()
        with pytest.raises(ConnectionResetError):
            device.recv(1)


def test_no_broker_is_a_broken_connection() -> None:
    other = Server()
    gone = other.address
    other.listener.close()
    with EmulatedNetwork(*gone) as network:
        port = network.add("d", LinkConditions(), seed=1)
        with pytest.raises(ConnectionError):
            talk_until_it_breaks(port)


def test_the_end_of_the_network_ends_its_connections(server: Server) -> None:
    with EmulatedNetwork(*server.address) as network:
        port = network.add("d", LinkConditions(), seed=1)
        device, broker = dial(port), server.accept()
    for end in (device, broker):
        with end, pytest.raises(ConnectionResetError):
            end.recv(1)
    with pytest.raises(ConnectionRefusedError):
        dial(port)


def test_mistakes(server: Server, network: EmulatedNetwork) -> None:
    network.add("d", LinkConditions(), seed=1)
    with pytest.raises(BadInput, match="d has a link already"):
        network.add("d", LinkConditions(), seed=1)
    for act in (network.cut, network.mend, network.reset, network.traffic):
        with pytest.raises(BadInput, match="no link of a device 'x'; there are d"):
            act("x")
    with pytest.raises(HushfleetError, match="not running"):
        EmulatedNetwork(*server.address).add("d", LinkConditions(), seed=1)
