"""Keeps the device's personalized head up to date if the model is one linear layer: after each closed round, and at the
end.

It costs no privacy, because nothing of it leaves the device. It runs when nothing waits to be sent; the device fetches
the model of each closed round for it, even if it was not in the round. A model that does not arrive leaves the earlier
head. A device that hides its training time waits for the task's end. Images without labels are read only for the head
of the final model, so that they delay no round. A device with an autoencoder predicts with the shared model, and
fetches the final one, too. In a simulation the simulator does all this.

A worker chooses (`worker.head`). Before the first closed round of a new task the earlier head stays, unless there are
other classes. It also stays until the task's end if the two shared heads take different features.
"""

from __future__ import annotations

import logging
import time

from hushfleet.edge_client.download import MOST_ASKS, GlobalModel
from hushfleet.edge_client.optional import drift
from hushfleet.edge_client.storage.kept import KeptModel
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.edge_client.worker.job import Finished, HeadChosen, HeadJob
from hushfleet.edge_client.worker.personalized_model import spec_of
from hushfleet.edge_client.worker.runtime import TaskRuntime
from hushfleet.errors import HushfleetError, Malformed
from hushfleet.learning.head_choice import takes_unlabelled
from hushfleet.schema import pack, unpack
from hushfleet.wire.format.messages import RoundPlan
from hushfleet.wire.format.spec import TaskSpec

_log = logging.getLogger("hushfleet.edge")


class PersonalizedHeads:
    """Asks for a head with each global model that the fleet makes, once.

    :param unlabelled: whether the owner has named images without labels.
    """

    def __init__(self, store: DeviceStore, model: GlobalModel, *, unlabelled: bool) -> None:
        self._store, self._model, self._unlabelled = store, model, unlabelled
        self._done: tuple[str, bytes, bool] | None = None
        """Task, digest of the model that was last used (also without success), and whether it is the final one."""

    def look(self, plan: RoundPlan, task: TaskRuntime) -> tuple[HeadJob, bytes] | bool:
        """Returns the choice that a newer model asks for, with the model; or whether the task is in use now without it.

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
            if plan.global_bytes != 4 * task.party.method.published_size:
                raise Malformed(f"its model has {plan.global_bytes} bytes, which is not the task's size")
            data = b""
            if plan.last_closed or spec.continues is not None:
                found = self._model.need(plan, spec, most_asks=MOST_ASKS)
                if found is None:
                    return False  # it is being fetched
                data = found
            self._done = wanted
            job = self._job(plan, task) if spec.model.chooses_head else None
            if job is None:
                self._store.note_awaited("")
                return True
            return job, data
        except Exception as error:  # the rounds continue without it, and an older head stays
            self._done = wanted
            self.failed(plan, str(error))
            return False

    def keep(self, plan: RoundPlan, task: TaskRuntime, chosen: HeadChosen | Finished) -> bool:
        """Stores a chosen head, and its accuracy on samples that never train, if the task holds some out.

        Returns False if it is a head of another task or model, or no head, or if the disk is full.
        """
        try:
            if not isinstance(chosen, HeadChosen):
                raise Malformed("the worker has trained a round where a head was wanted")
            kept = unpack(KeptModel, chosen.kept, what="the personalized head")
            about = kept.task, kept.global_digest, kept.package, kept.round
            if about != (plan.task, plan.global_digest, task.digest, plan.last_closed) or kept.choice is None:
                raise Malformed("a worker has chosen a head for another model")
            self._store.keep_model(kept)
            if chosen.held_out:
                month, classes = time.strftime("%Y-%m", time.gmtime()), drift.classes_key(task.spec.model.class_names)
                test = drift.HeldOutTest(month, chosen.right, chosen.held_out, classes)
                drift.note_test(self._store.path.parent, test)
            self._store.note_awaited("")
        except HushfleetError as error:
            self.failed(plan, str(error))
            return False
        _log.info("round %d: this board now predicts with %s", plan.round, kept.choice.plain)
        return True

    def again(self) -> None:
        """Forgets that a choice has begun: it was given up for a round."""
        self._done = None

    @staticmethod
    def failed(plan: RoundPlan, why: str) -> None:
        """Notes that no head was chosen; an older one stays."""
        _log.warning("choosing a personalized head with the model of round %d failed: %s", plan.round, why)

    def _job(self, plan: RoundPlan, task: TaskRuntime) -> HeadJob | None:
        """Returns the choice, or None if the kept head is this one."""
        spec, kept = task.spec, self._store.personalized_head(plan.task)
        last = plan.phase == "finished" and takes_unlabelled(spec.signal, len(spec.model.class_names))
        unlabelled = last and self._unlabelled
        done = 0 if kept is None or kept.choice is None else kept.choice.unlabelled
        if kept is not None and kept.global_digest == plan.global_digest and (done or not unlabelled):
            return None
        earlier = self._earlier(plan.task) if spec.continues is None else None
        if earlier is None or not earlier[0].shared or not _same_features(spec, earlier[1]):
            return HeadJob(plan.last_closed, None, unlabelled)
        package = self._store.blob(earlier[0].package or b"")
        return HeadJob(plan.last_closed, None if package is None else (pack(earlier[0]), package), unlabelled)

    def _waits(self, plan: RoundPlan, task: TaskRuntime) -> str | None:
        """Returns why no head is chosen with the plan's model, in words; None if one is."""
        spec, finished = task.spec, plan.phase == "finished"
        if not spec.model.chooses_head:
            if finished and spec.model.targets.are_inputs:
                return None
            has_own = any(kept.task == plan.task for kept in self._store.personalized_models())
            return "" if has_own else f"this board has not trained in the task {plan.task} yet"
        if not finished and task.constant_time:
            return f"this board hides its training time, and chooses a head of the task {plan.task} when it has ended"
        earlier = self._earlier(plan.task)
        if earlier is None or finished or not _same_classes(spec, earlier[1]):
            return None
        if not plan.last_closed:
            return f"the task {plan.task} has no closed round yet"
        if spec.continues is None and not _same_features(spec, earlier[1]):
            return f"the task {plan.task} has other features and no start, and its head is chosen when it has ended"
        return None

    def _earlier(self, task: str) -> tuple[KeptModel, TaskSpec] | None:
        """Returns the newest head of another task, and that task."""
        for kept in self._store.personalized_models():
            spec = spec_of(self._store, kept.package)
            if kept.task != task and kept.choice is not None and spec is not None:
                return kept, spec
        return None


def _same_classes(spec: TaskSpec, other: TaskSpec) -> bool:
    return sorted(spec.model.class_names) == sorted(other.model.class_names)


def _same_features(spec: TaskSpec, other: TaskSpec) -> bool:
    mine, others = (
        (each.model.features, each.model.input_shape, each.model.mean, each.model.std) for each in (spec, other)
    )
    return mine == others
