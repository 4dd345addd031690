"""Updates the live display from the run's files while the engine works, in the same way for all engines."""

from __future__ import annotations

import threading
from typing import Self

from hushfleet.aggregator.report.display import FleetDisplay
from hushfleet.aggregator.results.device_metrics import DeviceMetrics
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
        self._events = EventTail(simulation.folder.events)
        self._metrics = DeviceMetrics(simulation.folder.devices)
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
                self._metrics.read(event["device"])
            elif event["event"] == "round_close":
                self._show_metrics(until=event["round"])
            self._display.apply(event)
        self._show_metrics(until=self._display.state.round)

    def _show_metrics(self, *, until: int) -> None:
        """Shows metrics up to a round; lines of later rounds wait, because they would be shown as this round's."""
        for device, line in self._metrics.until(until):
            self._display.apply_metrics(device, line)
