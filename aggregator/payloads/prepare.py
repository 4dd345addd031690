"""Makes from a task file everything that a run needs: the package for the devices, the graphs, the first model."""

from __future__ import annotations

import hashlib
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hushfleet.aggregator.config.question import question_of
from hushfleet.aggregator.config.task import Task
from hushfleet.aggregator.payloads.public_data import PUBLIC, load_public, normalisation, public_samples
from hushfleet.aggregator.payloads.start import EarlierModel
from hushfleet.data.form import MOST_COLUMNS, OWN_DATA, SAMPLE_RATE, SOUND, TABLES, SampleForm, ValueKind
from hushfleet.data.samples import DataSet, LabelledSamples
from hushfleet.errors import BadInput, Malformed
from hushfleet.field_types import hints
from hushfleet.learning.evaluation import Evaluation, evaluate
from hushfleet.learning.graph_session import InferenceGraph
from hushfleet.learning.own_metrics import load as load_metrics
from hushfleet.losses import ACCURACY, find_loss
from hushfleet.methods import make_method
from hushfleet.methods.task_method import TaskMethod
from hushfleet.models import get_model
from hushfleet.models.export import export_graphs
from hushfleet.models.model import Model
from hushfleet.params import MAX_PARAMS, MAX_TENSORS, is_linear
from hushfleet.progress import doing
from hushfleet.schema import from_plain
from hushfleet.wire.format.chunks import MAX_BLOB_BYTES, MAX_CHUNKS, chunk_count
from hushfleet.wire.format.headed import MAX_HEADER_BYTES, MAX_LAYERS
from hushfleet.wire.format.spec import MAX_SPEC_BYTES, UNIT_NORM, BlobRef, DropoutSpec, ModelSpec, TaskSpec

if TYPE_CHECKING:
    from hushfleet.learning.graph_features import FeatureGraph
    from hushfleet.models.features import FeatureExtractor


@dataclass(frozen=True, eq=False)
class PreparedTask:
    """A task, ready to run.

    :param spec: the specification that devices get.
    :param spec_ref: the reference to its bytes.
    :param blobs: the task package and the graphs, by SHA-256.
    :param initial: float32 `[d]`, the first global model.
    :param dataset: the simulation's data, or the aggregator's public test set; None if there is none.
    :param inference: computes the logits of a flat vector on the network's inputs, by ONNX Runtime.
    :param features: computes these inputs from images if they are features; None if they are the images.
    :param period: the place of this task in a chain of tasks that continue each other with the same classes, from 1 on.
    :param evaluate_global: returns accuracy and loss of a global vector on the common test set; None without one.
    """

    task: Task
    model: Model
    spec: TaskSpec
    spec_ref: BlobRef
    blobs: dict[bytes, bytes]
    initial: np.ndarray
    method: TaskMethod
    dataset: DataSet | None
    inference: InferenceGraph
    features: FeatureGraph | None
    evaluate_global: Callable[[np.ndarray], Evaluation] | None
    period: int = 1


def prepare(
    task: Task, *, data_dir: Path | None = None, run_id: str | None = None, features_cache: Path | None = None
) -> PreparedTask:
    """Loads data, exports and checks the graphs, and computes the noise multiplier.

    :param run_id: part of the task's id; random by default, because devices that know a task's id answer its rounds
        with the bytes that they sent before. A simulation or a resumed run gives its own.
    :param features_cache: a folder in which features of images are kept, if the task has features.
    """
    dataset = _load_data(task, data_dir)
    class_names = dataset.class_names if dataset else task.class_names
    shape = dataset.input_shape if dataset else task.data.shape
    if shape is None or not class_names:
        raise BadInput(
            "data.path is missing; without it data.class_names and data.input_shape must say what devices have"
        )
    if task.round.patience and not (dataset and len(dataset.test)):
        raise BadInput(
            f"round.patience = {task.round.patience}: needs public test data on the aggregator, by which it sees that "
            "the model becomes no better; give data.path a test part, or leave patience out"
        )
    _check_samples(task, shape, class_names)
    if len(class_names) < 2 and task.targets.are_classes:
        raise BadInput(f"data.class_names: the data have one class, {class_names[0]!r}; a classifier needs at least 2")
    if len(task.data.mean) not in (0, shape[0]):
        raise BadInput(f"data.mean has {len(task.data.mean)} values; the data have {shape[0]} channels")
    if task.data.augment != "none" and shape[1] == 1:
        raise BadInput(
            f"data.augment = {task.data.augment!r} changes images, and the data are {_format_shape(shape)}; take 'none'"
        )
    mean, std = (dataset.mean, dataset.std) if dataset else normalisation(task, shape[0])
    if task.statistic is not None:
        try:
            task.statistic.check_column(math.prod(shape), () if task.targets.are_classes else class_names)
        except ValueError as error:
            raise BadInput(f"statistic.{error}") from error
    extractor = _features(task, shape, mean, std)
    input_shape = shape if extractor is None else extractor.input_shape
    # Boards fetch a network with each task, but do not use it if nothing trains, so the smallest one is enough.
    taken = (1, 1, 1) if task.statistic is not None and task.model.name == "linear" else input_shape
    name = task.model.name if task.model.share == "all" else "linear"
    by_record = task.privacy.unit == "record"
    outputs = task.targets.outputs(class_names, input_shape)
    checked: Any = {"loss": task.model.standard_loss, "by_record": by_record, "vocabulary": task.data.vocabulary}
    model = get_model(name, classes=outputs, input_shape=taken, **checked)
    _check_shape(task, model.input_shape, taken)
    _check_layout(task, model)
    train_samples = min(len(dataset.train), task.data.limit or len(dataset.train)) if dataset else 0
    sent = model.layout.size - int(np.count_nonzero(task.parts().personal.mask(model.layout)))
    trained = replace(
        task, data=replace(task.data, test_fraction=task.data.share_tested(dataset is not None and dataset.has_test))
    )
    privacy = trained.privacy_spec(train_samples=train_samples or None, size=sent)
    method = make_method(task.method.name, task.method.settings, privacy, model.layout, rounds=task.round.rounds)
    _check_published(task, method)
    objective = replace(task.targets.objective(method.objective), own=task.model.own_loss)
    graphs = export_graphs(model, objective=objective)
    spec = TaskSpec(
        task=f"{task.name}-{run_id or os.urandom(4).hex()}",
        rounds=task.total_rounds,
        method=task.method.name,
        method_config=task.method.settings,
        privacy=privacy,
        wire=task.wire.spec(),
        model=ModelSpec(
            name=model.name,
            layout=model.layout,
            input_shape=input_shape,
            class_names=tuple(class_names),
            mean=mean,
            std=std,
            dropout=tuple(DropoutSpec(tuple(d.shape), d.rate) for d in model.dropout),
            gradient=BlobRef.of(graphs.gradient),
            inference=BlobRef.of(graphs.inference),
            features=None if extractor is None else extractor.spec,
            targets=task.targets,
            form=_form(task, dataset),
            closed_form=not (objective.own and is_linear(model.layout)),
        ),
        memory_mib=_memory_mib(model, extractor, vectors=len(method.server.vectors)),
        augment=task.data.augment,
        after_new=task.schedule.after_new,
        data_window_s=task.data.window_s,
        question=question_of(task, noise_multiplier=privacy.noise_multiplier, classes=len(class_names)),
    )
    spec = _with_values(spec, dataset, task.data.name)
    initial, period = model.init(task.seed), 1
    if task.model.start is not None:
        earlier = EarlierModel.read(Path(task.model.start))
        initial, spec = earlier.vector(spec.model), replace(spec, continues=earlier.continued)
        period = earlier.next_period(spec.model.class_names)
    package = spec.to_bytes()
    if len(package) > MAX_SPEC_BYTES:
        raise BadInput(
            f"data.class_names: with {len(class_names)} names the task package has {len(package)} bytes, and devices "
            f"take at most {MAX_SPEC_BYTES}; take fewer classes or shorter names"
        )
    inference = InferenceGraph(graphs.inference, model.layout)
    features, blobs = None, [package, graphs.gradient, graphs.inference]
    if extractor is not None and spec.model.features is not None:
        from hushfleet.learning.graph_features import FeatureGraph

        made = extractor.graph
        features = FeatureGraph(lambda: made, spec.model.features, input_shape=input_shape, cache=features_cache)
        blobs.append(made)

    is_tested = bool(dataset) and spec.training_rounds > 0
    scores = dict.fromkeys((ACCURACY, find_loss(task.model.standard_loss).measure.lower()))
    metrics = load_metrics(task.model.metrics, taken=(*scores, "loss"))
    if metrics and not (is_tested and dataset and len(dataset.test)):
        raise BadInput(
            "model.metrics are measured on the aggregator's public test set, and this task has none (data.path). What "
            "a model reaches on the boards' own samples is private: boards answer it, noised and charged, where the "
            "task asks for an [evaluation]"
        )

    @cache  # features take longer than the test
    def common_test() -> LabelledSamples:
        assert dataset is not None
        return dataset.common_test if features is None else features.of(dataset.common_test)

    return PreparedTask(
        task=task,
        model=model,
        spec=spec,
        spec_ref=BlobRef.of(package),
        blobs={hashlib.sha256(b).digest(): b for b in blobs},
        initial=initial,
        method=method,
        dataset=dataset,
        inference=inference,
        features=features,
        evaluate_global=(lambda params: evaluate(inference, params, common_test(), metrics)) if is_tested else None,
        period=period,
    )


def _features(
    task: Task, shape: tuple[int, int, int], mean: Sequence[float], std: Sequence[float]
) -> FeatureExtractor | None:
    """Returns the model that computes features of images, or None if there is none. Raises `BadInput`."""
    section = task.model
    if section.features is None and section.share == "all":
        return None
    from hushfleet.models.features import get_features, hidden_features  # with onnx
    from hushfleet.models.features.hidden import read_weights

    if section.features is not None:
        weights = None if section.weights is None else Path(section.weights)
        scaled = any(each != 1 for each in std)
        public = None if section.public is None else public_samples(task, Path(section.public), shape, mean, std)
        with doing(f"making the graph of the features {section.features}"):
            extractor = get_features(
                section.features,
                shape,
                directions=section.directions,
                public=public,
                weights=weights,
                standardised=scaled,
                sample_rate=task.data.form.sample_rate or SAMPLE_RATE,
                coarse=task.targets.are_inputs,
            )
        if public is not None:
            print(f"model.public = {section.public!r}: {len(public)} {PUBLIC}", file=sys.stderr)
        if extractor.about:
            print(extractor.about, file=sys.stderr)
        return extractor
    network = get_model(section.name)
    _check_shape(task, network.input_shape, shape)
    given = section.weights
    params = network.init(task.seed) if given is None else read_weights(Path(given), network.layout)
    return hidden_features(network, params)


def _check_shape(task: Task, taken: tuple[int, ...], found: tuple[int, ...]) -> None:
    if tuple(taken) != tuple(found):
        raise BadInput(
            f"model.name = {task.model.name!r} takes images of {_format_shape(taken)}, but "
            f"data.name = {task.data.name!r} has {_format_shape(found)}; choose a model for that shape"
        )


def _check_samples(task: Task, shape: tuple[int, ...], class_names: Sequence[str]) -> None:
    """Raises `BadInput` for samples or classes that no task package can name; data may have more than a task file."""
    cures = {"input_shape": "cut long series into windows, and scale large images down", "class_names": "take fewer"}
    for key, found in (("input_shape", shape), ("class_names", class_names)):
        try:
            from_plain(hints(ModelSpec)[key], found, where=f"data.{key}")
        except Malformed as error:
            raise BadInput(f"data.path = {str(task.data.path)!r} gives {error}; {cures[key]}") from error


def _check_layout(task: Task, model: Model) -> None:
    size, tensors = model.layout.size, len(model.layout.names)
    if size > MAX_PARAMS or tensors > MAX_TENSORS:
        raise BadInput(
            f"model.name = {task.model.name!r} has {size} parameters in {tensors} tensors on samples of "
            f"{_format_shape(model.input_shape)} (data.input_shape) with {model.classes} outputs (data.class_names); "
            f"devices take at most {MAX_PARAMS} in {MAX_TENSORS}"
        )


def _load_data(task: Task, data_dir: Path | None) -> DataSet | None:
    """Returns the task's data, normalised in the same way as on its devices."""
    section = task.data
    with doing(f"reading the data set {section.name}"):
        return _read_data(task, data_dir)


def _read_data(task: Task, data_dir: Path | None) -> DataSet | None:
    section, shape = task.data, task.data.shape
    if section.name in ("folder", *SOUND):
        is_own = section.name in OWN_DATA
        if shape is None or (is_own and section.path is None):
            return None
        from hushfleet.data.folder import FileForm, load_folder_set
        from hushfleet.data.sound import SoundForm

        mean, std = normalisation(task, shape[0])
        in_files = task.model.features is not None  # features are computed segment by segment
        sound = SoundForm.of(section.form, one_a_clip=task.privacy.unit == "record", in_files=in_files)
        form = FileForm(
            input_shape=shape,
            class_names=task.class_names,
            mean=mean,
            std=std,
            bit_depth=section.bit_depth,
            sound=sound,
            targets=task.targets,
        )
        if section.path is not None and is_own:
            return load_folder_set(section.path, by_device=section.partition == "given", **form)
        from hushfleet.data.sound_sets import load_sound_set

        return load_sound_set(section.name, form, data_dir=data_dir)
    if section.name in OWN_DATA:
        return _load_own(task)
    return load_public(task, data_dir)


def _load_own(task: Task) -> DataSet | None:
    """Loads `arrays` and tables."""
    section, targets = task.data, task.targets
    path, shape, names = section.path, section.input_shape, task.class_names
    if path is None:
        return None
    from hushfleet.data.measurements import advise_normalisation

    if section.name == "arrays":
        from hushfleet.data.arrays import load_arrays

        data = load_arrays(path)
    else:
        from hushfleet.data.csv_file import LABEL, CsvLayout, load_csv_set

        names = names or ((section.label_column or LABEL,) if not targets.are_classes else ())
        outputs = () if targets.are_classes else names
        if (files := _parquet(path)) is None:
            data = load_csv_set(path, CsvLayout(section.form, shape, outputs, series=targets.are_inputs))
        else:
            from hushfleet.data.conversion import converted

            data = converted(files, section.form, targets.columns(names))
    normal = {"mean": section.mean, "std": section.std}
    dataset = data.dataset(
        section.name,
        class_names=names,
        **normal,
        targets=targets,
        form=section.form,
        input_shape=shape,
        where=str(path),
    )
    if not section.mean and section.values != "tokens" and task.model.features != UNIT_NORM:
        advise_normalisation((dataset.train if len(dataset.train) else dataset.test).images, str(path))
    if shape not in (None, dataset.input_shape):
        raise BadInput(
            f"data.input_shape = {_format_shape(shape)}: {path} has samples of {_format_shape(dataset.input_shape)}"
        )
    return dataset


def _parquet(path: Path) -> Path | dict[str, Path] | None:
    """Returns the Parquet file, or those of a folder by their parts; None: there are none."""
    files = {part: file for part in ("train", "test") if (file := path / f"{part}.parquet").exists()}
    return path if path.suffix == ".parquet" else files or None


def _form(task: Task, dataset: DataSet | None) -> SampleForm:
    """Returns how boards read tables: as the task says; columns, by default, as the aggregator's own file has them."""
    names = dict.fromkeys(dataset.column_names) if dataset is not None and task.data.name in TABLES else {}
    is_deep = dataset is not None and task.data.name == "folder" and dataset.test.images.dtype == np.float32
    columns = tuple(names) if len(names) <= MOST_COLUMNS else ()
    return task.data.form.merged(SampleForm(columns, bit_depth=16 * is_deep))


def _with_values(spec: TaskSpec, dataset: DataSet | None, name: str) -> TaskSpec:
    """Returns the package with the kind of values, by default that of the aggregator's own data.

    One sample of another type changes the type of its array, and must not change how a board reads the others.
    """
    if not spec.by_content or spec.model.form.values or spec.model.form.bit_depth:
        return spec
    if dataset is None:
        if name == "arrays":
            raise BadInput(
                'data.values is missing: with privacy.unit = "record" or data.window it must say what the arrays of '
                'boards contain, "pixels" (0 to 255) or "numbers" (used as they are)'
            )
        return spec
    values: ValueKind = "pixels" if dataset.test.images.dtype == np.uint8 else "numbers"
    return replace(spec, model=replace(spec.model, form=replace(spec.model.form, values=values)))


def _format_shape(shape: tuple[int, ...]) -> str:
    return " x ".join(str(n) for n in shape)


def _check_published(task: Task, method: TaskMethod) -> None:
    """Raises `BadInput` if a method's vectors and the model together are larger than one blob that devices fetch."""
    count, size = len(method.server.vectors), 4 * method.published_size
    if (chunks := chunk_count(size + MAX_HEADER_BYTES, task.wire.chunk_bytes)) > MAX_CHUNKS:
        raise BadInput(
            f"wire.chunk_bytes = {task.wire.chunk_bytes}: the model's {size} bytes are {chunks} chunks, and devices "
            f"fetch at most {MAX_CHUNKS}; take at least {chunk_count(size + MAX_HEADER_BYTES, MAX_CHUNKS)}"
        )
    layers = len(method.layout.layers) * (1 + count)
    if count and (size > MAX_BLOB_BYTES or layers > MAX_LAYERS):
        raise BadInput(
            f"method {method.name!r} publishes {count} vectors of the model's size with the model: {size} bytes in "
            f"{layers} layers, and devices fetch at most {MAX_BLOB_BYTES} in {MAX_LAYERS}; take a smaller network"
        )


def _memory_mib(model: Model, features: FeatureExtractor | None, *, vectors: int) -> int:
    """Estimates a device's memory. Measured on x86: the runtime takes 60 MiB; a round holds about ten vectors of the
    model's size, and three more for each that the server half publishes; making features takes 5 times their graph."""
    making = 0 if features is None else 5 * len(features.graph)
    return 64 + (model.layout.size * 4 * (10 + 3 * vectors) + making) // (1 << 20)
