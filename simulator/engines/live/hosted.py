"""Many real devices in one process, each with store, key, link and thread: for fleets larger than a machine's memory.

    python -m hushfleet.simulator.engines.live.hosted DEVICE.toml...

Each device is `Agent`, unchanged, with its DEVICE.toml. What differs from as many boards: the devices share one
interpreter and train in turns; they share one ONNX Runtime session a graph, which holds no state of a device; and
nothing is synced to the disk.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from hushfleet.edge_client import runtime
from hushfleet.edge_client.agent import Agent
from hushfleet.edge_client.board.config import DeviceConfig, load_config
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.edge_client.tasks import TaskHandler
from hushfleet.edge_client.trainer import DeviceRound
from hushfleet.graphs.features import FeatureGraph
from hushfleet.wire.link.connection import Timing
from hushfleet.wire.link.interface import Will
from hushfleet.wire.link.mqtt import MqttLink

STACK_BYTES = 512 << 10
SWITCH_S = 0.2
"""Each thread that waits for the interpreter wakes up this often to ask for it: with hundreds of them, the default of
5 ms took more processor time than the devices' work."""

_log = logging.getLogger("hushfleet.simulator")


class HostedDevice(threading.Thread):
    """One device, until the task has finished or `stop` is set."""

    def __init__(self, config: DeviceConfig, stop: threading.Event) -> None:
        super().__init__(name=config.device.id)
        self._config, self._stop_asked = config, stop
        self.failed = False

    def run(self) -> None:
        config = self._config
        try:
            with DeviceStore(config.store_path, device=config.device.id, durable=False) as store:
                Agent(config, partial(self._connect, store), store, stop=self._stop_asked).run()
        except BaseException:
            _log.exception("%s has ended", config.device.id)
            self.failed = True

    def _connect(self, store: DeviceStore, will: Will) -> MqttLink:
        config = self._config
        reconnect_s = config.simulation.reconnect_s if config.simulation else None
        return MqttLink(
            config.broker.address,
            client_id=store.identity.client_id(config.device.id),
            will=will,
            timing=Timing(backoff_base_s=reconnect_s) if reconnect_s else None,
        )


def loaded_once(make: Callable[..., object]) -> Callable[..., object]:
    """A graph is loaded once a process: a session takes megabytes, and all devices have the same one."""
    lock, made = threading.Lock(), dict[bytes, object]()

    def load(graph: bytes, spec: object, **options: Any) -> object:
        with lock:
            if graph not in made:
                made[graph] = make(graph, spec, **options)
            return made[graph]

    return load


def in_turns(work: Callable[..., Any]) -> Callable[..., Any]:
    """The same, but one thread at a time."""
    turn = threading.Lock()

    def run(*args: Any, **options: Any) -> Any:
        with turn:
            return work(*args, **options)

    return run


def main() -> int:
    stop, devices = threading.Event(), []
    logging.basicConfig(stream=sys.stderr, format="%(levelname)-7s %(threadName)s %(message)s", level=logging.WARNING)
    logging.getLogger("hushfleet.edge").setLevel(logging.ERROR)  # each would warn that its noise has a seed
    runtime.GradientGraph = loaded_once(runtime.GradientGraph)  # type: ignore[assignment,attr-defined]
    runtime.InferenceGraph = loaded_once(runtime.InferenceGraph)  # type: ignore[assignment,attr-defined]
    TaskHandler._load = in_turns(TaskHandler._load)  # type: ignore[method-assign]  # a graph of features is megabytes
    FeatureGraph.of = in_turns(FeatureGraph.of)  # type: ignore[method-assign]
    DeviceRound.run = in_turns(DeviceRound.run)  # type: ignore[method-assign]
    threading.stack_size(STACK_BYTES)
    sys.setswitchinterval(SWITCH_S)
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    for path in sys.argv[1:]:
        devices.append(HostedDevice(load_config(Path(path)), stop))
        devices[-1].start()
    for device in devices:
        device.join()
    return int(any(device.failed for device in devices))


if __name__ == "__main__":
    sys.exit(main())
