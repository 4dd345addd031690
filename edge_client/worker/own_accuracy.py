"""Measures the personalized model on samples that this board has held out, and compares it with the fleet's and a local
one."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from hushfleet.edge_client.board.config import OwnDataSection
from hushfleet.edge_client.board.local_data import LocalData
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.edge_client.worker.personalized_model import PersonalizedModel, personalized_model
from hushfleet.edge_client.worker.predict import graphs_of
from hushfleet.edge_client.worker.unusual import Judge
from hushfleet.errors import BadInput, GraphRefused
from hushfleet.learning.evaluation import evaluate_each


class OwnAccuracy(NamedTuple):
    """The accuracy of the personalized model on images of this device that it was not trained on; private like the
    images.

    :param right: how many of `images` it got right; None if nothing is held out.
    :param which: the kind of the images, in words.
    :param fleet_right: how many of the same images the fleet's model gets right, unchanged; `alone_right`: the same for
        a model that was trained on this board alone. None if this is unknown.
    :param why: the reason why nothing could be measured although samples are held out.
    :param round: the last closed round in the model; 0 if there is none, or if it is unknown.
    """

    task: str
    model: str
    right: int | None = None
    images: int | None = None
    which: str = ""
    fleet_right: int | None = None
    alone_right: int | None = None
    why: str = ""
    round: int = 0


def own_accuracy(store: DeviceStore, data: OwnDataSection) -> OwnAccuracy | None:
    """Measures on `data.held_out`; without it, returns for a personalized head the cross-validation that chose it.
    Returns None without a model.
    """
    try:
        own = personalized_model(store)
    except BadInput:
        return None
    try:
        found = _measured(store, own, data)
    except (BadInput, GraphRefused, OSError) as error:  # a disk may have been removed
        found = OwnAccuracy(own.spec.task, own.kind, why=str(error))
    return found._replace(round=own.round)


def _measured(store: DeviceStore, own: PersonalizedModel, data: OwnDataSection) -> OwnAccuracy:
    spec, kind, params = own.spec, own.kind, own.params
    if data.held_out is not None and spec.model.targets.are_inputs:
        return OwnAccuracy(spec.task, kind, *Judge(own, data, graphs_of(store, spec, stay=True)).alarms_right())
    if data.held_out is not None:
        graph, features = graphs_of(store, spec)
        held_out, by_record = replace(data, path=data.held_out), spec.privacy.unit == "record"
        samples = LocalData(held_out, spec.model, features=features, one_a_clip=by_record).samples()
        logits_of, inputs = own.answers(graph, samples)
        right = int(evaluate_each(logits_of, params, inputs).correct.sum())
        fleet_right = None if own.shared is None else int(evaluate_each(graph, own.shared, samples).correct.sum())
        return OwnAccuracy(spec.task, kind, right, len(samples), "held-out samples", fleet_right)
    head = store.personalized_head(spec.task) if own.is_head else None
    choice = None if head is None else head.choice
    if choice is None or not choice.images:
        return OwnAccuracy(spec.task, kind)
    fleet, alone = choice.right_shared, choice.right_alone
    return OwnAccuracy(spec.task, kind, choice.right, choice.images, "own samples, cross-validated", fleet, alone)
