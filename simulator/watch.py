"""Updates the live display from the run's files while the engine works, in the same way for all engines."""

from __future__ import annotations

import threading
from typing import Any, Self

from hushfleet.aggregator.observe.display import FleetDisplay
from hushfleet.aggregator.results.events import EventTail
from hushfleet.simulator.run_folder import Simulation

_INTERVAL_S = 0.2


class Watch:
    """A context manager; inside it the display follows events and metrics.

    :param engine: engine name to show instead of the name in the aggregator's events.
    """

    def __init__(self, simulation: Simulation, display: FleetDisplay, *, engine: str) -> None:
        self._display = display
        self._engine = engine
        self._waiting: list[tuple[str, dict[str, Any]]] = []
        self._events = EventTail(simulation.folder.events)
        self._folder = simulation.folder
        self._metrics: dict[str, EventTail] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="display", daemon=True)

    def __enter__(self) -> Self:
        self._display.__enter__()
        self._thread.start()
        return self

    def __exit__(self, *how: object) -> None:
        self._stop.set()
        self._thread.join()
        self._read()
        self._display.__exit__(*how)

    def _follow(self) -> None:
        while not self._stop.wait(_INTERVAL_S):
            self._read()

    def _read(self) -> None:
        for event in self._events.read():
            if event["event"] == "run":
                event = {**event, "engine": self._engine}
            elif event["event"] == "update":
                self._read_metrics(event["device"])
            elif event["event"] == "round_close":
                self._show_metrics(until=event["round"])
            self._display.apply(event)
        self._show_metrics(until=self._display.state.round)

    def _read_metrics(self, device: str) -> None:
        """Reads a device's metrics after its update: it writes them before it sends the update."""
        tail = self._metrics.setdefault(device, EventTail(self._folder.device(device).metrics))
        self._waiting += [(device, line) for line in tail.read() if isinstance(line.get("round"), int)]

    def _show_metrics(self, *, until: int) -> None:
        """Shows metrics up to a round; lines of later rounds wait, because they would be shown as this round's."""
        for device, line in self._waiting:
            if line["round"] <= until:
                self._display.apply_metrics(device, line)
        self._waiting = [(device, line) for device, line in self._waiting if line["round"] > until]
