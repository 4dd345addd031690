"""Chooses the device's personalized head with a global model, from its own samples; nothing of it leaves the board.

A new task must not make predictions worse. If it continues an earlier model, its heads begin with a model that is
trained. Otherwise they begin with the sum of its model and the shared head of the earlier task: a head grows in
proportion to its rounds, and so does the variance of its noise.
"""

from __future__ import annotations

import math

import numpy as np

from hushfleet.edge_client.storage.kept import KeptModel
from hushfleet.edge_client.worker.job import HeadChosen, HeadJob, Job
from hushfleet.edge_client.worker.loaded_task import LoadedTask
from hushfleet.learning.carry_over import carry_over
from hushfleet.learning.personalized_head import inputs_of_own, own_logits, personalized_head_of
from hushfleet.schema import pack, unpack
from hushfleet.wire.format.spec import BlobRef, TaskSpec


def chosen_head(job: Job, head_job: HeadJob, task: LoadedTask) -> HeadChosen:
    """Returns the head, and how many samples that never train it gets right. Raises `BadInput` without data."""
    spec = task.spec
    shared = job.model[: 4 * spec.model.layout.size]
    params, signal = _base(head_job, spec, np.frombuffer(shared, "<f4"))
    unlabelled = task.data.unlabelled() if head_job.unlabelled else None
    head = personalized_head_of(params, spec.model.layout, task.data.samples(), signal, unlabelled)
    about = {"task": spec.task, "global_digest": job.plan.global_digest, "round": head_job.closed}
    kept = KeptModel.of(head, package=BlobRef.of(job.package).digest, shared=shared, **about)
    held = task.data.held_out() if spec.held_out else None
    if held is None or not len(held):
        return HeadChosen(pack(kept))
    right = held.targets.right(own_logits(head.params, inputs_of_own(held).x).astype(np.float64), held.labels)
    return HeadChosen(pack(kept), int(right.sum()), len(held))


def _base(head_job: HeadJob, spec: TaskSpec, shared: np.ndarray) -> tuple[np.ndarray, float | None]:
    """Returns the shared head that the device's heads are pulled to, float32 `[d]`, and its signal.

    :param shared: the task's model; empty before its first closed round if it begins with zeros.
    """
    parts = [(shared, _share(spec, head_job.closed), spec.signal)] if len(shared) else []
    if head_job.earlier is not None:
        kept = unpack(KeptModel, head_job.earlier[0], what="the personalized head")
        earlier = TaskSpec.from_bytes(head_job.earlier[1])
        parts.append((_carried(kept, earlier, spec), _share(earlier, kept.round), earlier.signal))
    if not parts:
        return np.zeros(spec.model.layout.size, np.float32), None
    heads, shares, signals = zip(*parts, strict=True)
    squares = [math.inf if r is None else share * r**2 for share, r in zip(shares, signals, strict=True)]
    signal = spec.signal if len(parts) == 1 else math.sqrt(sum(squares))
    return (np.sum(heads, 0) / sum(shares)).astype(np.float32), None if None in signals else signal


def _share(spec: TaskSpec, closed: int) -> float:
    """Returns the share of a task's rounds that are closed; 1 if it continues a trained model."""
    return 1.0 if spec.continues is not None else min(1.0, max(1, closed) / spec.rounds)


def _carried(kept: KeptModel, earlier: TaskSpec, spec: TaskSpec) -> np.ndarray:
    """Returns the shared head of an earlier task for the classes of `spec`, which has the same features."""
    names, to_names = earlier.model.class_names, spec.model.class_names
    shared = np.frombuffer(kept.shared, "<f4").astype(np.float32)
    return carry_over(shared, names, layout=spec.model.layout, to_names=to_names, softmax=True)
