"""One process of the load generator: many real devices, each with its own store, key, link and thread.

    python -m benchmarks.crowd.generator DIARY.jsonl DEVICE.toml...

Each device is `hushfleet.edge_client.agent.Agent`, unchanged, with its DEVICE.toml. What differs from as many
boards: the devices share one interpreter, so they train in turns; they share one ONNX Runtime session a graph, which
holds no state of a device; and they do not test themselves on the simulation's test sets.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

from benchmarks.crowd.diary import Diary, NotedLink, NotedStore, Rounds
from benchmarks.crowd.processes import need_descriptors, peak_mib
from hushfleet.edge_client import runtime
from hushfleet.edge_client.agent import Agent
from hushfleet.edge_client.board.config import DeviceConfig, load_config
from hushfleet.graphs.session import GradientGraph, InferenceGraph
from hushfleet.model.params import ParamLayout
from hushfleet.wire.format.topics import Topics
from hushfleet.wire.link.interface import Will
from hushfleet.wire.link.mqtt import Timing

DESCRIPTORS_A_DEVICE = 8  # a connection, a selector, a pair to wake it, the store, its lock and its journal
STACK_BYTES = 512 << 10
# Each thread that waits for the interpreter wakes up this often to ask for it: hundreds of them, every 5 ms by default,
# took more processor time than the devices' work.
SWITCH_S = 0.2

_log = logging.getLogger("hushfleet.crowd")


class Device(threading.Thread):
    """One device, until the task has finished or `stop` is set; `turn` is held while it trains."""

    def __init__(self, config: DeviceConfig, diary: Diary, stop: threading.Event, turn: threading.Lock) -> None:
        super().__init__(name=config.device.id)
        self._config, self._diary, self._stop_asked, self._turn = config, diary, stop, turn
        self.failure: BaseException | None = None

    def run(self) -> None:
        config = self._config
        rounds = Rounds(config.device.id, self._diary)
        try:
            with NotedStore(config.store_path, device=config.device.id, rounds=rounds, turn=self._turn) as store:
                Agent(config, self._connector(rounds, store), store).run(self._stop_asked)
        except BaseException as error:
            _log.exception("%s has ended", config.device.id)
            self.failure = error

    def _connector(self, rounds: Rounds, store: NotedStore) -> Callable[[Will], NotedLink]:
        broker, simulation = self._config.broker, self._config.simulation
        hurry_s = simulation.reconnect_s if simulation else None

        def connect(will: Will) -> NotedLink:
            return NotedLink(
                broker.url,
                topics=Topics(self._config.device.federation),
                rounds=rounds,
                diary=self._diary,
                client_id=store.identity.client_id(self._config.device.id),
                will=will,
                ca_file=broker.ca_file,
                cert_file=broker.cert_file,
                key_file=broker.key_file,
                timing=Timing(backoff_base_s=hurry_s) if hurry_s else None,
            )

        return connect


def main() -> int:
    diary_path, *config_paths = map(Path, sys.argv[1:])
    logging.basicConfig(stream=sys.stderr, format="%(levelname)-7s %(threadName)s %(message)s", level=logging.WARNING)
    logging.getLogger("hushfleet.edge").setLevel(logging.ERROR)  # each would warn that its noise has a seed
    need_descriptors(DESCRIPTORS_A_DEVICE * len(config_paths) + 100)
    _share_sessions()
    threading.stack_size(STACK_BYTES)
    sys.setswitchinterval(SWITCH_S)
    diary, stop, turn = Diary(diary_path), threading.Event(), threading.Lock()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    diary.write({"process": os.getpid(), "devices": len(config_paths), "imports_mib": peak_mib(os.getpid())})
    devices = [Device(_config(path), diary, stop, turn) for path in config_paths]
    for device in devices:
        device.start()
    for device in devices:
        device.join()
    diary.write({"process": os.getpid(), "messages": dict(diary.messages), "bytes": dict(diary.bytes)})
    diary.close()
    return 1 if any(device.failure for device in devices) else 0


def _config(path: Path) -> DeviceConfig:
    config = load_config(path)
    if config.simulation is None:
        return config
    return replace(config, simulation=replace(config.simulation, common_test=None, local_test=None, metrics=None))


def _share_sessions() -> None:
    """A graph is loaded once a process: a session takes megabytes, and all devices have the same one."""
    once = threading.Lock()

    @cache
    def gradient(graph: bytes, threads: int) -> GradientGraph:
        return GradientGraph(graph, layouts[graph], threads=threads)

    @cache
    def inference(graph: bytes, threads: int) -> InferenceGraph:
        return InferenceGraph(graph, layouts[graph], threads=threads)

    layouts: dict[bytes, ParamLayout] = {}

    def shared(make: Callable[[bytes, int], object]) -> Callable[..., object]:
        def load(graph: bytes, layout: ParamLayout, *, threads: int = 1) -> object:
            with once:
                layouts[graph] = layout
                return make(graph, threads)

        return load

    runtime.GradientGraph = shared(gradient)  # type: ignore[assignment,misc]
    runtime.InferenceGraph = shared(inference)  # type: ignore[assignment,misc]


if __name__ == "__main__":
    sys.exit(main())
