"""Defines the options of a simulation, for the command line and `hf.simulate`; they are passed on as one object."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from hushfleet.aggregator.broker.programs import BrokerKind
from hushfleet.aggregator.report.options import Option
from hushfleet.errors import BadInput
from hushfleet.schema import AtLeast1, Checked, Count

if TYPE_CHECKING:
    from hushfleet.aggregator.config.task import Task

Engine = Literal["fast", "live", "ray"]
Runtime = Literal["auto", "onnx", "native", "torch", "vmap"]

# Options of several commands.
Out = Annotated[Path | None, Option(help="Run folder; default: runs/NAME-TIME.")]
Resume = Annotated[bool, Option("--resume", help="Resume the run in --out.")]
BrokerOption = Annotated[
    BrokerKind, Option("--broker", help="Broker to run; auto: Mosquitto if it is installed, else amqtt.")
]
DataDir = Annotated[Path | None, Option(help="Folder with the files of the data set; default: download.")]
Json = Annotated[bool, Option("--json", help="Print JSON for other programs.")]
Settings = Annotated[list[str] | None, Option("--set", metavar="KEY=VALUE", help="Override any key of the task file, "
"e.g. privacy.epsilon=8.")]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TaskSettings:
    """Settings that replace those of a task file."""

    settings: Settings = None
    method: Annotated[str, Option(metavar="FILE.py:NAME", help="Method from a file; replaces method.name.")] = ""

    def load(self, path: Path, **keys: str | int | None) -> Task:
        """Reads the task file and applies the settings. Raises `BadInput`.

        :param keys: values by key, with `__` for a dot; None leaves the file's value.
        """
        from hushfleet.aggregator.config.task import load_task
        from hushfleet.methods import allow_file

        if self.method:
            keys["method__name"] = allow_file(self.method)
        given = [f"{key.replace('__', '.')}={value}" for key, value in keys.items() if value is not None]
        return load_task(path, (*(self.settings or ()), *given))


@dataclass(frozen=True, kw_only=True)
class TaskOptions(TaskSettings):
    """Task settings, including those with their own option."""

    devices: Annotated[int | None, Option(help="Number of devices; replaces data.devices.")] = None
    rounds: Annotated[int | None, Option(help="Number of rounds; replaces round.rounds.")] = None
    seed: Annotated[int | None, Option(help="Seed; replaces the task's seed.")] = None
    model: Annotated[str, Option(metavar="FILE.py:NAME", help="Your own torch.nn.Module; replaces model.name.")] = ""

    def load(self, path: Path, **keys: str | int | None) -> Task:
        named = {"data__devices": self.devices, "round__rounds": self.rounds, "seed": self.seed}
        return super().load(path, **{**named, "model__name": self.model or None, **keys})


@dataclass(frozen=True, kw_only=True)
class RunOptions(Checked):
    """How a simulation runs. Raises `BadInput` for a value that an option cannot have, or that the engine would
    ignore."""

    # fmt: off
    engine: Annotated[Engine, Option(help="Engine. fast: no network. live: real broker and processes. ray: fast, on a "
"Ray cluster.")] = "fast"
    out: Out = None
    data_dir: DataDir = None
    resume: Resume = False
    broker: BrokerOption = "auto"
    boards: Annotated[str, Option(metavar="A,B,...|MIX.toml", help="Board profiles, dealt to the devices in turn, or "
"a file of shares. With fast, rounds run on a virtual clock: the time, stragglers and energy of that fleet.")] = ""
    emulate: Annotated[bool, Option("--emulate", hidden=True)] = False
    own_processes: Annotated[Count, Option(help="Live engine: number of devices with a process of their own; the "
"others share one for each core; 0: all have their own.")] = 0
    workers: Annotated[Count, Option(help="Number of processes of the fast engine, or of parallel jobs on Ray; 0: one "
"a core.")] = 0
    ray_address: Annotated[str, Option(metavar="HOST:PORT", help="Address of a Ray cluster's head, or 'auto'; "
"default: Ray on this machine.")] = ""
    runtime: Annotated[Runtime, Option(help="Runtime that computes gradients in the fast engine. onnx: as on devices, "
"with the live engine's model; auto: onnx for short runs; for long ones vmap on CUDA, else compiled kernels where the "
"network has them.")] = "auto"
    device: Annotated[str, Option(metavar="cpu|cuda|cuda:N", help="Where the fast engine's runtime vmap computes; default: on CUDA "
"where there is one.")] = ""
    evaluate_every: Annotated[AtLeast1, Option(help="Fast engine: number of rounds between tests of personalized "
"models.")] = 1
    local_only: Annotated[bool, Option(help="Also train each device alone, for comparison.")] = True
    seeds: Annotated[AtLeast1, Option(help="Number of runs, with the task's seed and the next ones; shows the mean "
"and the spread.")] = 1
    report: Annotated[bool, Option(help="Also write report.html, and the models as ONNX files.")] = True
    sweep: Annotated[str, Option(metavar="S,S,...", help="Noise multipliers at which the run is repeated.")] = ""
    # fmt: on

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, Integral) and not isinstance(value, int):  # of NumPy
                object.__setattr__(self, name, int(value))
        try:
            super().__post_init__()  # typer checks no programs
        except ValueError as error:
            name, of, words = str(error).partition(" ")
            raise BadInput(f"--{name.replace('_', '-')}{of}{words}") from error
        if self.emulate:
            raise BadInput(
                "--emulate is gone: --boards without --engine live plays the boards' speed, memory and network on a "
                "virtual clock"
            )
        for field in fields(self):
            engines = _ENGINES.get(field.name, (self.engine,))
            if self.engine not in engines and getattr(self, field.name) != field.default:
                raise BadInput(
                    f"--{field.name.replace('_', '-')} does nothing with --engine {self.engine}: it is for --engine "
                    f"{' or '.join(engines)}"
                )
        if self.engine == "live" and self.runtime not in ("auto", "onnx"):
            raise BadInput(f"--runtime {self.runtime} does nothing with --engine live, whose devices run onnx")
        if self.device.startswith("cuda") and self.runtime not in ("auto", "vmap"):
            raise BadInput(
                f"--device {self.device} does nothing with --runtime {self.runtime}, which computes on the processor: "
                "take vmap"
            )
        self.noise_multipliers  # noqa: B018 - raises before anything is started

    @property
    def clocked(self) -> bool:
        """True if rounds run on a virtual clock and take the time that they would take on the fleet's boards."""
        return bool(self.boards) and self.engine != "live"

    @property
    def noise_multipliers(self) -> tuple[float, ...]:
        """The points of `sweep`, without repetitions, in ascending order. Raises `BadInput` for a text that is no
        number."""
        try:
            return tuple(sorted({float(part) for part in self.sweep.split(",") if part.strip()}))
        except ValueError as error:
            raise BadInput(f"--sweep {self.sweep!r}: give numbers such as 0,0.3,1,3") from error


def tasks_at(task: Task, multipliers: Sequence[float], *, clocked: bool) -> dict[float, Task]:
    """Returns the task at each noise multiplier, in ascending order. Raises `BadInput` if it cannot be swept."""
    if multipliers and task.statistic is not None:
        raise BadInput("--sweep: a statistic trains nothing, so there is no accuracy to compare; leave --sweep out")
    if multipliers and not task.round.has_cohort and not clocked:
        raise BadInput(
            '--sweep runs in the fast engine, which has no time, and round.mode = "buffered" is about who comes when: '
            "give the devices boards (--boards, without --engine live), or leave --sweep out"
        )
    tasks = {}
    for multiplier in sorted(set(multipliers)):
        try:
            privacy = replace(task.privacy, noise_multiplier=multiplier, epsilon=None)
            tasks[multiplier] = replace(task, privacy=privacy)
        except ValueError as error:
            raise BadInput(f"--sweep {multiplier:g}: {error}") from error
    return tasks


_ENGINES: dict[str, tuple[Engine, ...]] = {
    "broker": ("live",),
    "device": ("fast",),
    "own_processes": ("live",),
    "evaluate_every": ("fast", "ray"),
    "ray_address": ("ray",),
}
"""The engines that use an option, for options that other engines ignore."""
