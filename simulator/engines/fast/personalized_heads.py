"""Chooses and tests, in a simulation, the heads that devices keep after the last round with the final global model.

In the field a device does the same with its own images (`hushfleet.learning.personalized_head`), and nobody else learns
the result. Here the result is a line in the device's metrics, like the measures of its rounds, and the head is kept in
its store.
"""

from __future__ import annotations

from hushfleet.edge_client.storage.kept import KeptModel
from hushfleet.edge_client.worker.metrics import append_line
from hushfleet.learning.evaluation import evaluate
from hushfleet.learning.head_choice import takes_unlabelled
from hushfleet.learning.personalized_head import inputs_of_own, own_logits, personalized_head_of
from hushfleet.progress import counted
from hushfleet.schema import to_plain
from hushfleet.simulator.engines.fast.after_round import AfterRound, after_last_round
from hushfleet.simulator.engines.fast.device_file import store_of
from hushfleet.simulator.engines.fast.workers import WorkerPool
from hushfleet.simulator.run_folder import Simulation
from hushfleet.wire.format.difference import params_digest


def choose_personalized_heads(simulation: Simulation, workers: WorkerPool, *, runtime: str = "onnx") -> None:
    """Lets each device that took part choose, if the model is linear; its last round's metrics are then the head's."""
    if not simulation.prepared.spec.model.chooses_head:
        return
    jobs = after_last_round(simulation, simulation.took_part, runtime=runtime)
    for _ in counted(workers.map(_choose_one, jobs), "each device chooses its head", total=len(jobs)):
        pass


def _choose_one(job: AfterRound) -> None:
    run, published = job.run, job.published()
    params, _ = run.method.split(published)
    spec, files = run.spec, run.folder.device(job.device)
    wanted = takes_unlabelled(spec.signal, len(spec.model.class_names))
    unlabelled = run.unlabelled(job.device) if wanted else None
    head = personalized_head_of(params, spec.model.layout, run.train(job.device), spec.signal, unlabelled)
    with store_of(files, job.device, inspect=False) as store:
        kept = {"task": spec.task, "global_digest": params_digest(published), "round": job.round}
        store.keep_model(KeptModel.of(head, package=spec.digest, **kept))
    line: dict[str, object] = {"round": job.round, "own_head": to_plain(head.choice)}
    for name, test in (("common", run.common_test), ("local", run.local_test(job.device))):
        found = evaluate(own_logits, head.params, inputs_of_own(test))
        line[f"accuracy_own_{name}"], line[f"loss_own_{name}"] = found.accuracy, found.loss
    append_line(files.metrics, line)
