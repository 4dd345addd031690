"""Emulates the devices' network: a loopback TCP proxy between each device and the broker behaves like its link.

It uses one thread with one event loop; each device has its own listening port. Bytes pass unchanged, so TLS works too.
Only as many bytes are in flight as a sender may have unacknowledged, so a slow link slows its sender. No privilege and
no kernel feature is needed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
import threading
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple, Self, TypeVar

from hushfleet.errors import BadInput, HushfleetError
from hushfleet.simulator.world.link_model import Direction, LinkConditions

_HOST = "127.0.0.1"
_SOCKET_BUFFER_BYTES = 1 << 16  # otherwise the kernel buffers megabytes of a sender that should wait
_PIECE_S = 0.01  # a piece is the data that the link sends in this time ...
_PIECE_BYTES = (1460, 1 << 16)  # ... within these bounds
_HOLD_S = 0.02
_HELD_BYTES = 1 << 16
_TIMEOUT_S = 30.0
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing sends RST

_log = logging.getLogger("hushfleet.simulator")
_T = TypeVar("_T")


class Traffic(NamedTuple):
    """Bytes of TCP payload that passed the device's link since it was made; `up` is from the device."""

    up_bytes: int
    down_bytes: int


class EmulatedNetwork:
    """The links of all devices to one broker; a context manager.

    :param host: host of the broker; `port`: port of the broker.
    """

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._links: dict[str, _Link] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="emulated-network", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._do(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def add(self, device: str, conditions: LinkConditions, *, seed: int) -> int:
        """Makes a device's link; returns the loopback port at which the device reaches the broker.

        The link's random draws depend only on the seed and the device's name. Raises `BadInput` for a second link.
        """
        if device in self._links:
            raise BadInput(f"{device} has a link already")
        return self._do(self._add(device, conditions, seed))

    def cut(self, device: str) -> None:
        """Stops all bytes without notice to either end. Connections stay open until one of their ends gives up."""
        self._do(_now(self._link(device).passes.clear))

    def mend(self, device: str) -> None:
        """Lets bytes pass again; bytes in flight arrive later, as if TCP had retransmitted lost ones."""
        self._do(_now(self._link(device).passes.set))

    def reset(self, device: str) -> None:
        """Breaks all connections of the device immediately, by RST to both ends."""
        self._do(self._link(device).reset())

    def traffic(self, device: str) -> Traffic:
        link = self._link(device)
        return Traffic(link.up.bytes_passed, link.down.bytes_passed)

    def conditions(self, device: str) -> LinkConditions:
        return self._link(device).conditions

    def _link(self, device: str) -> _Link:
        if device not in self._links:
            raise BadInput(f"there is no link of a device {device!r}; there are {', '.join(self._links) or 'none'}")
        return self._links[device]

    async def _add(self, device: str, conditions: LinkConditions, seed: int) -> int:
        link = _Link(device, conditions, seed=seed, target=self._target)
        self._links[device] = link
        return link.port

    async def _close(self) -> None:
        await asyncio.gather(*(link.close() for link in self._links.values()))

    def _do(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Runs the work in the loop's thread, and waits for it."""
        if not self._thread.is_alive():
            work.close()
            raise HushfleetError("the emulated network is not running; use it inside its `with` block")
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_TIMEOUT_S)


class _Link:
    """One device's link. All its code runs in the loop's thread."""

    def __init__(self, device: str, conditions: LinkConditions, *, seed: int, target: tuple[str, int]) -> None:
        now = asyncio.get_running_loop().time()
        self.conditions = conditions
        self.up = Direction(conditions, "up", seed=seed, device=device, made_at=now)
        self.down = Direction(conditions, "down", seed=seed, device=device, made_at=now)
        self.passes = asyncio.Event()
        self.passes.set()
        self._target = target
        self._listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        _prepare(self._listener)
        self._listener.bind((_HOST, 0))
        self._listener.listen(16)
        self.port: int = self._listener.getsockname()[1]
        self._connections: set[asyncio.Task[None]] = set()
        self._accepting = asyncio.create_task(self._accept(), name=f"{device} accepts")

    async def close(self) -> None:
        self._accepting.cancel()
        await asyncio.gather(self._accepting, return_exceptions=True)
        self._listener.close()
        await self.reset()

    async def reset(self) -> None:
        connections = list(self._connections)
        for connection in connections:
            connection.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                device, _ = await loop.sock_accept(self._listener)
            except OSError as error:  # for example, no file descriptors are left, but some may be free later
                _log.warning("the emulated network cannot take a connection: %s", error)
                await asyncio.sleep(1.0)
                continue
            connection = asyncio.create_task(self._serve(device))
            self._connections.add(connection)
            connection.add_done_callback(self._connections.discard)

    async def _serve(self, device: socket.socket) -> None:
        """Serves one connection until it ends or breaks. If it breaks, both sides receive RST."""
        broker = socket.socket(socket.AF_INET6 if ":" in self._target[0] else socket.AF_INET, socket.SOCK_STREAM)
        loop = asyncio.get_running_loop()
        try:
            _prepare(device)
            _prepare(broker)
            early = await self._hold(device)
            if early is None:
                return
            # Loopback has answered the handshake immediately; this waits for the round trip that the link would take.
            await asyncio.sleep(2 * self.up.latency_s)
            await loop.sock_connect(broker, self._target)
            async with asyncio.TaskGroup() as both:
                both.create_task(_Pipe(device, broker, self.up, self.passes).run(early))
                both.create_task(_Pipe(broker, device, self.down, self.passes).run(b""))
        except* (OSError, asyncio.CancelledError):
            for sock in (device, broker):
                with contextlib.suppress(OSError):
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        finally:
            device.close()
            broker.close()

    async def _hold(self, device: socket.socket) -> bytes | None:
        """Holds a new connection without an answer while the link is cut. Returns the bytes received so far, or None if
        the device gave up, so that the broker never hears of the connection."""
        early = b""
        while not self.passes.is_set():
            with contextlib.suppress(BlockingIOError):
                if len(early) < _HELD_BYTES:
                    said = device.recv(_HELD_BYTES)
                    if not said:
                        return None
                    early += said
            await asyncio.sleep(_HOLD_S)
        return early


class _Pipe:
    """One direction of one connection."""

    def __init__(self, source: socket.socket, sink: socket.socket, direction: Direction, passes: asyncio.Event) -> None:
        self._source = source
        self._sink = sink
        self._direction = direction
        self._passes = passes
        self._on_its_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        self._bytes_on_their_way = 0
        self._delivered = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    async def run(self, early: bytes) -> None:
        """Runs until the source has sent its last byte and the sink has received it.

        :param early: bytes already read from the source.
        """
        async with asyncio.TaskGroup() as both:
            both.create_task(self._take(early))
            both.create_task(self._deliver())

    async def _take(self, early: bytes) -> None:
        direction, least, most = self._direction, *_PIECE_BYTES
        piece_bytes = int(min(max(direction.bytes_per_s * _PIECE_S, least), most))
        data = early
        while True:
            if not data:
                await self._passes.wait()
                data = await self._loop.sock_recv(self._source, piece_bytes)
            passage = direction.passage(self._loop.time(), len(data))
            self._bytes_on_their_way += len(data)
            self._on_its_way.put_nowait((passage.delivered_at, data))
            if not data:
                return
            while self._bytes_on_their_way > direction.window_bytes:
                self._delivered.clear()
                await self._delivered.wait()
            data = b""

    async def _deliver(self) -> None:
        while True:
            due_at, data = await self._on_its_way.get()
            wait_s = due_at - self._loop.time()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            await self._passes.wait()
            if not data:
                self._sink.shutdown(socket.SHUT_WR)
                return
            await self._loop.sock_sendall(self._sink, data)
            self._bytes_on_their_way -= len(data)
            self._delivered.set()


async def _now(action: Callable[[], None]) -> None:
    action()


def _prepare(sock: socket.socket) -> None:
    sock.setblocking(False)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BUFFER_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER_BYTES)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
