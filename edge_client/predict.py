"""Class probabilities of one image by the device's own model.

The personalised model of the current task if this device has trained, else the last global model. Of a linear model,
the head that the device has chosen by its own images (`hushfleet.model.own_head`).
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from hushfleet.config.spec import MAX_GRAPH_BYTES, ModelSpec, TaskSpec
from hushfleet.data.folder import read_image
from hushfleet.data.samples import Samples
from hushfleet.edge_client.board.local_data import inputs_of
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.errors import BadInput
from hushfleet.graphs.features import FeatureGraph, check_features
from hushfleet.graphs.safety import check_graph
from hushfleet.graphs.session import InferenceGraph
from hushfleet.graphs.shapes import check_cost
from hushfleet.model.own_head import is_linear


class Prediction(NamedTuple):
    """What a model sees in an image.

    :param task: whose model it is.
    :param model: `personalised` or `global`, or the own head that was chosen, in words.
    :param classes: (name, probability), the likeliest first.
    """

    task: str
    model: str
    classes: tuple[tuple[str, float], ...]


def predict(store: DeviceStore, image: Path) -> Prediction:
    """Raises `BadInput` where there is no model yet, or the image cannot be read."""
    package = store.blob(store.task_digest) if store.task_digest else None
    if package is None:
        raise BadInput("this device has no model yet: it has to take part in one round first")
    spec = TaskSpec.from_bytes(package)
    graph = store.blob(spec.model.inference.digest)
    params, kind = _params(store, spec)
    if graph is None or params is None:
        raise BadInput(f"this device has no model of the task {spec.task} yet: it has to take part in one round first")
    check_cost(check_graph(graph, max_bytes=MAX_GRAPH_BYTES), batch=1)
    model = spec.model
    features = None
    if model.features is not None:
        made = store.blob(model.features.graph.digest)
        if made is None:
            raise BadInput(
                f"this device lacks features of the task {spec.task}: it has to take part in one round first"
            )
        check_features(made, model.features)
        features = FeatureGraph(lambda: made, model.features)
    x = inputs_of(_read(image, model), features).x
    logits = InferenceGraph(graph, model.layout)(params, x)[0].astype(np.float64)
    odds = np.exp(logits - logits.max())
    probabilities = odds / odds.sum()
    order = np.argsort(-probabilities, kind="stable")
    ranked = tuple((model.class_names[i], float(probabilities[i])) for i in order)
    return Prediction(spec.task, kind, ranked)


def _params(store: DeviceStore, spec: TaskSpec) -> tuple[np.ndarray | None, str]:
    """The flat vector, and how it is called."""
    head, own = store.own_head(spec.task), store.own_params(spec.task)
    if own is not None and (head is not None or not is_linear(spec.model.layout)):
        return own, "personalised" if head is None else head.choice.words
    data = store.blob(store.global_digest) if store.global_digest else None
    return (None if data is None else np.frombuffer(data, "<f4").astype(np.float32)), "global"


def _read(image: Path, model: ModelSpec) -> Samples:
    """The one image, decoded and normalised as the device's training images are."""
    pixels = read_image(image, input_shape=model.image_shape)
    return Samples(pixels[None], np.zeros(1, np.int64), model.mean, model.std)
