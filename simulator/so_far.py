"""Reads a run that is still going on, or was interrupted: the rounds so far, from what its processes write as they go.

The aggregator's store is locked by its process, so rounds and devices come from the event log and the devices' metrics.
What privacy has been spent so far is in the events of updates.
"""

from __future__ import annotations

from collections import Counter

from hushfleet.aggregator.config.task import load_task
from hushfleet.aggregator.results.device_metrics import read_all_metrics
from hushfleet.aggregator.results.events import iterate_events
from hushfleet.aggregator.results.record import about
from hushfleet.aggregator.results.rerun import versions
from hushfleet.aggregator.results.result import Details, LocalOnly, Result, RoundRow
from hushfleet.simulator.fleet import device_names
from hushfleet.simulator.results import with_own
from hushfleet.simulator.run_folder import RunFolder
from hushfleet.wire.format.spec import TaskSpec


def result_so_far(files: RunFolder) -> Result:
    """Returns the result of the closed rounds; without the baseline, the examples and the table of privacy."""
    task, spec = load_task(files.task), TaskSpec.from_bytes(files.package.read_bytes())
    rounds, engine, accepted, uplink = dict[int, RoundRow](), "fast", Counter[str](), Counter[str]()
    for event in iterate_events(files.events):
        if event["event"] == "run":
            engine = event["engine"]
        elif event["event"] == "round_close":
            rounds[event["round"]] = RoundRow.of(event)
        elif event["event"] == "update" and event["code"] == "accepted":
            accepted[event["device"]] += 1
            uplink[event["device"]] += event["bytes"]
    names = device_names(task.data.devices)
    result = Result(
        **about(
            spec,
            dataset=task.data.name,
            partition=task.partition_label,
            noise_multiplier=spec.privacy.noise_multiplier,
        ),
        devices=len(names),
        seed=task.seed,
        engine=engine,
        rounds=[rounds[number] for number in sorted(rounds)],
        local_only=LocalOnly(),
        privacy=[],
        details=Details(
            devices=names,
            class_names=list(spec.model.class_names),
            score=spec.model.targets.describe(),
            measure=spec.model.targets.measure,
            rounds_accepted=[accepted[name] for name in names],
            uplink_bytes=[uplink[name] for name in names],
        ),
        versions=versions(),
    )
    return Result.of(with_own(result, read_all_metrics(files.devices, names)))
