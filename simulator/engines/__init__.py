"""The engines: how a simulated fleet is made to work. One is imported when it is chosen, so a run loads no other."""

from __future__ import annotations

from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from hushfleet.simulator.closed_round import OnRound
    from hushfleet.simulator.run_folder import Simulation

_ENGINES = {
    "fast": "hushfleet.simulator.engines.fast.engine:run_logged",
    "boards": "hushfleet.simulator.world.on_boards:run_on_boards",
    "live": "hushfleet.simulator.world.live_run:run_live",
    "workers": "hushfleet.simulator.engines.fast.workers:Workers",
    "ray": "hushfleet.simulator.engines.ray.workers:RayWorkers",
}
"""What runs the rounds, and what works for it: by name, with its module."""


def engine(name: str) -> Any:
    """Imports and returns the function or class of this name."""
    return resolve_name(_ENGINES[name])


class RoundsRunner(Protocol):
    """Runs the rounds of a simulation; returns the seconds that they would have taken, None without a clock."""

    def __call__(
        self, simulation: Simulation, *, evaluate_every: int, on_round: OnRound | None = None
    ) -> float | None: ...
