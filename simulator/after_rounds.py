"""Finishes a run whose rounds are over: personalized heads, the baseline, the sweep, models, `result.json` and the
report."""

from __future__ import annotations

from hushfleet.aggregator.results.result import Result
from hushfleet.simulator.answers import with_answers
from hushfleet.simulator.engines.fast.local_only import train_local_only
from hushfleet.simulator.engines.fast.personalized_heads import choose_personalized_heads
from hushfleet.simulator.engines.fast.workers import WorkerPool
from hushfleet.simulator.model_files import write_models
from hushfleet.simulator.options import RunOptions
from hushfleet.simulator.results import assemble
from hushfleet.simulator.run_folder import RunFolder, Simulation
from hushfleet.simulator.sweep import RoundsRunner, sweep_noise, with_sweep


def finished(
    simulation: Simulation, workers: WorkerPool, options: RunOptions, *, runtime: str, rounds: RoundsRunner
) -> Result:
    """Does what follows the rounds, and returns the result.

    :param runtime: computed the gradients.
    :param rounds: runs the rounds of a sweep's points.
    """
    trains = simulation.prepared.spec.training_rounds > 0
    if trains:
        choose_personalized_heads(simulation, workers, runtime=runtime)
    fleet = simulation.fleet.devices if options.local_only and trains else ()
    alone = list(train_local_only(simulation, workers, runtime=runtime)) if fleet else []
    noises = options.noise_multipliers
    points = list(sweep_noise(simulation, workers, noises, alone, runtime=runtime, rounds=rounds))
    result = assemble(simulation, engine=options.engine, local_only_models=alone, runtime=runtime)
    if trains:
        result = with_answers(result, simulation, workers, alone, runtime=runtime)
        if options.report:
            write_models(simulation)
    result = with_sweep(result, points)
    write_result(result, simulation.folder, report=options.report)
    return result


def write_result(result: Result, folder: RunFolder, *, report: bool) -> None:
    """Writes `result.json` and perhaps the report."""
    result.save(folder.result)
    if report:
        from hushfleet.aggregator.report.render import write_report  # loads the plots

        write_report(result, folder.report)
