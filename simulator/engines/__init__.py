"""The engines: how a simulated fleet is made to work. One is imported when it is chosen, so a run loads no other."""

from __future__ import annotations

from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from hushfleet.simulator.run_folder import Simulation

_HERE = "hushfleet.simulator.engines"
_ENGINES = {
    "fast": "fast.engine:run_logged",
    "boards": "on_boards:run_on_boards",
    "live": "live.run:run_live",
    "workers": "fast.workers:Workers",
    "ray": "ray.workers:RayWorkers",
}
"""What runs the rounds, and what works for it: by name, with its module."""


def engine(name: str) -> Any:
    """Imports and returns the function or class of this name."""
    return resolve_name(f"{_HERE}.{_ENGINES[name]}")


class RoundsRunner(Protocol):
    """Runs the rounds of a simulation; returns the seconds that they would have taken, None without a clock."""

    def __call__(self, simulation: Simulation, *, evaluate_every: int) -> float | None: ...
