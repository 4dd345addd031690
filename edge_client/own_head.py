"""Keeps the device's own head up to date if the model is one linear layer: after each closed round, and at the end.

It costs no privacy, because nothing of it leaves the device. It runs when nothing waits to be sent; the device fetches
the model of each closed round for it, even if it was not in the round. A model that does not arrive leaves the earlier
head. A device that hides its training time waits for the task's end. Images without labels are read only for the head
of the final model, so that they delay no round. A device with an autoencoder predicts with the shared model, and
fetches the final one, too. In a simulation the simulator does all this.

A new task must not make predictions worse. If it continues an earlier model, its heads begin with a model that is
trained. Otherwise they begin with the sum of its model and the shared head of the earlier task: a head grows in
proportion to its rounds, and so does the variance of its noise. Before the first closed round the earlier head stays,
unless there are other classes. It also stays until the task's end if the two shared heads take different features.
"""

from __future__ import annotations

import logging
import math
import time

import numpy as np

from hushfleet.config.spec import TaskSpec
from hushfleet.edge_client.board.drift import HeldOutTest, classes_key, note_test
from hushfleet.edge_client.net.download import MOST_ASKS, GlobalModel
from hushfleet.edge_client.own_model import spec_of
from hushfleet.edge_client.runtime import TaskRuntime
from hushfleet.edge_client.storage.kept import KeptModel
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.edge_client.tasks import MAX_ATTEMPTS
from hushfleet.errors import BadInput, Malformed
from hushfleet.model.carry_over import carry_over
from hushfleet.model.own_head import DeviceHead, inputs_of_own, own_head_of, own_logits, takes_unlabelled
from hushfleet.wire.format.messages import RoundPlan

_log = logging.getLogger("hushfleet.edge")


class OwnHeads:
    """Chooses a head for each global model that the fleet makes, once."""

    def __init__(self, store: DeviceStore, model: GlobalModel) -> None:
        self._store = store
        self._model = model
        self._done: tuple[str, bytes, bool] | None = None
        """Task, digest of the model that was last used (also without success), and whether it is the final one."""

    def advance(self, plan: RoundPlan, task: TaskRuntime) -> bool:
        """Chooses a head if there is a newer model; returns True if this task is in use now.

        :param plan: a settled plan of this task.
        """
        spec, finished = task.spec, plan.phase == "finished"
        wanted = plan.task, plan.global_digest, finished
        if self._done == wanted or not spec.training_rounds:
            return False
        try:
            if (words := self._waits(plan, task)) is not None:
                self._done = wanted
                self._store.note_awaited(words)
                return False
            if plan.global_bytes != 4 * task.trainer.method.published_size:
                raise Malformed(f"its model has {plan.global_bytes} bytes, which is not the task's size")
            size, data = spec.model.layout.size, b""
            if rounds_in(plan) or spec.continues is not None:
                found = self._model.need(plan, spec, most_asks=MOST_ASKS)
                if found is None:
                    return False  # it is being fetched
                data = found[: 4 * size]
            self._done = wanted
            if spec.model.chooses_head:
                self._choose(plan, task, data)
            self._store.note_awaited("")
            return True
        except Exception as error:  # the rounds continue without it, and an older head stays
            self._done = wanted
            _log.warning("choosing an own head with the model of round %d failed: %s", plan.round, error)
            return False

    def _waits(self, plan: RoundPlan, task: TaskRuntime) -> str | None:
        """Returns why no head is chosen with the plan's model, in words; None if one is."""
        spec, finished = task.spec, plan.phase == "finished"
        if not spec.model.chooses_head:
            if finished and spec.model.targets.are_inputs:
                return None
            has_own = any(kept.task == plan.task for kept in self._store.own_models())
            return "" if has_own else f"this board has not trained in the task {plan.task} yet"
        if not finished and task.constant_time:
            return f"this board hides its training time, and chooses a head of the task {plan.task} when it has ended"
        earlier = self._earlier(plan.task)
        if earlier is None or finished or not _same_classes(spec, earlier[1]):
            return None
        if not rounds_in(plan):
            return f"the task {plan.task} has no closed round yet"
        if spec.continues is None and not _same_features(spec, earlier[1]):
            return f"the task {plan.task} has other features and no start, and its head is chosen when it has ended"
        return None

    def _earlier(self, task: str) -> tuple[KeptModel, TaskSpec] | None:
        """Returns the newest head of another task, and that task."""
        for kept in self._store.own_models():
            spec = spec_of(self._store, kept.package)
            if kept.task != task and kept.choice is not None and spec is not None:
                return kept, spec
        return None

    def _choose(self, plan: RoundPlan, task: TaskRuntime, shared: bytes) -> None:
        model, signal = task.spec.model, task.spec.signal
        last = plan.phase == "finished" and takes_unlabelled(signal, len(model.class_names))
        unlabelled = task.data.unlabelled() if last else None
        kept = self._store.own_head(plan.task)
        done = 0 if kept is None or kept.choice is None else kept.choice.unlabelled
        if kept is not None and kept.global_digest == plan.global_digest and (done or not unlabelled):
            return
        params, signal = self._base(plan, task.spec, np.frombuffer(shared, "<f4"))
        if self._store.count_attempt("head", f"{plan.task}/{rounds_in(plan)}") > MAX_ATTEMPTS:
            raise BadInput(f"it has ended the client abruptly {MAX_ATTEMPTS} times")
        try:
            head = own_head_of(params, model.layout, task.data.samples(), signal, unlabelled)
        finally:
            self._store.end_attempt("head")
        of_plan = {"task": plan.task, "global_digest": plan.global_digest, "round": rounds_in(plan)}
        self._store.keep_model(KeptModel.of(head, package=task.digest, shared=shared, **of_plan))
        self._test(head, task)
        _log.info("round %d: this board now predicts with %s", plan.round, head.choice.plain)

    def _base(self, plan: RoundPlan, spec: TaskSpec, shared: np.ndarray) -> tuple[np.ndarray, float | None]:
        """Returns the shared head that the device's heads are pulled to, float32 `[d]`, and its signal.

        :param shared: the task's model; empty before its first closed round if it begins with zeros.
        """
        parts = [(shared, _share(spec, rounds_in(plan)), spec.signal)] if len(shared) else []
        if spec.continues is None and (found := self._earlier(plan.task)) is not None and found[0].shared:
            kept, earlier = found
            if _same_features(spec, earlier):
                parts.append((_carried(kept, earlier, spec), _share(earlier, kept.round), earlier.signal))
        if not parts:
            return np.zeros(spec.model.layout.size, np.float32), None
        heads, shares, signals = zip(*parts, strict=True)
        squares = [math.inf if r is None else share * r**2 for share, r in zip(shares, signals, strict=True)]
        signal = spec.signal if len(parts) == 1 else math.sqrt(sum(squares))
        return (np.sum(heads, 0) / sum(shares)).astype(np.float32), None if None in signals else signal

    def _test(self, head: DeviceHead, task: TaskRuntime) -> None:
        """Stores on the board the head's accuracy on samples that never train, if the task holds some out."""
        held = task.data.held_out() if task.spec.held_out else None
        if held is None or not len(held):
            return
        right = held.targets.right(own_logits(head.params, inputs_of_own(held).x).astype(np.float64), held.labels)
        month, classes = time.strftime("%Y-%m", time.gmtime()), classes_key(task.spec.model.class_names)
        note_test(self._store.path.parent, HeldOutTest(month, int(right.sum()), len(held), classes))


def rounds_in(plan: RoundPlan) -> int:
    """Returns the number of the last closed round in a plan's global model."""
    return plan.round if plan.phase in ("closed", "finished") else plan.round - 1


def _share(spec: TaskSpec, closed: int) -> float:
    """Returns the share of a task's rounds that are closed; 1 if it continues a trained model."""
    return 1.0 if spec.continues is not None else min(1.0, max(1, closed) / spec.rounds)


def _same_classes(spec: TaskSpec, other: TaskSpec) -> bool:
    return sorted(spec.model.class_names) == sorted(other.model.class_names)


def _same_features(spec: TaskSpec, other: TaskSpec) -> bool:
    mine, others = (
        (each.model.features, each.model.input_shape, each.model.mean, each.model.std) for each in (spec, other)
    )
    return mine == others


def _carried(kept: KeptModel, earlier: TaskSpec, spec: TaskSpec) -> np.ndarray:
    """Returns the shared head of an earlier task for the classes of `spec`, which has the same features."""
    names, to_names = earlier.model.class_names, spec.model.class_names
    shared = np.frombuffer(kept.shared, "<f4").astype(np.float32)
    return carry_over(shared, names, layout=spec.model.layout, to_names=to_names, softmax=True)
