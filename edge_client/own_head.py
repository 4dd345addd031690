"""Keeps the device's own head up to date if the model is one linear layer: after each round, and at the end.

It costs no privacy, because nothing of it leaves the device. It runs when nothing waits to be sent; a device that hides
its training time waits for the task's end. After the last round the device fetches the final global model for it, even
if it was in no round; if that model does not arrive, the head of an earlier model stays. Images without labels are read
only for the head of the final model, so that they delay no round. A device with an autoencoder predicts with the shared
model, and fetches the final one, too. In a simulation the simulator does all this.
"""

from __future__ import annotations

import logging
import time

import numpy as np

from hushfleet.edge_client.board.drift import HeldOutTest, classes_key, note_test
from hushfleet.edge_client.net.download import MOST_ASKS, GlobalModel
from hushfleet.edge_client.runtime import TaskRuntime
from hushfleet.edge_client.storage.kept import KeptHead
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.errors import Malformed
from hushfleet.model.own_head import DeviceHead, inputs_of_own, own_head_of, own_logits, takes_unlabelled
from hushfleet.wire.format.messages import RoundPlan

_log = logging.getLogger("hushfleet.edge")


class OwnHeads:
    """Chooses a head for each global model that the device has, once."""

    def __init__(self, store: DeviceStore, model: GlobalModel) -> None:
        self._store = store
        self._model = model
        self._done: tuple[str, bytes, bool] | None = None
        """Task, digest of the model that was last used (also without success), and whether it is the final one."""

    def advance(self, plan: RoundPlan, task: TaskRuntime) -> bool:
        """Chooses a head if there is a newer model; returns True if the final model was stored for it.

        :param plan: a settled plan of this task.
        """
        finished = plan.phase == "finished"
        wanted = plan.task, plan.global_digest, finished
        model = task.spec.model
        if self._done == wanted or not (model.chooses_head or (model.targets.are_inputs and finished)):
            return False
        if not finished and task.constant_time:
            return False
        if not task.spec.training_rounds:
            return False
        try:
            if plan.global_bytes != 4 * task.trainer.method.published_size:
                raise Malformed(f"its model has {plan.global_bytes} bytes, which is not the task's size")
            if finished:
                data = self._model.need(plan, task.spec, most_asks=MOST_ASKS)
                if data is None:
                    return False  # it is being fetched
            else:
                data = self._store.blob(plan.global_digest)
            self._done = wanted
            if data is not None and model.chooses_head:
                self._choose(plan, task, np.frombuffer(data, "<f4", count=model.layout.size))
            return finished
        except Exception as error:  # the rounds continue without it, and an older head stays
            self._done = wanted
            _log.warning("choosing an own head with the model of round %d failed: %s", plan.round, error)
            return False

    def _choose(self, plan: RoundPlan, task: TaskRuntime, params: np.ndarray) -> None:
        model, signal = task.spec.model, task.spec.signal
        last = plan.phase == "finished" and takes_unlabelled(signal, len(model.class_names))
        unlabelled = task.data.unlabelled() if last else None
        kept = self._store.own_head(plan.task)
        done = 0 if kept is None else kept.choice.unlabelled
        if kept is not None and kept.global_digest == plan.global_digest and (done or not unlabelled):
            return
        head = own_head_of(params, model.layout, task.data.samples(), signal, unlabelled)
        self._store.keep_own_head(KeptHead.of(head, task=plan.task, global_digest=plan.global_digest))
        self._test(head, task)
        _log.info("round %d: this board now predicts with %s", plan.round, head.choice.plain)

    def _test(self, head: DeviceHead, task: TaskRuntime) -> None:
        """Stores on the board the head's accuracy on samples that never train, if the task holds some out."""
        held = task.data.held_out() if task.spec.held_out else None
        if held is None or not len(held):
            return
        right = held.targets.right(own_logits(head.params, inputs_of_own(held).x).astype(np.float64), held.labels)
        month, classes = time.strftime("%Y-%m", time.gmtime()), classes_key(task.spec.model.class_names)
        note_test(self._store.path.parent, HeldOutTest(month, int(right.sum()), len(held), classes))
