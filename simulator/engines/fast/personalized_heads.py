"""Chooses and tests, in a simulation, the heads that devices keep after the last round with the final global model.

In the field a device does the same with its own images (`hushfleet.learning.personalized_head`), and nobody else learns
the result. Here the result is a line in the device's metrics, like the measures of its rounds, and the head is kept in
its store.
"""

from __future__ import annotations

from typing import NamedTuple

from hushfleet.aggregator.results.device_metrics import write_metrics
from hushfleet.edge_client.storage.kept import KeptModel
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.edge_client.worker.metrics import append_line
from hushfleet.learning.evaluation import evaluate
from hushfleet.learning.head_choice import takes_unlabelled
from hushfleet.learning.personalized_head import inputs_of_own, own_logits, personalized_head_of
from hushfleet.progress import counted
from hushfleet.schema import pack, to_plain
from hushfleet.simulator.cohort_store import CohortStore, index_of
from hushfleet.simulator.engines.fast.after_round import AfterRound, after_last_round
from hushfleet.simulator.engines.fast.workers import WorkerPool
from hushfleet.simulator.run_folder import MOST_SHOWN, Simulation
from hushfleet.wire.format.difference import params_digest


class _Chosen(NamedTuple):
    """The head that a device chose, and its line of metrics; without the head, if it is not kept."""

    head: KeptModel | None
    line: dict[str, object]


def choose_personalized_heads(simulation: Simulation, workers: WorkerPool, *, runtime: str = "onnx") -> None:
    """Lets each device that took part choose, if the model is linear; its last round's metrics are then the head's."""
    if not simulation.prepared.spec.model.chooses_head:
        return
    folder, devices = simulation.folder, simulation.took_part
    jobs = after_last_round(simulation, devices, runtime=runtime)
    found = list(counted(workers.map(_choose_one, jobs), "each device chooses its head", total=len(jobs)))
    chosen = dict(zip(devices, found, strict=True))
    if not folder.cohort.exists():
        for name, (head, line) in chosen.items():
            with DeviceStore(folder.device(name).store, device=name, durable=False) as store:
                assert head is not None
                store.keep_model(head)
            append_line(folder.device(name).metrics, line)
    elif jobs:
        closed = jobs[0].round
        write_metrics(folder.metrics, closed, {name: each.line for name, each in chosen.items()})
        heads = {index_of(name): pack(each.head) for name, each in chosen.items() if each.head is not None}
        CohortStore.open(folder.cohort, closed=closed).append_heads(closed, heads)


def _choose_one(job: AfterRound) -> _Chosen:
    run, published = job.run, job.published()
    params, _ = run.method.split(published)
    spec = run.spec
    wanted = takes_unlabelled(spec.signal, len(spec.model.class_names))
    unlabelled = run.unlabelled(job.device) if wanted else None
    head = personalized_head_of(params, spec.model.layout, run.train(job.device), spec.signal, unlabelled)
    kept = {"task": spec.task, "global_digest": params_digest(published), "round": job.round}
    line: dict[str, object] = {"round": job.round, "own_head": to_plain(head.choice)}
    for name, test in (("common", run.common_test), ("local", run.local_test(job.device))):
        found = evaluate(own_logits, head.params, inputs_of_own(test))
        line[f"accuracy_own_{name}"], line[f"loss_own_{name}"] = found.accuracy, found.loss
    if run.folder.cohort.exists() and index_of(job.device) >= MOST_SHOWN:
        return _Chosen(None, line)
    return _Chosen(KeptModel.of(head, package=run.package, **kept), line)
