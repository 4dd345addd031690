"""Chooses and tests, in a simulation, the heads that devices keep after the last round with the final global model.

In the field a device does the same with its own images (`hushfleet.learning.personalized_head`), and nobody else learns
the result. Here the result is a line in the device's metrics, like the measures of its rounds, and the head is kept in
its store.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np

from hushfleet.aggregator.results.device_metrics import write_metrics
from hushfleet.edge_client.storage.kept import KeptModel
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.edge_client.worker.metrics import append_line, evaluations, tested_fields
from hushfleet.learning.evaluation import Evaluations, evaluate_each, evaluate_models
from hushfleet.learning.head_choice import takes_unlabelled
from hushfleet.learning.personalized_head import inputs_of_own, own_logits, personalized_head_of
from hushfleet.methods import is_shared_whole
from hushfleet.progress import counted
from hushfleet.schema import pack, to_plain
from hushfleet.simulator.cohort_store import CohortStore, index_of
from hushfleet.simulator.engines.fast.after_round import AfterRound, after_last_round, in_groups
from hushfleet.simulator.engines.fast.loaded_run import LoadedRun
from hushfleet.simulator.engines.fast.workers import WorkerPool
from hushfleet.simulator.run_folder import MOST_SHOWN, RunFolder, Simulation
from hushfleet.wire.format.difference import params_digest


@dataclass(frozen=True)
class _Job(AfterRound):
    tested: bool


class _Chosen(NamedTuple):
    """The head that a device chose, and its line of metrics; without the head, if it is not kept, and without the line,
    if it is not tested."""

    head: KeptModel | None
    line: dict[str, object] | None


def choose_personalized_heads(simulation: Simulation, workers: WorkerPool, *, runtime: str = "onnx") -> None:
    """Lets devices that took part choose, if the model is linear: those that are tested, and those whose heads are
    kept. The last round's metrics of a tested device are then the head's; or the final model's, as the device uses it,
    if devices predict with that (`is_shared_whole`)."""
    spec, folder = simulation.prepared.spec, simulation.folder
    if not (spec.model.chooses_head or is_shared_whole(spec)):
        return
    choose, tested = (_choose if spec.model.chooses_head else _test_shared), {each.name for each in simulation.tested}
    devices = [
        name for name in simulation.took_part if name in tested or (spec.model.chooses_head and _kept(folder, name))
    ]
    jobs = [
        _Job(**vars(job), tested=job.device in tested) for job in after_last_round(simulation, devices, runtime=runtime)
    ]
    groups = chain.from_iterable(workers.map(choose, in_groups(jobs, workers)))
    found = list(counted(groups, "each device chooses its head", total=len(jobs)))
    chosen = dict(zip(devices, found, strict=True))
    lines = {name: each.line for name, each in chosen.items() if each.line is not None}
    if not folder.cohort.exists():
        for name, (head, _) in chosen.items():
            with DeviceStore(folder.device(name).store, device=name, durable=False) as store:
                if head is not None:
                    store.keep_model(head)
                    store.note_awaited("")
        for name, line in lines.items():
            append_line(folder.device(name).metrics, line)
    elif jobs:
        closed = jobs[0].round
        write_metrics(folder.metrics, closed, lines)
        heads = {index_of(name): pack(each.head) for name, each in chosen.items() if each.head is not None}
        if heads:
            CohortStore.open(folder.cohort, closed=closed).append_heads(closed, heads)


def _kept(folder: RunFolder, device: str) -> bool:
    return not folder.cohort.exists() or index_of(device) < MOST_SHOWN


def _choose(jobs: Sequence[_Job]) -> list[_Chosen]:
    run, published = jobs[0].run, jobs[0].published()
    params, _ = run.method.split(published)
    spec = run.spec
    wanted = takes_unlabelled(spec.signal, len(spec.model.class_names))
    heads = []
    for job in jobs:
        unlabelled = run.unlabelled(job.device) if wanted else None
        heads.append(personalized_head_of(params, spec.model.layout, run.train(job.device), spec.signal, unlabelled))
    tested = {job.device: head.params for job, head in zip(jobs, heads, strict=True) if job.tested}
    keep, models, common_test = bool(run.metrics), list(tested.values()), inputs_of_own(run.common_test)
    on_common = evaluate_models(_logits_of_heads, models, common_test, keep_logits=keep)
    measured = dict(zip(tested, on_common, strict=True))
    kept = {"task": spec.task, "global_digest": params_digest(published), "round": jobs[0].round}
    chosen = []
    for job, head in zip(jobs, heads, strict=True):
        line: dict[str, object] | None = None
        if job.tested:
            common = measured[job.device]
            local = _on_own(run, job.device, head.params, common).mean(run.metrics)
            line = {"round": job.round, "own_head": to_plain(head.choice)}
            line |= tested_fields({"common": common.mean(), "local": local})
        model = KeptModel.of(head, package=run.package, **kept) if _kept(run.folder, job.device) else None
        chosen.append(_Chosen(model, line))
    return chosen


def _test_shared(jobs: Sequence[_Job]) -> list[_Chosen]:
    run, params, lines = jobs[0].run, jobs[0].global_params(), []
    for job in jobs:
        part = run.local_indices(job.device)
        local = run.local_test(job.device) if part is None else part
        tested = evaluations(run.own_inference(job.device), params, run.common_test, local, run.metrics)
        rates = {**run.alarms(job.device, params), **tested["local"].metrics}
        tested["local"] = tested["local"]._replace(metrics=rates)
        lines.append(_Chosen(None, {"round": job.round, **tested_fields(tested)}))
    return lines


def _on_own(run: LoadedRun, device: str, params: np.ndarray, on_common: Evaluations) -> Evaluations:
    """Returns the results on the device's own test, which may be a part of the common one."""
    if (part := run.local_indices(device)) is not None:
        return on_common.take(part)
    return evaluate_each(own_logits, params, inputs_of_own(run.local_test(device)), keep_logits=bool(run.metrics))


def _logits_of_heads(heads: Sequence[np.ndarray], x: np.ndarray) -> np.ndarray:
    return np.stack([own_logits(params, x) for params in heads])
