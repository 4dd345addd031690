"""The network that storms put between devices and a broker."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import closing

import pytest

from chaos.proxy import Proxy, SlowLink

PATIENCE_S = 30.0
BAD = SlowLink(bytes_per_s=1e8, latency_s=0.001, jitter_s=0.002, stall=0.1, stall_s=0.01)


@pytest.fixture
def broker() -> Iterator[socket.socket]:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        listener.settimeout(PATIENCE_S)
        yield listener


@pytest.fixture
def proxy(broker: socket.socket) -> Iterator[Proxy]:
    with closing(Proxy(broker.getsockname()[1])) as proxy:
        yield proxy


def dial(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)


def accepted(broker: socket.socket) -> socket.socket:
    connection, _ = broker.accept()
    connection.settimeout(PATIENCE_S)
    return connection


def all_of(sock: socket.socket) -> bytes:
    received = bytearray()
    while piece := sock.recv(1 << 16):
        received += piece
    return bytes(received)


def test_all_bytes_pass_in_order_over_a_bad_link(broker: socket.socket, proxy: Proxy) -> None:
    data = os.urandom(700_000)
    with dial(proxy.port("d", BAD, seed=1)) as device, accepted(broker) as end:
        thread = threading.Thread(target=lambda: (device.sendall(data), device.shutdown(socket.SHUT_WR)))
        thread.start()
        assert all_of(end) == data
        thread.join(PATIENCE_S)


def test_a_cut_concerns_one_device_and_what_it_holds_passes_when_mended(broker: socket.socket, proxy: Proxy) -> None:
    ports = [proxy.port(name, None, seed=1) for name in ("a", "b")]
    with dial(ports[0]) as one, accepted(broker) as first:
        proxy.cut("a")
        one.sendall(b"held")
        with dial(ports[1]) as two, accepted(broker) as second:
            two.sendall(b"b")
            assert second.recv(1) == b"b"
        first.settimeout(0.2)
        with pytest.raises(TimeoutError):
            first.recv(1)
        first.settimeout(PATIENCE_S)
        proxy.mend("a")
        assert first.recv(4) == b"held"


def test_a_reset_reaches_both_ends_and_a_new_connection_works(broker: socket.socket, proxy: Proxy) -> None:
    port = proxy.port("d", None, seed=1)
    with dial(port) as device, accepted(broker) as end:
        device.sendall(b"x")
        assert end.recv(1) == b"x"
        proxy.reset("d")
        for each in (device, end):
            with pytest.raises(ConnectionResetError):
                each.recv(1)
    with dial(port) as device, accepted(broker) as end:
        device.sendall(b"again")
        assert end.recv(5) == b"again"
