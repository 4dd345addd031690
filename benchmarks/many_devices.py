"""One process of the load generator of `benchmarks/fleet.py`: many real devices, each with store, key, link and thread.

    python -m benchmarks.many_devices NOTES.jsonl DEVICE.toml...

Each device is `Agent`, unchanged, with its DEVICE.toml. What differs from as many boards: the devices share one
interpreter and train in turns; they share one ONNX Runtime session a graph, which holds no state of a device; nothing
is synced to the disk; and they do not test themselves on the simulation's test sets.
"""

from __future__ import annotations

import json
import logging
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.processes import memory_mib
from hushfleet.edge_client import runtime
from hushfleet.edge_client.agent import Agent
from hushfleet.edge_client.board.config import DeviceConfig, load_config
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.edge_client.trainer import Trainer
from hushfleet.wire.format.messages import Ack, Offer, decode_message, peek_kind
from hushfleet.wire.format.topics import Topics
from hushfleet.wire.link.address import BrokerAddress
from hushfleet.wire.link.interface import Delivery, LinkEvent, Will, publish_packet_bytes
from hushfleet.wire.link.mqtt import MqttLink, Timing

STACK_BYTES = 512 << 10
SWITCH_S = 0.2
"""Each thread that waits for the interpreter wakes up this often to ask for it: with hundreds of them, the default of
5 ms took more processor time than the devices' work."""

log = logging.getLogger("hushfleet.benchmarks")


class Notes:
    """JSON lines of one process, which its devices' threads share, and counts of MQTT packets by kind and direction."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")
        self._lock = threading.Lock()
        self.messages: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def write(self, **line: Any) -> None:
        with self._lock:
            print(json.dumps(line), file=self._file, flush=True)

    def count(self, what: str, topic: str, payload: bytes) -> None:
        with self._lock:
            self.messages[what] += 1
            self.bytes[what] += publish_packet_bytes(topic, len(payload))


class NotedLink(MqttLink):
    """The board's own link, which notes what passes it and when, in unix seconds.

    plan_at: the plan was taken off the link. model_at: the last chunk of the global model was. offered_at: the update
    is committed and offered. acked_at: the aggregator's acknowledgement was taken off the link.
    """

    def __init__(
        self, address: BrokerAddress, *, device: str, store: DeviceStore, topics: Topics, notes: Notes, **options: Any
    ) -> None:
        self._device, self._store, self._topics, self._notes = device, store, topics, notes
        self._times: dict[str, float] = {}
        super().__init__(address, **options)

    def publish(self, topic: str, payload: bytes, *, retain: bool = False) -> None:
        kind = self._topics.parse(topic).kind
        if kind == "msg" and peek_kind(payload) is Offer:
            self._times.setdefault("offered_at", time.time())
        super().publish(topic, payload, retain=retain)
        self._notes.count(f"sent {kind}", topic, payload)

    def receive(self, timeout_s: float) -> LinkEvent | None:
        event = super().receive(timeout_s)
        if isinstance(event, Delivery):
            kind = self._topics.parse(event.topic).kind
            self._notes.count(f"received {kind}", event.topic, event.payload)
            self._note(kind, event.payload)
        return event

    def _note(self, kind: str, payload: bytes) -> None:
        now, waiting = time.time(), "offered_at" not in self._times
        if kind == "round" and waiting:
            self._times = {"plan_at": now, "model_at": now}
        elif kind == "blob" and waiting:
            self._times["model_at"] = now
        elif kind == "down" and not waiting and peek_kind(payload) is Ack:
            ack = decode_message(payload, federation=self._topics.federation, public_key=self._store.server_key)
            self._notes.write(device=self._device, round=ack.round, acked_at=now, **self._times)
            self._times = {}


class Device(threading.Thread):
    """One device, until the task has finished or `stop` is set."""

    def __init__(self, config: DeviceConfig, notes: Notes, stop: threading.Event) -> None:
        super().__init__(name=config.device.id)
        self._config, self._notes, self._stop_asked = config, notes, stop
        self.failed = False

    def run(self) -> None:
        config = self._config
        try:
            with DeviceStore(config.store_path, device=config.device.id, durable=False) as store:
                Agent(config, partial(self._connect, store), store).run(self._stop_asked)
        except BaseException:
            log.exception("%s has ended", config.device.id)
            self.failed = True

    def _connect(self, store: DeviceStore, will: Will) -> NotedLink:
        config = self._config
        hurry_s = config.simulation.reconnect_s if config.simulation else None
        return NotedLink(
            config.broker.address,
            device=config.device.id,
            store=store,
            topics=Topics(config.device.federation),
            notes=self._notes,
            client_id=store.identity.client_id(config.device.id),
            will=will,
            timing=Timing(backoff_base_s=hurry_s) if hurry_s else None,
        )


def shared(make: Callable[..., object]) -> Callable[..., object]:
    """A graph is loaded once a process: a session takes megabytes, and all devices have the same one."""
    once, made = threading.Lock(), dict[bytes, object]()

    def load(graph: bytes, layout: object, *, threads: int = 1) -> object:
        with once:
            if graph not in made:
                made[graph] = make(graph, layout, threads=threads)
            return made[graph]

    return load


def in_turns(work: Callable[..., Any]) -> Callable[..., Any]:
    turn = threading.Lock()

    def run(*args: Any, **options: Any) -> Any:
        with turn:
            return work(*args, **options)

    return run


def main() -> int:
    notes, stop = Notes(Path(sys.argv[1])), threading.Event()
    logging.basicConfig(stream=sys.stderr, format="%(levelname)-7s %(threadName)s %(message)s", level=logging.WARNING)
    logging.getLogger("hushfleet.edge").setLevel(logging.ERROR)  # each would warn that its noise has a seed
    runtime.GradientGraph = shared(runtime.GradientGraph)  # type: ignore[assignment,misc]
    runtime.InferenceGraph = shared(runtime.InferenceGraph)  # type: ignore[assignment,misc]
    Trainer.run_round = in_turns(Trainer.run_round)  # type: ignore[method-assign]
    threading.stack_size(STACK_BYTES)
    sys.setswitchinterval(SWITCH_S)
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    notes.write(devices=len(sys.argv) - 2, imports_mib=memory_mib("VmHWM"))
    devices = []
    for path in sys.argv[2:]:
        config = load_config(Path(path))
        if config.simulation:
            untested = replace(config.simulation, common_test=None, local_test=None, metrics=None)
            config = replace(config, simulation=untested)
        devices.append(Device(config, notes, stop))
        devices[-1].start()
    for device in devices:
        device.join()
    notes.write(messages=dict(notes.messages), bytes=dict(notes.bytes))
    return int(any(device.failed for device in devices))


if __name__ == "__main__":
    sys.exit(main())
