"""How to run a simulation, as opposed to what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hushfleet.aggregator.broker import BrokerKind
from hushfleet.errors import BadInput

Engine = Literal["fast", "live", "ray"]
Runtime = Literal["auto", "onnx", "native", "torch", "vmap"]


@dataclass(frozen=True)
class RunOptions:
    """Raises `BadInput` for an option that the engine would ignore.

    :param own_processes: of the live engine: so many devices have a process of their own, and the others share one for
        each core; 0: all have their own.
    :param emulate: of the live engine: each device is as slow as its board, with its memory and its network.
    :param clocked: of the fast engine: rounds take the time that they would take on the fleet's boards.
    :param workers: processes of the fast engine, or jobs at a time on Ray; 0 is one for each core.
    :param ray_address: of a Ray cluster; empty for one on this machine.
    :param runtime: what computes gradients in the fast engine, or `auto`, see `choose_runtime`.
    :param evaluate_every: the fast engine tests the devices' own models every so many rounds, and at the end.
    :param lean: of the fast engine: updates are neither coded nor signed, so their bytes are not counted.
    :param local_only: also train each device alone, for comparison.
    :param seeds: how many runs: that of the task's seed, and others with the next ones.
    :param sweep: noise multipliers at which the run is repeated by the fast engine.
    :param sweep_wire: codecs and steps with which it is repeated, see `hushfleet.simulator.studies.sweep.with_wire`.
    """

    engine: Engine = "fast"
    broker: BrokerKind = "auto"
    own_processes: int = 0
    emulate: bool = False
    clocked: bool = False
    workers: int = 0
    ray_address: str = ""
    runtime: Runtime = "onnx"
    evaluate_every: int = 1
    lean: bool = False
    local_only: bool = True
    seeds: int = 1
    sweep: Sequence[float] = ()
    sweep_wire: Sequence[str] = ()

    def __post_init__(self) -> None:
        plain = RunOptions.__dataclass_fields__
        for name, engines in _ENGINES.items():
            if self.engine not in engines and getattr(self, name) != plain[name].default:
                raise BadInput(
                    f"--{name.replace('_', '-')} does nothing with --engine {self.engine}: it is for --engine "
                    f"{' or '.join(engines)}"
                )
        if self.seeds < 1:
            raise BadInput(f"--seeds {self.seeds}: the number of runs must be at least 1")
        if self.engine == "live" and self.runtime not in ("auto", "onnx"):
            raise BadInput(f"--runtime {self.runtime} does nothing with --engine live, whose devices run onnx")
        if self.lean and self.clocked:
            raise BadInput(
                "--lean cannot be combined with --boards: how long updates take there depends on their bytes"
            )
        if self.lean and self.sweep_wire:
            raise BadInput("--lean cannot be combined with --sweep-wire, which compares bytes")
        if self.emulate and self.own_processes:
            raise BadInput("--own-processes cannot be combined with --emulate: it needs a process a device")


_ENGINES: dict[str, tuple[Engine, ...]] = {
    "broker": ("live",),
    "emulate": ("live",),
    "own_processes": ("live",),
    "clocked": ("fast", "ray"),
    "evaluate_every": ("fast", "ray"),
    "lean": ("fast",),
    "ray_address": ("ray",),
}
"""Of options that some engines have no use for."""
