"""Runs a simulation from its first round to its report, with any engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import cast

from rich.markup import escape

from hushfleet.aggregator.config.notes import notes_of
from hushfleet.aggregator.config.task import Task
from hushfleet.aggregator.report.console import Console
from hushfleet.aggregator.report.display import FleetDisplay
from hushfleet.aggregator.report.progress import show_progress
from hushfleet.aggregator.report.readable import format_seconds
from hushfleet.aggregator.results.result import Result
from hushfleet.errors import BadInput
from hushfleet.field_types import MAX_COUNT
from hushfleet.models.cuda import computing_on
from hushfleet.simulator.boards import read_boards
from hushfleet.simulator.closed_round import OnRound
from hushfleet.simulator.engines import RoundsRunner, engine
from hushfleet.simulator.engines.fast.runtimes import ON_DEVICES, VMAP, choose_runtime, unavailable
from hushfleet.simulator.engines.fast.workers import WorkerPool
from hushfleet.simulator.options import RunOptions, Runtime, tasks_at
from hushfleet.simulator.run_folder import RunFolder, Simulation, open_simulation, repeated
from hushfleet.simulator.schedule import schedule_of
from hushfleet.simulator.watch import Watch

AUTO = "auto"


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


def run(
    simulation: Simulation,
    options: RunOptions,
    *,
    console: Console,
    workers: WorkerPool | None = None,
    on_round: OnRound | None = None,
) -> Result:
    """Runs the rounds, the baseline, the sweep and the other seeds; writes models, `result.json` and `report.html`.

    :param workers: processes that exist already; None: started for this run and its other seeds.
    :param on_round: called after each round of the run itself, before the next one begins.
    """
    with computing_on(options.device), _workers(options) if workers is None else nullcontext(workers) as pool:
        result = _run_one(simulation, options, console, pool, on_round)
        if options.seeds > 1:
            from hushfleet.simulator.after_rounds import write_result
            from hushfleet.simulator.sweep import with_seeds

            others = _other_seeds(simulation, _alike(options, result), console, pool)
            result = with_seeds(result, list(others))
            write_result(result, simulation.folder, report=options.report)
    return result


def _alike(options: RunOptions, first: Result) -> RunOptions:
    """Returns the options for the other seeds: the runtime of the first one, and no sweep."""
    taken = options.runtime if options.engine == "live" or first.rerun is None else first.rerun.runtime
    return replace(options, runtime=cast(Runtime, taken), sweep="")


def _other_seeds(
    simulation: Simulation, options: RunOptions, console: Console, workers: WorkerPool
) -> Iterator[Result]:
    """Yields the result of each further seed: a whole run in `seeds/SEED`, started, continued, or already finished."""
    for seed in range(simulation.seed + 1, simulation.seed + options.seeds):
        folder = simulation.folder.of_seed(seed)
        if folder.result.exists():
            yield Result.load(folder.result)
            continue
        console.print(f"seed {seed}", style="bold", highlight=False)
        with show_progress(console):
            other = repeated(simulation, replace(simulation.task, seed=seed), folder)
        yield _run_one(other, options, console, workers)


def _run_one(
    simulation: Simulation,
    options: RunOptions,
    console: Console,
    workers: WorkerPool,
    on_round: OnRound | None = None,
) -> Result:
    for note in notes_of(simulation.task):
        console.print(f"[yellow]note:[/] {escape(note)}", highlight=False, soft_wrap=True)
    for words in _not_played(simulation, options):
        console.print(words, style="yellow", highlight=False, soft_wrap=True)
    runtime = ON_DEVICES
    watch = _watch(simulation, options, console)
    if options.engine == "live":
        engine("live")(simulation, options, watch)
    else:
        with show_progress(console):
            named = VMAP if options.runtime == AUTO and options.device.startswith("cuda") else options.runtime
            runtime = choose_runtime(simulation) if named == AUTO else named
        spec = simulation.prepared.spec.model
        if reason := unavailable(runtime, spec.name, simulation.task.model.own_loss):
            raise BadInput(f"--runtime {runtime} does not go with this task: {reason}")
        console.print(f"gradients by {runtime}", style="bright_black", highlight=False)
        with watch:
            runner, every = _rounds(simulation, workers, options, runtime), options.evaluate_every
            seconds = runner(simulation, evaluate_every=every, on_round=on_round)
        if seconds is not None:
            taken = f"the fleet would have taken {format_seconds(seconds)} on these boards"
            console.print(taken, highlight=False)
    from hushfleet.simulator.after_rounds import finished  # after months of rounds, perhaps: with the plots

    rounds = _rounds(simulation, workers, options, runtime)
    with show_progress(console):
        return finished(simulation, workers, options, runtime=runtime, rounds=rounds)


def _workers(options: RunOptions) -> WorkerPool:
    if options.engine == "ray":
        return engine("ray")(options.workers, address=options.ray_address)
    return engine("workers")(options.workers)


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


def _rounds(simulation: Simulation, workers: WorkerPool, options: RunOptions, runtime: str) -> RoundsRunner:
    """Returns what runs the rounds of this run, and of the points of its sweep."""
    if options.clocked:
        return partial(engine("boards"), workers=workers, mix=simulation.mix, runtime=runtime)
    return partial(engine("fast"), workers=workers, runtime=runtime)
