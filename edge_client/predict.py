"""Predicts for one image, with the device's own model: class probabilities, or the numbers that the task predicts.

It is the personalised model of the current task if this device has trained, otherwise the last global model. For a
linear model it is the head that the device has chosen on its own images (`hushfleet.model.own_head`); for an
autoencoder that is shared as a whole, it is the global model.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from hushfleet.config.spec import MAX_GRAPH_BYTES, BlobRef, ModelSpec, TaskSpec
from hushfleet.data.images import read_image
from hushfleet.data.samples import LabelledSamples, Samples
from hushfleet.edge_client.board.local_data import inputs_of
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.errors import BadInput
from hushfleet.graphs.features import FeatureGraph, check_features
from hushfleet.graphs.safety import check_graph
from hushfleet.graphs.session import InferenceGraph
from hushfleet.graphs.shapes import check_cost
from hushfleet.methods import method_of
from hushfleet.methods.personal import Personal
from hushfleet.model.evaluation import LogitsOf
from hushfleet.model.own_head import inputs_of_own, own_logits

LoadedGraphs = tuple[InferenceGraph, FeatureGraph | None]


class Prediction(NamedTuple):
    """The prediction of a model for an image.

    :param task: the task of the model.
    :param model: `personalised` or `global`, or the own head that was chosen, in words.
    :param classes: (name, probability), the likeliest first; (output, number) if the task predicts numbers.
    :param are_numbers: whether the task predicts numbers.
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
        """Returns the function that computes its logits, and its inputs."""
        return (own_logits, inputs_of_own(samples)) if self.is_head else (graph, samples)


def own_model(store: DeviceStore) -> OwnModel:
    """Returns the model that this device predicts with. Raises `BadInput` if there is none yet."""
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


def predict(store: DeviceStore, image: Path, loaded: dict[bytes, LoadedGraphs] | None = None) -> Prediction:
    """Predicts for one image. Raises `BadInput` if there is no model yet, or the image cannot be read.

    :param loaded: keeps the graphs of the task from one call to the next; the key is the digest of the task.
    """
    own = own_model(store)
    spec, kind, params, _ = own
    loaded = {} if loaded is None else loaded
    if (key := BlobRef.of(spec.to_bytes()).digest) not in loaded:
        loaded.clear()
        loaded[key] = graphs_of(store, spec)
    (graph, features), model = loaded[key], spec.model
    logits_of, samples = own.answers(graph, inputs_of(_read(image, model), features))
    [predicted] = model.targets.predicted(logits_of(params, samples.x))
    are_numbers = model.targets.are_numbers
    order = range(len(predicted)) if are_numbers else np.argsort(-predicted, kind="stable")
    return Prediction(spec.task, kind, tuple((model.class_names[i], float(predicted[i])) for i in order), are_numbers)


def graphs_of(store: DeviceStore, spec: TaskSpec) -> LoadedGraphs:
    """Returns the inference graph and the feature graph, if any. Raises `BadInput` or `GraphRefused`."""
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
    """Returns the flat vector, and its kind in words."""
    head, own, shared = store.own_head(spec.task), store.own_params(spec.task), None
    if spec.model.targets.are_inputs and type(method_of(spec).parts.personal) is Personal:
        # A model that was last trained on few own samples judges everything that they do not contain as unusual.
        shared = global_params(store, spec.model.layout.size)
    if shared is None and own is not None and (head is not None or not spec.model.chooses_head):
        return own, "personalised" if head is None else head.choice.plain
    return global_params(store, spec.model.layout.size) if shared is None else shared, "global"


def global_params(store: DeviceStore, size: int) -> np.ndarray | None:
    """Returns the last global model that this device has, float32 `[size]`; None without one."""
    data = store.blob(store.global_digest) if store.global_digest else None
    return None if data is None else np.frombuffer(data, "<f4", count=size).astype(np.float32)


def _read(image: Path, model: ModelSpec) -> Samples:
    """Reads one image, decoded and normalised in the same way as the device's training images."""
    pixels = read_image(image, input_shape=model.image_shape)
    blank = model.targets.blank(1, len(model.class_names))
    return Samples(pixels[None], blank, model.mean, model.std, model.targets)
