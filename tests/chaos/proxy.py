"""A bad network between devices and a broker: a loopback TCP proxy that is slow, stalls, is cut and breaks.

Bytes pass unchanged and in order. One thread runs the links of all devices, each with a listening port of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

_HOST = "127.0.0.1"
_PIECE_BYTES = 1 << 14
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing sends RST


@dataclass(frozen=True)
class SlowLink:
    """What each piece of data waits for, in either direction.

    :param stall: the probability that a piece waits for `stall_s` too, as for a lost packet.
    """

    bytes_per_s: float
    latency_s: float
    jitter_s: float
    stall: float
    stall_s: float


class Proxy:
    """The links of all devices to one broker.

    :param port: the broker's, on this machine.
    """

    def __init__(self, port: int) -> None:
        self._target = port
        self._links: dict[str, _Link] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def port(self, device: str, slow: SlowLink | None, *, seed: int) -> int:
        """Returns the port at which the device reaches the broker; its link is made at the first call."""
        if device not in self._links:
            self._links[device] = link = _Link(self._target, slow, random.Random(f"link {seed} {device}"))
            self._do(link.listen())
        return self._links[device].port

    def cut(self, device: str) -> None:
        """Stops all bytes without notice to either end; connections stay open until one of their ends gives up."""
        self._call(self._links[device].passes.clear)

    def mend(self, device: str) -> None:
        """Lets bytes pass again, as if TCP had sent them once more."""
        self._call(self._links[device].passes.set)

    def reset(self, device: str) -> None:
        """Breaks all connections of the device at once, by RST to both ends."""
        self._call(self._links[device].reset)

    def close(self) -> None:
        for link in self._links.values():
            self._do(link.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, action: Callable[[], None]) -> None:
        async def act() -> None:
            action()

        self._do(act())

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(30.0)


class _Link:
    """One device's link; all its code runs in the loop's thread."""

    def __init__(self, target: int, slow: SlowLink | None, rng: random.Random) -> None:
        self._target, self._slow, self._rng = target, slow, rng
        self.passes = asyncio.Event()
        self.passes.set()
        self._connections: set[asyncio.Task[Any]] = set()

    async def listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, _HOST, 0)
        self.port: int = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        self._server.close()
        self.reset()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def reset(self) -> None:
        for connection in self._connections:
            connection.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves one connection until it ends or breaks; if it breaks, both ends are reset."""
        connection = asyncio.current_task()
        assert connection is not None
        self._connections.add(connection)
        ends = [writer]
        try:
            await self.passes.wait()
            from_broker, to_broker = await asyncio.open_connection(_HOST, self._target)
            ends.append(to_broker)
            async with asyncio.TaskGroup() as both:
                both.create_task(self._pass(reader, to_broker))
                both.create_task(self._pass(from_broker, writer))
        except* (OSError, asyncio.CancelledError):
            for end in ends:
                with contextlib.suppress(OSError):
                    end.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        finally:
            self._connections.discard(connection)
            for end in ends:
                end.transport.abort()

    async def _pass(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(_PIECE_BYTES):
            if self._slow is not None:
                await asyncio.sleep(self._wait_s(self._slow, len(data)))
            await self.passes.wait()
            sink.write(data)
            await sink.drain()
        sink.write_eof()

    def _wait_s(self, slow: SlowLink, size: int) -> float:
        stalls = self._rng.random() < slow.stall
        return size / slow.bytes_per_s + slow.latency_s + self._rng.uniform(0, slow.jitter_s) + stalls * slow.stall_s
