"""Predicts for one image or clip of sound, with the device's personalized model: class probabilities, or the numbers
that the task predicts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hushfleet.at_need import at_need
from hushfleet.data.images import read_image
from hushfleet.data.samples import Samples, inputs_of
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.edge_client.worker.personalized_model import PersonalizedModel, no_model_of, personalized_model
from hushfleet.errors import BadInput
from hushfleet.learning.evaluation import LogitsOf
from hushfleet.learning.graph_features import FeatureGraph, check_features
from hushfleet.learning.graph_safety import check_graph
from hushfleet.learning.graph_session import InferenceGraph
from hushfleet.learning.graph_shapes import check_cost
from hushfleet.learning.personalized_head import own_logits
from hushfleet.wire.format.spec import MAX_GRAPH_BYTES, ModelSpec, TaskSpec

if TYPE_CHECKING:
    from hushfleet.data import sound
else:
    sound = at_need("hushfleet.data.sound")

LoadedGraphs = tuple[LogitsOf, FeatureGraph | None]


class Prediction(NamedTuple):
    """The prediction of a model for an image, or for a clip of sound: the mean over its segments.

    :param task: the task of the model.
    :param model: `personalised` or `global`, or the personalized head that was chosen, in words.
    :param classes: (name, probability), the likeliest first; (output, number) if the task predicts numbers.
    :param are_numbers: whether the task predicts numbers.
    :param segments: of a clip, the second at which each segment begins, and its `classes`.
    """

    task: str
    model: str
    classes: tuple[tuple[str, float], ...]
    are_numbers: bool = False
    segments: tuple[tuple[float, tuple[tuple[str, float], ...]], ...] = ()

    def to_json(self, top: int) -> dict[str, Any]:
        whole = {"task": self.task, "model": self.model, "classes": dict(self._top(self.classes, top))}
        parts = [{"from_s": at, "classes": dict(self._top(classes, top))} for at, classes in self.segments]
        return whole | ({"segments": parts} if parts else {})

    def words(self, top: int) -> list[str]:
        """Returns a line for each of the likeliest classes, or for each number; before them one for each segment."""
        lines = list[str]()
        for at, each in self.segments:
            likeliest = (f"{self._value(value).strip()} {name}" for name, value in self._top(each, top))
            lines.append(f"  {at:8.2f} s  {', '.join(likeliest)}")
        mean = [f"  mean of {len(lines)} segments:"] if lines else []
        return [*lines, *mean, *(f"  {self._value(value)}  {name}" for name, value in self._top(self.classes, top))]

    def _value(self, value: float) -> str:
        return f"{value:10.5g}" if self.are_numbers else f"{100 * value:5.1f} %"

    def _top(self, classes: tuple[tuple[str, float], ...], top: int) -> tuple[tuple[str, float], ...]:
        return classes if self.are_numbers else classes[: max(1, top)]


def predict(store: DeviceStore, file: Path, loaded: dict[bytes, LoadedGraphs] | None = None) -> Prediction:
    """Predicts for one file. Raises `BadInput` if there is no model yet, or the file cannot be read.

    :param loaded: keeps the graphs of the task from one call to the next; the key is the digest of the task.
    """
    own = personalized_model(store)
    if own.spec.model.targets.are_inputs:
        raise BadInput(f"the task {own.spec.task} predicts no classes, but says what is unusual")
    loaded = {} if loaded is None else loaded
    if (key := own.spec.digest) not in loaded:
        loaded.clear()
        loaded[key] = graphs_of(store, own.spec)
    model, samples = own.spec.model, read_sample(file, own.spec.model)
    outputs = outputs_of(own, loaded[key], samples)
    rate, hop = model.form.sample_rate, model.form.hop
    segments = [(n * hop / rate, ordered(model, each)) for n, each in enumerate(outputs)] if rate else []
    whole, are_numbers = ordered(model, np.mean(outputs, 0)), model.targets.are_numbers
    return Prediction(own.spec.task, own.kind, whole, are_numbers, tuple(segments))


def outputs_of(own: PersonalizedModel, graphs: LoadedGraphs, samples: Samples) -> np.ndarray:
    """Returns probabilities, or numbers, float64 `[n, outputs]`."""
    logits_of, inputs = own.answers(graphs[0], inputs_of(samples, graphs[1]))
    one_by_one = (inputs.take(slice(place, place + 1)).x for place in range(len(inputs)))
    return np.concatenate([own.spec.model.targets.predicted(logits_of(own.params, x)) for x in one_by_one])


def ordered(model: ModelSpec, outputs: np.ndarray) -> tuple[tuple[str, float], ...]:
    """Returns outputs by their names: classes with the likeliest first, numbers in the task's order."""
    order = range(len(outputs)) if model.targets.are_numbers else np.argsort(-outputs, kind="stable")
    return tuple((model.class_names[place], float(outputs[place])) for place in order)


def graphs_of(store: DeviceStore, spec: TaskSpec, *, stay: bool = False) -> LoadedGraphs:
    """Returns the inference graph and the feature graph, if any. Raises `BadInput` or `GraphRefused`.

    :param stay: whether the feature graph stays loaded after its first use.
    """
    model = spec.model
    logits_of: LogitsOf = own_logits  # of a linear model, which needs no graph
    if not model.is_linear:
        graph = store.blob(model.inference.digest)
        if graph is None:
            raise no_model_of(spec)
        check_cost(check_graph(graph, max_bytes=MAX_GRAPH_BYTES), batch=1)
        logits_of = InferenceGraph(graph, model.layout)
    if model.features is None:
        return logits_of, None
    made = store.blob(model.features.graph.digest)
    if made is None:
        raise BadInput(f"this device lacks features of the task {spec.task}: it has to take part in one round first")
    check_features(made, model.features)
    return logits_of, FeatureGraph(lambda: made, model.features, input_shape=model.input_shape, stays=stay)


def samples_of(model: ModelSpec, values: np.ndarray) -> Samples:
    """Returns samples without labels.

    :param values: as `Samples.images`.
    """
    blank = model.targets.blank(len(values), len(model.class_names))
    return Samples(values, blank, model.mean, model.std, model.targets)


def read_sample(file: Path, model: ModelSpec) -> Samples:
    """Reads one image or clip, decoded and normalised in the same way as the device's training samples."""
    form, shape = model.form, model.image_shape
    if (clips := sound.SoundForm.of(form, one_a_clip=False)) is not None:
        return samples_of(model, clips.segments(file, shape[2]))
    return samples_of(model, read_image(file, input_shape=shape, bit_depth=form.bit_depth or 8)[None])
