"""Shows where the time of a round goes that is trained and released as arrays: milliseconds a client, stage by stage.

    python -m benchmarks.gpu_stages [--workload W3] [--clients N] [--samples N] [--rounds 3] [--json FILE]

A stage ends when the device has ended its work, so the stages of a round do not overlap as they do without this
measurement. The first round, in which libraries are loaded, is left out. `host` is the processor time of this process.
On CUDA, the kernels of one more round that took longest follow.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import Figures, make_parser, table, write
from benchmarks.frameworks.ours import task_of
from benchmarks.frameworks.workload import ROUNDS, WORKLOADS, Enough, Workload
from benchmarks.simulation import write_digits
from hushfleet.aggregator.results.events import EventLog
from hushfleet.aggregator.rounds.engine import RoundEngine
from hushfleet.simulator.engines.fast import engine
from hushfleet.simulator.engines.fast.vmap import jobs
from hushfleet.simulator.engines.fast.vmap.training import CohortTrainer
from hushfleet.simulator.engines.fast.workers import Workers
from hushfleet.simulator.run_folder import begin

STAGES: dict[str, tuple[Any, str]] = {
    "begin": (jobs, "begun"),
    "train": (CohortTrainer, "_train_group"),
    "release": (jobs, "release"),
    "rows": (jobs, "rows_of"),
    "accept": (engine, "deliver"),
    "close": (RoundEngine, "close"),
}
SHOWN_KERNELS = 12


def now() -> tuple[float, float]:
    """Returns the wall time and the processor time, when the device has ended its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter(), time.process_time()


class StageTimes:
    """Wall time and processor time of each stage in seconds, over all rounds of a measurement."""

    def __init__(self) -> None:
        self.spent = {name: [0.0, 0.0] for name in (*STAGES, "round")}
        for name, (owner, attribute) in STAGES.items():
            setattr(owner, attribute, self.timed(name, getattr(owner, attribute)))

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            began = now()
            try:
                return function(*arguments, **named)
            finally:
                self.add(name, began)

        return run

    def add(self, name: str, began: tuple[float, float]) -> None:
        """Adds the times since `began`, which is of `now`."""
        self.spent[name] = [
            spent + end - begin for spent, end, begin in zip(self.spent[name], now(), began, strict=True)
        ]

    def clear(self) -> None:
        self.spent = {name: [0.0, 0.0] for name in self.spent}

    def rows(self, clients: int) -> list[Figures]:
        """Returns the stages, and what is in none of them, in milliseconds a client."""
        whole = self.spent["round"]
        rest = [each - sum(self.spent[name][at] for name in STAGES) for at, each in enumerate(whole)]
        found = {**{name: self.spent[name] for name in STAGES}, "rest": rest, "round": whole}
        return [
            {"stage": name, "ms a client": 1e3 * wall / clients, "host": 1e3 * host / clients}
            for name, (wall, host) in found.items()
        ]


class MeasuredRounds:
    """Ends a run after its measured rounds, and on CUDA one more, which is profiled.

    :param rounds: how many are measured, after the first.
    """

    def __init__(self, clients: int, rounds: int) -> None:
        self._clients, self._rounds, self._stages = clients, rounds, StageTimes()
        self._began = now()
        self.rows: list[Figures] = []
        self.profile: Any = None

    def closed(self, round: int) -> None:
        """Takes note of a closed round. Raises `Enough` after the last."""
        if round == 1:
            self._stages.clear()
        elif 1 < round <= 1 + self._rounds:
            self._stages.add("round", self._began)
        if round == 1 + self._rounds:
            self.rows = self._stages.rows(self._clients * self._rounds)
            if not torch.cuda.is_available():
                raise Enough
            self.profile = torch.profiler.profile()
            self.profile.start()
        elif round > 1 + self._rounds:
            self.profile.stop()
            raise Enough
        self._began = now()


def measured(workload: Workload, rounds: int) -> MeasuredRounds:
    """Runs the workload's first rounds in this process."""
    jobs.RELEASED_ON = ("cuda", "cpu")  # a rehearsal runs the same code
    measurement = MeasuredRounds(workload.cohort, rounds)
    with tempfile.TemporaryDirectory(prefix="stages-") as folder:
        data_dir = write_digits(Path(folder) / "digits", workload.clients * workload.samples)
        simulation = begin(task_of(workload), Path(folder) / "run", data_dir=data_dir)
        simulation = replace(simulation, prepared=replace(simulation.prepared, evaluate_global=None))
        how: dict[str, Any] = {"runtime": "vmap", "evaluate_every": ROUNDS + 1, "on_closed": measurement.closed}
        with Workers(1) as workers, EventLog(simulation.folder.events) as events, suppress(Enough):
            engine.run_rounds(simulation, workers, events, **how)
    return measurement


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--workload", choices=("W1", "W2", "W3"), default="W3")
    parser.add_argument("--clients", type=int, help="in a round; default: as in the workload")
    parser.add_argument("--samples", type=int, help="of each client; default: as in the workload")
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds (default %(default)s)")
    options = parser.parse_args(arguments)
    workload = WORKLOADS[options.workload]
    cohort, samples = options.clients or workload.cohort, options.samples or workload.samples
    workload = replace(workload, cohort=cohort, samples=samples, clients=min(workload.clients, 4 * cohort))
    torch.set_num_threads(1)
    measurement = measured(workload, options.rounds)
    write(options, {"workload": asdict(workload), "stages": measurement.rows})
    table(workload.text, measurement.rows)
    if measurement.profile is not None:
        print(measurement.profile.key_averages().table(sort_by="self_cuda_time_total", row_limit=SHOWN_KERNELS))


if __name__ == "__main__":
    main()
