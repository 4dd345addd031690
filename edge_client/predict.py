"""Class probabilities of one image, or the numbers that the task predicts, by the device's own model.

The personalised model of the current task if this device has trained, else the last global model. Of a linear model,
the head that the device has chosen by its own images (`hushfleet.model.own_head`).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hushfleet.config.spec import MAX_GRAPH_BYTES, ModelSpec, TaskSpec
from hushfleet.data.images import read_image
from hushfleet.data.samples import LabelledSamples, Samples
from hushfleet.edge_client.board.config import OwnDataSection
from hushfleet.edge_client.board.local_data import LocalData, inputs_of
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.errors import BadInput
from hushfleet.graphs.features import FeatureGraph, check_features
from hushfleet.graphs.safety import check_graph
from hushfleet.graphs.session import InferenceGraph
from hushfleet.graphs.shapes import check_cost
from hushfleet.model.evaluation import LogitsOf, evaluate_each
from hushfleet.model.own_head import inputs_of_own, own_logits


class Prediction(NamedTuple):
    """The prediction of a model for an image.

    :param task: whose model it is.
    :param model: `personalised` or `global`, or the own head that was chosen, in words.
    :param classes: (name, probability), the likeliest first; of a task that predicts numbers (output, number).
    :param are_numbers: whether it does.
    """

    task: str
    model: str
    classes: tuple[tuple[str, float], ...]
    are_numbers: bool = False


class OwnModel(NamedTuple):
    """The model that this device predicts with.

    :param kind: `personalised` or `global`, or the own head that was chosen, in words.
    :param params: float32 `[d]`.
    :param is_head: whether it is an own head, which takes all features and no graph of the task.
    """

    spec: TaskSpec
    kind: str
    params: np.ndarray
    is_head: bool

    def answers(self, graph: LogitsOf, samples: LabelledSamples) -> tuple[LogitsOf, LabelledSamples]:
        """Gives the function that computes its logits, and its inputs."""
        return (own_logits, inputs_of_own(samples)) if self.is_head else (graph, samples)


def own_model(store: DeviceStore) -> OwnModel:
    """Raises `BadInput` where there is none yet."""
    package = store.blob(store.task_digest) if store.task_digest else None
    if package is None:
        raise BadInput("this device has no model yet: it has to take part in one round first")
    spec = TaskSpec.from_bytes(package)
    if not spec.training_rounds:
        raise BadInput(f"the fleet asks {spec.task}, which has no model: try again when it has its next task")
    params, kind = _params(store, spec)
    if params is None:
        raise _no_model_of(spec)
    return OwnModel(spec, kind, params, kind not in ("personalised", "global"))


def predict(store: DeviceStore, image: Path) -> Prediction:
    """Raises `BadInput` where there is no model yet, or the image cannot be read."""
    own = own_model(store)
    spec, kind, params, _ = own
    graph, features = _graphs(store, spec)
    model = spec.model
    logits_of, samples = own.answers(graph, inputs_of(_read(image, model), features))
    [predicted] = model.targets.predicted(logits_of(params, samples.x))
    are_numbers = model.targets.are_numbers
    order = range(len(predicted)) if are_numbers else np.argsort(-predicted, kind="stable")
    return Prediction(spec.task, kind, tuple((model.class_names[i], float(predicted[i])) for i in order), are_numbers)


class OwnAccuracy(NamedTuple):
    """How right the own model is on images of this device that it was not trained on; private, as they are.

    :param right: how many of `images` it got right; None where nothing is held out.
    :param which: what the images are, in words.
    :param fleet_right: of the same images, how many the fleet's model gets right as it is; `alone_right`: a model that
        was trained on this board alone. None where that is not known.
    """

    task: str
    model: str
    right: int | None = None
    images: int | None = None
    which: str = ""
    fleet_right: int | None = None
    alone_right: int | None = None


def own_accuracy(store: DeviceStore, data: OwnDataSection) -> OwnAccuracy | None:
    """Measures by `data.held_out`; or else takes, for an own head, the cross-validation that chose it. None without a
    model.

    Raises `BadInput` where the held-out images cannot be read.
    """
    try:
        own = own_model(store)
    except BadInput:
        return None
    spec, kind, params, _ = own
    if data.held_out is not None:
        graph, features = _graphs(store, spec)
        samples = LocalData(replace(data, path=data.held_out), spec.model, features=features).samples()
        logits_of, inputs = own.answers(graph, samples)
        right = int(evaluate_each(logits_of, params, inputs).correct.sum())
        shared = params if kind == "global" else _global_params(store, spec.model.layout.size)
        fleet_right = None if shared is None else int(evaluate_each(graph, shared, samples).correct.sum())
        return OwnAccuracy(spec.task, kind, right, len(samples), "held-out images", fleet_right)
    head = store.own_head(spec.task)
    if head is None or not head.choice.images:
        return OwnAccuracy(spec.task, kind)
    choice = head.choice
    fleet, alone = choice.right_shared, choice.right_alone
    return OwnAccuracy(spec.task, kind, choice.right, choice.images, "own images, cross-validated", fleet, alone)


def _graphs(store: DeviceStore, spec: TaskSpec) -> tuple[InferenceGraph, FeatureGraph | None]:
    """Gives the graph of inference, and of its features, if any. Raises `BadInput` or `GraphRefused`."""
    model = spec.model
    graph = store.blob(model.inference.digest)
    if graph is None:
        raise _no_model_of(spec)
    check_cost(check_graph(graph, max_bytes=MAX_GRAPH_BYTES), batch=1)
    if model.features is None:
        return InferenceGraph(graph, model.layout), None
    made = store.blob(model.features.graph.digest)
    if made is None:
        raise BadInput(f"this device lacks features of the task {spec.task}: it has to take part in one round first")
    check_features(made, model.features)
    given = model.input_shape[0]
    return InferenceGraph(graph, model.layout), FeatureGraph(lambda: made, model.features, given=given)


def _no_model_of(spec: TaskSpec) -> BadInput:
    return BadInput(f"this device has no model of the task {spec.task} yet: it has to take part in one round first")


def _params(store: DeviceStore, spec: TaskSpec) -> tuple[np.ndarray | None, str]:
    """Gives the flat vector, and how it is called."""
    head, own = store.own_head(spec.task), store.own_params(spec.task)
    if own is not None and (head is not None or not spec.model.chooses_head):
        return own, "personalised" if head is None else head.choice.plain
    return _global_params(store, spec.model.layout.size), "global"


def _global_params(store: DeviceStore, size: int) -> np.ndarray | None:
    data = store.blob(store.global_digest) if store.global_digest else None
    return None if data is None else np.frombuffer(data, "<f4", count=size).astype(np.float32)


def _read(image: Path, model: ModelSpec) -> Samples:
    """Reads the one image, decoded and normalised as the device's training images are."""
    pixels = read_image(image, input_shape=model.image_shape)
    blank = model.targets.blank(1, len(model.class_names))
    return Samples(pixels[None], blank, model.mean, model.std, model.targets)
