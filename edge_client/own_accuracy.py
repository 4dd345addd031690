"""How right the own model is on samples that this board has held out, beside the fleet's and one trained alone."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from hushfleet.edge_client.board.config import OwnDataSection
from hushfleet.edge_client.board.local_data import LocalData
from hushfleet.edge_client.predict import OwnModel, global_params, graphs_of, own_model
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.edge_client.unusual import alarms_right
from hushfleet.errors import BadInput, GraphRefused
from hushfleet.model.evaluation import evaluate_each


class OwnAccuracy(NamedTuple):
    """How right the own model is on images of this device that it was not trained on; private, as they are.

    :param right: how many of `images` it got right; None where nothing is held out.
    :param which: what the images are, in words.
    :param fleet_right: of the same images, how many the fleet's model gets right as it is; `alone_right`: a model that
        was trained on this board alone. None where that is not known.
    :param why: why nothing could be measured, though samples are held out.
    """

    task: str
    model: str
    right: int | None = None
    images: int | None = None
    which: str = ""
    fleet_right: int | None = None
    alone_right: int | None = None
    why: str = ""


def own_accuracy(store: DeviceStore, data: OwnDataSection) -> OwnAccuracy | None:
    """Measures by `data.held_out`; or else takes, for an own head, the cross-validation that chose it. None without a
    model.
    """
    try:
        own = own_model(store)
    except BadInput:
        return None
    try:
        return _measured(store, own, data)
    except (BadInput, GraphRefused, OSError) as error:  # a disk may have been taken out
        return OwnAccuracy(own.spec.task, own.kind, why=str(error))


def _measured(store: DeviceStore, own: OwnModel, data: OwnDataSection) -> OwnAccuracy:
    spec, kind, params, _ = own
    if data.held_out is not None and spec.model.targets.are_inputs:
        return OwnAccuracy(spec.task, kind, *alarms_right(store, own, data))
    if data.held_out is not None:
        graph, features = graphs_of(store, spec)
        samples = LocalData(replace(data, path=data.held_out), spec.model, features=features).samples()
        logits_of, inputs = own.answers(graph, samples)
        right = int(evaluate_each(logits_of, params, inputs).correct.sum())
        shared = params if kind == "global" else global_params(store, spec.model.layout.size)
        fleet_right = None if shared is None else int(evaluate_each(graph, shared, samples).correct.sum())
        return OwnAccuracy(spec.task, kind, right, len(samples), "held-out images", fleet_right)
    head = store.own_head(spec.task)
    if head is None or not head.choice.images:
        return OwnAccuracy(spec.task, kind)
    choice = head.choice
    fleet, alone = choice.right_shared, choice.right_alone
    return OwnAccuracy(spec.task, kind, choice.right, choice.images, "own images, cross-validated", fleet, alone)
