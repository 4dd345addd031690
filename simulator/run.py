"""Runs a simulation from its first round to its report, with any engine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import cast

from rich.markup import escape

from hushfleet.aggregator.config.notes import notes_of
from hushfleet.aggregator.config.task import Task
from hushfleet.aggregator.report.console import Console
from hushfleet.aggregator.report.display import FleetDisplay
from hushfleet.aggregator.report.progress import show_progress
from hushfleet.aggregator.report.render import write_report
from hushfleet.aggregator.results.events import EventLog
from hushfleet.aggregator.results.result import Result
from hushfleet.errors import BadInput
from hushfleet.schema import MAX_COUNT
from hushfleet.simulator.answers import with_answers
from hushfleet.simulator.boards import read_boards
from hushfleet.simulator.engines.fast.engine import run_rounds
from hushfleet.simulator.engines.fast.local_only import train_alone
from hushfleet.simulator.engines.fast.own_heads import choose_own_heads
from hushfleet.simulator.engines.fast.runtimes import ON_DEVICES, choose_runtime, unavailable
from hushfleet.simulator.engines.fast.workers import WorkerPool, Workers
from hushfleet.simulator.engines.ray.workers import RayWorkers
from hushfleet.simulator.model_files import write_models
from hushfleet.simulator.options import RunOptions, Runtime
from hushfleet.simulator.results import assemble
from hushfleet.simulator.run_folder import RunFolder, Simulation, open_simulation, repeated
from hushfleet.simulator.schedule import schedule_of
from hushfleet.simulator.sweep import Rounds, sweep_noise, tasks_at, with_seeds, with_sweep
from hushfleet.simulator.units import format_seconds
from hushfleet.simulator.watch import Watch
from hushfleet.simulator.world.live import LiveFleet
from hushfleet.simulator.world.on_boards import keep_costs, run_on_boards

AUTO = "auto"
LIVE_RESTARTS = 3


def opened(task: Task, folder: RunFolder, options: RunOptions, console: Console) -> Simulation:
    """Starts the run in the folder, or continues it. Raises `BadInput` if this is impossible."""
    tasks_at(task, options.noise_multipliers, clocked=options.clocked)  # raises before anything is started
    if (last := task.seed + options.seeds - 1) > MAX_COUNT:
        raise BadInput(
            f"seed = {task.seed} with --seeds {options.seeds}: the last seed would be {last}; take a lower seed"
        )
    mix = read_boards(options.boards, devices=task.data.devices, seed=task.seed) if options.boards else None
    with show_progress(console):
        return open_simulation(task, folder.path, data_dir=options.data_dir, mix=mix, resume=options.resume)


def run(simulation: Simulation, options: RunOptions, *, console: Console) -> Result:
    """Runs the rounds, the baseline, the sweep and the other seeds; writes models, `result.json` and `report.html`."""
    result = _run_one(simulation, options, console)
    if options.seeds > 1:
        result = with_seeds(result, list(_other_seeds(simulation, _alike(options, result), console)))
        _write(result, simulation.folder)
    return result


def _alike(options: RunOptions, first: Result) -> RunOptions:
    """Returns the options for the other seeds: the runtime of the first one, and no sweep."""
    taken = options.runtime if options.engine == "live" or first.rerun is None else first.rerun.runtime
    return replace(options, runtime=cast(Runtime, taken), sweep="")


def _other_seeds(simulation: Simulation, options: RunOptions, console: Console) -> Iterator[Result]:
    """Yields the result of each further seed: a whole run in `seeds/SEED`, started, continued, or already finished."""
    for seed in range(simulation.seed + 1, simulation.seed + options.seeds):
        folder = simulation.folder.of_seed(seed)
        if folder.result.exists():
            yield Result.load(folder.result)
            continue
        console.print(f"seed {seed}", style="bold", highlight=False)
        with show_progress(console):
            other = repeated(simulation, replace(simulation.task, seed=seed), folder)
        keep_costs(other.folder, simulation.folder)
        yield _run_one(other, options, console)


def _run_one(simulation: Simulation, options: RunOptions, console: Console) -> Result:
    for note in notes_of(simulation.task):
        console.print(f"[yellow]note:[/] {escape(note)}", highlight=False, soft_wrap=True)
    for words in _not_played(simulation, options):
        console.print(words, style="yellow", highlight=False, soft_wrap=True)
    with _workers(options) as workers:
        runtime = ON_DEVICES
        if options.engine == "live":
            _run_live(simulation, options, console)
        else:
            with show_progress(console):
                runtime = choose_runtime(simulation) if options.runtime == AUTO else options.runtime
            spec = simulation.prepared.spec.model
            if reason := unavailable(runtime, spec.name):
                raise BadInput(f"--runtime {runtime} does not go with this task: {reason}")
            console.print(f"gradients by {runtime}", style="bright_black", highlight=False)
            _run_fast(simulation, workers, options, runtime, console)
        with show_progress(console):
            trains = simulation.prepared.spec.training_rounds > 0
            if trains:
                choose_own_heads(simulation, workers, runtime=runtime)
            fleet = simulation.fleet.devices if options.local_only and trains else ()
            alone = list(train_alone(simulation, workers, runtime=runtime)) if fleet else []
            noises = options.noise_multipliers
            clocked = _on_same_boards(simulation, workers, runtime) if options.clocked else None
            points = list(sweep_noise(simulation, workers, noises, alone, runtime=runtime, clocked=clocked))
            result = assemble(simulation, engine=options.engine, alone=alone, runtime=runtime)
            if trains:
                result = with_answers(result, simulation, workers, alone, runtime=runtime)
                write_models(simulation)
    result = with_sweep(result, points)
    _write(result, simulation.folder)
    return result


def _on_same_boards(simulation: Simulation, workers: WorkerPool, runtime: str) -> Rounds:
    """Returns a function that runs a sweep's points under the virtual clock, on boards as fast as in the run itself."""

    def play(point: Simulation, every: int) -> None:
        keep_costs(point.folder, simulation.folder)
        run_on_boards(point, workers, mix=point.mix, runtime=runtime, evaluate_every=every)

    return play


def _write(result: Result, folder: RunFolder) -> None:
    result.save(folder.result)
    write_report(result, folder.report)


def _workers(options: RunOptions) -> WorkerPool:
    if options.engine == "ray":
        return RayWorkers(options.workers, address=options.ray_address)
    return Workers(options.workers)


def _watch(simulation: Simulation, options: RunOptions, console: Console) -> Watch:
    privacy = simulation.prepared.spec.privacy
    display = FleetDisplay(console=console, delta=privacy.delta, accountant=privacy.accountant)
    return Watch(simulation, display, engine=options.engine)


def _not_played(simulation: Simulation, options: RunOptions) -> Iterator[str]:
    """Yields a note for each part of the task that is played on a virtual clock alone."""
    if options.clocked:
        return
    if simulation.task.schedule.is_set:
        yield "the schedule is not played, and rounds follow each other: it takes --boards, without --engine live"
    if not schedule_of(simulation.task, [device.name for device in simulation.fleet.devices]).is_calm:
        yield "the scenario is not played: it takes --boards, without --engine live"


def _run_live(simulation: Simulation, options: RunOptions, console: Console) -> None:
    hosts = _hosts(simulation, options.own_processes)
    fleet = LiveFleet(simulation, broker_kind=options.broker, restarts=LIVE_RESTARTS, hosts=hosts)
    with _watch(simulation, options, console), fleet.running():
        fleet.wait()


def _hosts(simulation: Simulation, own_processes: int) -> dict[str, list[str]]:
    """Divides the devices after the first `own_processes` among processes, one for each core."""
    hosted = [device.name for device in simulation.fleet.devices][own_processes:] if own_processes else []
    count = min(len(hosted), os.cpu_count() or 1)
    return {f"host-{number}": hosted[number::count] for number in range(count)}


def _run_fast(simulation: Simulation, workers: WorkerPool, options: RunOptions, runtime: str, console: Console) -> None:
    every = options.evaluate_every
    if not options.clocked:
        with EventLog(simulation.folder.events) as events, _watch(simulation, options, console):
            run_rounds(simulation, workers, events, runtime=runtime, evaluate_every=every)
        return
    with _watch(simulation, options, console):
        seconds = run_on_boards(simulation, workers, mix=simulation.mix, runtime=runtime, evaluate_every=every)
    console.print(f"the fleet would have taken {format_seconds(seconds)} on these boards", highlight=False)
