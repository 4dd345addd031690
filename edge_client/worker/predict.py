"""Predicts for one image, with the device's personalized model: class probabilities, or the numbers that the task
predicts."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hushfleet.data.images import read_image
from hushfleet.data.samples import Samples, inputs_of
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.edge_client.worker.personalized_model import no_model_of, personalized_model
from hushfleet.errors import BadInput
from hushfleet.learning.graph_features import FeatureGraph, check_features
from hushfleet.learning.graph_safety import check_graph
from hushfleet.learning.graph_session import InferenceGraph
from hushfleet.learning.graph_shapes import check_cost
from hushfleet.wire.format.spec import MAX_GRAPH_BYTES, ModelSpec, TaskSpec

LoadedGraphs = tuple[InferenceGraph, FeatureGraph | None]


class Prediction(NamedTuple):
    """The prediction of a model for an image.

    :param task: the task of the model.
    :param model: `personalised` or `global`, or the personalized head that was chosen, in words.
    :param classes: (name, probability), the likeliest first; (output, number) if the task predicts numbers.
    :param are_numbers: whether the task predicts numbers.
    """

    task: str
    model: str
    classes: tuple[tuple[str, float], ...]
    are_numbers: bool = False

    def to_json(self, top: int) -> dict[str, Any]:
        return {"task": self.task, "model": self.model, "classes": dict(self._top(top))}

    def words(self, top: int) -> list[str]:
        """Returns a line for each of the likeliest classes, or for each number."""
        numbers = self.are_numbers
        shown = (f"{value:10.5g}" if numbers else f"{100 * value:5.1f} %" for _, value in self._top(top))
        return [f"  {each}  {name}" for each, (name, _) in zip(shown, self._top(top), strict=True)]

    def _top(self, top: int) -> tuple[tuple[str, float], ...]:
        return self.classes if self.are_numbers else self.classes[: max(1, top)]


def predict(store: DeviceStore, image: Path, loaded: dict[bytes, LoadedGraphs] | None = None) -> Prediction:
    """Predicts for one image. Raises `BadInput` if there is no model yet, or the image cannot be read.

    :param loaded: keeps the graphs of the task from one call to the next; the key is the digest of the task.
    """
    own = personalized_model(store)
    spec, kind, params = own.spec, own.kind, own.params
    loaded = {} if loaded is None else loaded
    if (key := spec.digest) not in loaded:
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
        raise no_model_of(spec)
    check_cost(check_graph(graph, max_bytes=MAX_GRAPH_BYTES), batch=1)
    if model.features is None:
        return InferenceGraph(graph, model.layout), None
    made = store.blob(model.features.graph.digest)
    if made is None:
        raise BadInput(f"this device lacks features of the task {spec.task}: it has to take part in one round first")
    check_features(made, model.features)
    features = FeatureGraph(lambda: made, model.features, input_shape=model.input_shape)
    return InferenceGraph(graph, model.layout), features


def _read(image: Path, model: ModelSpec) -> Samples:
    """Reads one image, decoded and normalised in the same way as the device's training images."""
    pixels = read_image(image, input_shape=model.image_shape, bit_depth=model.form.bit_depth or 8)
    blank = model.targets.blank(1, len(model.class_names))
    return Samples(pixels[None], blank, model.mean, model.std, model.targets)
