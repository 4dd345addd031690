"""Runs many real devices in one process, for large fleets: each has its own store, key, link and thread.

    python -m hushfleet.simulator.world.hosted DEVICE.toml...

Each device is an unchanged `Agent` with its DEVICE.toml. Separate processes of these devices would not fit into memory.
Differences from real boards: they train without a worker process, one at a time, and share one interpreter and one ONNX
Runtime session per graph, which holds no state of a device; what depends only on bytes that all receive (checks of
graphs, the package, signatures of the aggregator, the next global model) is computed once; and nothing is synced to the
disk.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from hushfleet.edge_client.agent import Agent
from hushfleet.edge_client.board.config import DeviceConfig, load_config
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.edge_client.worker import task_graphs
from hushfleet.edge_client.worker.in_process import InProcess
from hushfleet.edge_client.worker.work import JobWork
from hushfleet.learning import graph_safety, graph_shapes
from hushfleet.output import escape_output, log_to_stderr
from hushfleet.wire.format import difference, messages
from hushfleet.wire.format.spec import TaskSpec
from hushfleet.wire.link.connection import Timing
from hushfleet.wire.link.interface import Will
from hushfleet.wire.link.mqtt import MqttLink

MOST_SHARED = 64
STACK_BYTES = 512 << 10
SWITCH_S = 0.2
"""Interval at which each thread that waits for the interpreter wakes up to request it: with hundreds of threads, the
default of 5 ms took more processor time than the devices' work."""

_log = logging.getLogger("hushfleet.simulator")


class HostedDevice(threading.Thread):
    """The thread of one device; it runs until the task has finished or `stop` is set."""

    def __init__(self, config: DeviceConfig, stop: threading.Event) -> None:
        super().__init__(name=config.device.id)
        self._config, self._stop_asked = config, stop
        self.failed = False

    def run(self) -> None:
        config = self._config
        try:
            with DeviceStore(config.store_path, device=config.device.id, durable=False) as store:
                connect = partial(self._connect, store)
                Agent(config, connect, store, stop=self._stop_asked, workshop=InProcess()).run()
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
    """Returns a loader that loads each graph once: a session takes megabytes, and all devices can share it."""
    lock, made = threading.Lock(), dict[bytes, object]()

    def load(graph: bytes, spec: object, **options: Any) -> object:
        with lock:
            if graph not in made:
                made[graph] = make(graph, spec, **options)
            return made[graph]

    return load


def for_all(make: Callable[..., Any], key: Callable[..., object] = lambda *arguments: arguments) -> Callable[..., Any]:
    """Returns the same function of public values, which computes each result once for all devices.

    :param key: what the result depends on. Values that it names by identity are kept.
    """
    made = OrderedDict[object, tuple[object, Any]]()

    def shared(*arguments: Any) -> Any:
        named = key(*arguments)
        if (found := made.get(named)) is None:
            found = made[named] = arguments, make(*arguments)
            if len(made) > MOST_SHARED:
                made.popitem(last=False)
        return found[1]

    return shared


def in_turns(work: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the same function, but only one thread at a time can run it."""
    turn = threading.Lock()

    def run(*args: Any, **options: Any) -> Any:
        with turn:
            return work(*args, **options)

    return run


def main() -> int:
    stop, devices = threading.Event(), []
    escape_output()
    log_to_stderr("%(levelname)-7s %(threadName)s %(message)s", level=logging.WARNING)
    logging.getLogger("hushfleet.edge").setLevel(logging.ERROR)  # each device would warn that its noise has a seed
    task_graphs.GradientGraph = loaded_once(task_graphs.GradientGraph)  # type: ignore[assignment,attr-defined]
    task_graphs.InferenceGraph = loaded_once(task_graphs.InferenceGraph)  # type: ignore[assignment,attr-defined]
    JobWork.do = in_turns(JobWork.do)  # type: ignore[method-assign]
    graph_safety._model = for_all(graph_safety._model)
    graph_shapes.graph_cost = for_all(graph_shapes.graph_cost, lambda facts, batch: (id(facts), batch))
    messages._verify = for_all(messages._verify)
    difference.apply_all = for_all(difference.apply_all)
    TaskSpec.from_bytes = for_all(TaskSpec.from_bytes)  # type: ignore[method-assign]
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
