"""Decides which model a board predicts with: the newest task that has one here, else the shared model.

`predict`, `status`, the labelling page and the measured accuracy all ask `own_model`. A linear model's personalized
head (`hushfleet.learning.personalized_head`) is chosen after each closed round; another personalized model is the one
of the last training; an autoencoder that is shared as a whole is the global model. Until a new task has such a model,
the model of an earlier task answers, and the store keeps the graphs that it needs (`blobs_of_models`).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Literal, NamedTuple

from hushfleet.array_api import np
from hushfleet.edge_client.storage.kept import KeptModel
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.errors import BadInput, HushfleetError
from hushfleet.wire.format.messages import IN_PROGRESS, RoundPlan
from hushfleet.wire.format.spec import TaskSpec

if TYPE_CHECKING:
    from hushfleet.data.samples import LabelledSamples
    from hushfleet.edge_client.worker.runtime import TaskRuntime
    from hushfleet.learning.evaluation import LogitsOf

_log = logging.getLogger("hushfleet.edge")


class PersonalizedModel(NamedTuple):
    """The model that this device predicts with.

    :param kind: `personalised` or `global`, or the personalized head that was chosen, in words.
    :param params: float32 `[d]`.
    :param is_head: whether it is a personalized head, which takes all features and no graph of the task.
    :param shared: the global model that it was made with, float32 `[d]`; None if the device has it no more.
    :param round: the last closed round in it; 0 if there is none, or if it is unknown.
    """

    spec: TaskSpec
    kind: str
    params: np.ndarray
    is_head: bool = False
    shared: np.ndarray | None = None
    round: int = 0

    def answers(self, graph: LogitsOf, samples: LabelledSamples) -> tuple[LogitsOf, LabelledSamples]:
        """Returns the function that computes its logits, and its inputs."""
        from hushfleet.learning.personalized_head import inputs_of_own, own_logits

        return (own_logits, inputs_of_own(samples)) if self.is_head else (graph, samples)


class Chosen(NamedTuple):
    """The model that a device predicts with, before any array is read.

    :param kind: `head` for a personalized head, `own` for the model of the last training, `global` for the shared one.
    """

    spec: TaskSpec
    kept: KeptModel
    kind: Literal["head", "own", "global"]


def personalized_model(store: DeviceStore) -> PersonalizedModel:
    """Returns the model that this device predicts with. Raises `BadInput` if there is none yet."""
    spec, kept, kind = chosen_model(store)
    size = spec.model.layout.size
    data = kept.shared or store.blob(kept.global_digest) or b""
    shared = np.frombuffer(data, "<f4", count=size).astype(np.float32) if len(data) >= 4 * size else None
    if kind == "head" and kept.choice is not None:
        return PersonalizedModel(spec, kept.choice.plain, kept.params, True, shared, kept.round)
    if kind == "global" and shared is not None:
        return PersonalizedModel(spec, "global", shared, False, shared, kept.round)
    state = store.load_state(spec.task)
    if state is None or state.own is None:
        raise no_model_of(spec)
    return PersonalizedModel(spec, "personalised", state.own, False, shared, kept.round)


def chosen_model(store: DeviceStore) -> Chosen:
    """Returns what `own_model` reads. Raises `BadInput` if there is none yet."""
    for kept in store.personalized_models():
        spec = spec_of(store, kept.package)
        if spec is not None and spec.task == kept.task and (chosen := _chosen(store, spec, kept)) is not None:
            return chosen
    spec = spec_of(store, store.task_digest)
    if spec is None:
        raise BadInput(f"this device has no model yet: {store.awaited or 'it has to take part in one round first'}")
    if not spec.training_rounds:
        raise BadInput(f"the fleet asks {spec.task}, which has no model: try again when it has its next task")
    # of a store of version 0.3.0, or of a head that could not be chosen
    kept = KeptModel(spec.task, store.global_digest or bytes(32))
    own = None if spec.model.chooses_head else _chosen(store, spec, kept)
    own = own or _chosen(store, spec, kept, as_shared=True)
    if own is None:
        raise no_model_of(spec)
    return own


def no_model_of(spec: TaskSpec) -> BadInput:
    return BadInput(f"this device has no model of the task {spec.task} yet: it has to take part in one round first")


def blobs_of_models(store: DeviceStore) -> set[bytes]:
    """Returns the digests of what the kept models need, and of the packages of all of them."""
    needed = {kept.package for kept in store.personalized_models() if kept.package is not None}
    try:
        own = chosen_model(store)
    except BadInput:
        return needed
    model = own.spec.model
    needed |= {model.inference.digest, *(() if model.features is None else (model.features.graph.digest,))}
    if own.kind == "global":
        needed |= {kept.global_digest for kept in store.personalized_models() if kept.task == own.spec.task}
    return needed


def tidy(store: DeviceStore, plan: RoundPlan, task: TaskRuntime, *, membership_lists: set[bytes]) -> None:
    """Notes the model that a round has left, and deletes what is no longer needed.

    It never fails a committed round: the next round meets the full disk.

    :param membership_lists: digests of those that stay.
    """
    try:
        if task.spec.training_rounds or store.task_digest is None:  # a question keeps the present model
            store.set_current(task_digest=task.digest, global_digest=plan.global_digest)
            if not task.spec.model.chooses_head:
                _keep_model(store, plan, task)
            store.drop_blobs(keep=task.blobs() | blobs_of_models(store) | membership_lists | {plan.global_digest})
    except HushfleetError as error:
        _log.error("%s", error)


def _keep_model(store: DeviceStore, plan: RoundPlan, task: TaskRuntime) -> None:
    """Stores that the device now predicts with this task's model: its own, or a shared one that is trained."""
    if _is_shared_whole(task.spec):
        round = plan.last_closed
        if not (round or task.spec.continues):
            return
    elif plan.phase in IN_PROGRESS:
        round = plan.round
    else:
        return
    store.keep_model(KeptModel(plan.task, plan.global_digest, package=task.digest, round=round))
    store.note_awaited("")


def spec_of(store: DeviceStore, package: bytes | None) -> TaskSpec | None:
    """Returns a task whose package the store has; None without it."""
    data = None if package is None else store.blob(package)
    return None if data is None else TaskSpec.from_bytes(data)


def _chosen(store: DeviceStore, spec: TaskSpec, kept: KeptModel, *, as_shared: bool = False) -> Chosen | None:
    """Returns a kept model; None if the store lacks a part of it."""
    if kept.choice is not None:
        return Chosen(spec, kept, "head")
    if as_shared or _is_shared_whole(spec):
        data = kept.shared or store.blob(kept.global_digest) or b""
        return Chosen(spec, kept, "global") if len(data) >= 4 * spec.model.layout.size else None
    state = store.stored_state(spec.task)
    return None if state is None or state.own is None else Chosen(spec, kept, "own")


def _is_shared_whole(spec: TaskSpec) -> bool:
    from hushfleet.methods import is_shared_whole  # half a megabyte, which a board with a chosen head does without

    return is_shared_whole(spec)
