"""From a task file to what a run needs, with the real data, networks and graphs."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from hushfleet.aggregator.config.task import Task, parse_task
from hushfleet.aggregator.payloads import public_data
from hushfleet.aggregator.payloads.prepare import PreparedTask, prepare
from hushfleet.data.samples import Samples
from hushfleet.data.sets import load
from hushfleet.data.sound import write_clip
from hushfleet.errors import BadInput
from hushfleet.learning.evaluation import evaluate
from hushfleet.learning.graph_safety import check_graph
from hushfleet.learning.graph_session import GradientGraph
from hushfleet.models import get_model
from hushfleet.models.torch_gradient import TorchGradient
from hushfleet.schema import to_plain
from hushfleet.wire.format.spec import MAX_GRAPH_BYTES, TaskSpec
from support.images import save_folder


def digits_task(**sections: Any) -> Task:
    plain: dict[str, Any] = {
        "name": "digits",
        "seed": 3,
        "model": {"name": "digits-cnn"},
        "method": {"name": "fedglp-adp", "gamma": 0.3},
        "privacy": {"accounting": "as-published", "noise_multiplier": 1.5},
        "data": {"name": "digits", "devices": 4},
        "round": {"rounds": 7},
    }
    for name, section in sections.items():
        plain[name] = {**plain[name], **section}
    return parse_task(plain)


def folder_task(**data: Any) -> Task:
    names = [f"digit-{label}" for label in range(10)]
    return digits_task(data={"name": "folder", "class_names": names, "input_shape": [1, 8, 8], **data})


@pytest.fixture(scope="module")
def prepared() -> PreparedTask:
    return prepare(digits_task(), run_id="test")


@pytest.fixture(scope="module")
def image_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some of the digits as class folders of PNG files."""
    digits, folder = load("digits"), tmp_path_factory.mktemp("images")
    names = [f"digit-{label}" for label in range(10)]
    save_folder(digits.train.take(slice(0, 200)), folder / "train", class_names=names)
    save_folder(digits.test.take(slice(0, 60)), folder / "test", class_names=names)
    return folder


def test_every_blob_lies_under_its_digest_and_the_package_names_them(prepared: PreparedTask) -> None:
    refs = [prepared.spec_ref, prepared.spec.model.gradient, prepared.spec.model.inference]
    assert set(prepared.blobs) == {ref.digest for ref in refs}
    assert len(prepared.blobs) == 3
    for ref in refs:
        blob = prepared.blobs[ref.digest]
        assert hashlib.sha256(blob).digest() == ref.digest
        assert len(blob) == ref.size
    assert TaskSpec.from_bytes(prepared.blobs[prepared.spec_ref.digest]) == prepared.spec


def test_the_package_says_what_the_task_says(prepared: PreparedTask) -> None:
    spec, digits = prepared.spec, load("digits")
    assert (spec.task, spec.rounds, spec.method) == ("digits-test", 7, "fedglp-adp")
    assert spec.method_config == {"gamma": 0.3}
    assert (spec.privacy.noise_multiplier, spec.privacy.delta) == (1.5, 0.25)
    assert spec.model.input_shape == (1, 8, 8)
    assert spec.model.class_names == digits.class_names
    assert (spec.model.mean, spec.model.std) == (digits.mean, digits.std)
    assert prepared.method.config.gamma == 0.3
    assert prepared.method.parts.personal.rounds == 7


def test_the_graphs_pass_a_devices_check_and_compute_torchs_gradient(prepared: PreparedTask) -> None:
    model = prepared.spec.model
    gradient, inference = (prepared.blobs[ref.digest] for ref in (model.gradient, model.inference))
    for graph in (gradient, inference):
        check_graph(graph, max_bytes=MAX_GRAPH_BYTES)
    batch = load("digits").train.take(slice(0, 5))
    loss, grad = GradientGraph(gradient, model.layout)(prepared.initial, batch.x, batch.y)
    expected_loss, expected = TorchGradient(prepared.model)(prepared.initial, batch.x, batch.y)
    assert loss == pytest.approx(expected_loss, rel=1e-4)
    assert np.linalg.norm(grad - expected) < 1e-4 * np.linalg.norm(expected)


def test_the_first_model_follows_the_seed(prepared: PreparedTask) -> None:
    assert prepared.initial.dtype == np.float32
    assert prepared.initial.shape == (prepared.spec.model.layout.size,)
    np.testing.assert_array_equal(prepared.initial, get_model("digits-cnn").init(3))
    assert (prepared.initial != get_model("digits-cnn").init(4)).any()


def test_the_global_model_is_tested_on_the_common_test_set(prepared: PreparedTask) -> None:
    assert prepared.evaluate_global is not None
    params = get_model("digits-cnn").init(8)
    gradient = TorchGradient(prepared.model)
    expected = evaluate(lambda given, x: np.asarray(gradient.logits(given, x)), params, load("digits").test)
    result = prepared.evaluate_global(params)
    assert result.accuracy == expected.accuracy
    assert result.loss == pytest.approx(expected.loss, rel=1e-4)


def test_runs_get_ids_of_their_own_unless_they_bring_one(prepared: PreparedTask) -> None:
    first, second = prepare(digits_task()), prepare(digits_task())
    assert first.spec.task != second.spec.task
    assert first.spec.task.startswith("digits-")
    assert first.spec_ref != second.spec_ref
    assert prepare(digits_task(), run_id="test").spec_ref == prepared.spec_ref


def test_the_pooled_reading_counts_the_limited_training_set() -> None:
    pooled = {"noise_multiplier": None, "epsilon": 2.0, "reading": "pooled-sampling"}
    task = digits_task(privacy=pooled, data={"limit": 800})
    multiplier = prepare(task, run_id="test").spec.privacy.noise_multiplier
    assert multiplier == task.privacy_spec(train_samples=800).noise_multiplier


def test_a_model_for_other_images_is_refused_by_name() -> None:
    with pytest.raises(BadInput, match=r"takes images of 3 x 32 x 32, but data.name = 'digits' has 1 x 8 x 8"):
        prepare(digits_task(model={"name": "cifar10-cnn"}))
    with pytest.raises(BadInput, match=r"data.name = 'folder' has 3 x 8 x 8; choose a model for that shape"):
        prepare(folder_task(input_shape=[3, 8, 8]))
    with pytest.raises(BadInput, match=r"model.name = 'lenet': must be one of"):
        prepare(digits_task(model={"name": "lenet"}))


def test_vectors_without_features_have_norm_1_on_boards_too(tmp_path: Path) -> None:
    """The task's mean and deviation are applied before; if it has them, the norm is that of the sample and its bias."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(5, 2, (60, 6)).astype(np.float32), np.arange(60) % 3
    np.savez(tmp_path / "own.npz", train_x=x, train_y=y, test_x=x, test_y=y)
    data = {"name": "arrays", "path": str(tmp_path / "own.npz"), "devices": 3, "class_names": ["a", "b", "c"]}
    named = {"mean": [5.0] * 6, "std": [2.0] * 6}
    rows = np.concatenate([(x - 5) / 2, np.full((60, 1), 0.3 * 6**0.5)], 1)
    plain = {"name": "t", "model": {"name": "linear"}, "method": {"name": "hush"}}
    made = prepare(parse_task({**plain, "data": data | named}))
    assert made.features is not None
    spec = TaskSpec.from_bytes(made.spec.to_bytes()).model
    assert (spec.image_shape, spec.input_shape, spec.features.count) == ((6, 1, 1), (7, 1, 1), 7)
    assert spec.features.graph.digest in made.blobs
    found = made.features.of(made.dataset.test).x.reshape(60, 7)
    np.testing.assert_allclose(found, rows / np.linalg.norm(rows, axis=1, keepdims=True), rtol=1e-5, atol=1e-6)
    unchanged = prepare(parse_task({**plain, "data": data | {"mean": [0.0] * 6, "std": [1.0] * 6}}))
    found = unchanged.features.of(unchanged.dataset.test).x.reshape(60, 7)
    expected = np.concatenate([x / np.linalg.norm(x, axis=1, keepdims=True), np.full((60, 1), 0.3)], 1)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_images_without_features_keep_their_normalisation() -> None:
    sections = {"model": {"name": "linear"}, "method": {"name": "hush"}, "data": {"name": "digits", "devices": 4}}
    spec, plain = prepare(parse_task({"name": "t", **sections})).spec.model, load("digits")
    assert (spec.mean, spec.std) == (plain.mean, plain.std)
    assert spec.input_shape == (65, 1, 1)


def test_missing_data_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"mnist is not in .*: looked for .*; without --data-dir it is downloaded"):
        prepare(digits_task(model={"name": "fashion-mnist-cnn"}, data={"name": "mnist"}), data_dir=tmp_path)


def test_a_field_task_without_images_has_no_test_set() -> None:
    prepared = prepare(folder_task())
    assert prepared.dataset is None
    assert prepared.evaluate_global is None
    model = prepared.spec.model
    assert model.class_names == tuple(f"digit-{label}" for label in range(10))
    assert (model.mean, model.std) == ((0.0,), (1.0,))


def test_the_number_of_outputs_follows_the_class_names() -> None:
    model = prepare(folder_task(class_names=["cat", "dog", "nothing"])).spec.model
    assert model.layout.shapes[-1] == (3,)


def test_a_folder_with_both_parts_is_a_data_set(image_folder: Path) -> None:
    prepared = prepare(folder_task(path=str(image_folder)))
    digits, dataset = load("digits"), prepared.dataset
    assert dataset is not None
    assert (len(dataset.train), len(dataset.test)) == (200, 60)
    # By class, then by file name, which is the order within a class.
    order = np.argsort(digits.test.labels[:60], kind="stable")
    np.testing.assert_array_equal(dataset.test.images, digits.test.images[order])
    np.testing.assert_array_equal(dataset.test.labels, digits.test.labels[order])
    assert (dataset.mean, dataset.std) == (prepared.spec.model.mean, prepared.spec.model.std)
    assert prepared.evaluate_global is not None
    assert 0 <= prepared.evaluate_global(prepared.initial).accuracy <= 1


def test_a_folder_with_a_test_part_only_serves_the_aggregator(image_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(image_folder / "test", tmp_path / "test")
    prepared = prepare(folder_task(path=str(tmp_path)))
    assert prepared.dataset is not None
    assert (len(prepared.dataset.train), len(prepared.dataset.test)) == (0, 60)
    assert prepared.evaluate_global is not None
    assert prepared.evaluate_global(prepared.initial) == prepare(folder_task(path=str(image_folder))).evaluate_global(
        prepared.initial
    )
    # There are no records here to count, and none in the field.
    pooled = {"noise_multiplier": None, "epsilon": 2.0, "reading": "pooled-sampling"}
    with pytest.raises(BadInput, match="pooled-sampling"):
        prepare(digits_task(privacy=pooled, data=to_plain(folder_task(path=str(tmp_path)).data)))


def test_a_folder_that_does_not_fit_is_refused(image_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="lacks the folder test/"):
        prepare(folder_task(path=str(tmp_path)))
    with pytest.raises(BadInput, match="'digit-1', which is not a class of this task"):
        prepare(folder_task(path=str(image_folder), class_names=["digit-0", "two"]))


def public_task(path: Path, *, model: Mapping[str, Any] = MappingProxyType({}), **data: Any) -> Task:
    plain = {"name": "t", "model": {"name": "linear", "public": str(path), **model}, "method": {"name": "hush"}}
    plain["privacy"] = {"accounting": "secure", "epsilon": 2.0}
    return parse_task({**plain, "data": {"name": "digits", "devices": 60, **data}})


def test_public_samples_set_the_directions_by_their_own_rule(
    image_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are read from a folder of images with any sub-folders, or from an .npz file; no board receives them."""
    digits = load("digits")
    np.savez(tmp_path / "same.npz", train_x=np.concatenate([digits.train.images[:200], digits.test.images[:60]]))
    for path, count in ((image_folder, 260), (tmp_path / "same.npz", 260)):
        made = prepare(public_task(path))
        assert (made.spec.model.input_shape, made.spec.model.features.count) == ((17, 1, 1), 17 + 66)
        assert f"{count} samples determine" in (said := capsys.readouterr().err)
        assert "whoever receives the task can learn from its features about them" in said
    assert parse_task(made.task.to_plain()).model.directions == 16


def test_classes_of_public_samples_are_sub_folders_or_labels_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both give the directions that tell the classes apart, others than samples without classes do."""
    digits = load("digits")
    some, names = digits.train.take(slice(0, 200)), [f"digit {label}" for label in range(10)]
    save_folder(some, tmp_path / "digits", class_names=names)
    np.savez(tmp_path / "same.npz", train_x=some.images, train_y=np.array(names)[some.labels])
    np.savez(tmp_path / "without.npz", train_x=some.images)
    x = load("digits").test.take(slice(0, 9))

    def features(name: str, *, classes: bool) -> np.ndarray:
        made = prepare(public_task(tmp_path / name, model={"public_classes": classes})).features
        assert made is not None
        return made.of(x).x[:, :, 0, 0]

    found = [features(name, classes=True) for name in ("digits", "same.npz")]
    np.testing.assert_allclose(np.abs(found[0]), np.abs(found[1]), atol=1e-5)
    assert found[0].shape == (9, 10), "ten classes' means vary in nine directions; with the bias"
    for name, classes in (("without.npz", True), ("digits/digit 1", True)):
        with pytest.raises(BadInput, match="needs two classes, as sub-folders, or as train_y"):
            features(name, classes=classes)
    np.testing.assert_array_equal(features("same.npz", classes=False), features("without.npz", classes=False))
    np.savez(tmp_path / "half.npz", train_x=some.images[::2], train_y=some.labels[::2])
    monkeypatch.setattr(public_data, "MOST", 100)  # every second one is read, with its own label
    np.testing.assert_array_equal(*(features(name, classes=True) for name in ("same.npz", "half.npz")))


@pytest.mark.parametrize(
    ("name", "shape", "of_task", "text"),
    [
        ("train_x", (5, 8, 8), [], r"has 5 samples of \[1, 8, 8\]; at least 16 of"),
        ("test_x", (20, 8, 8), [], "no array"),
        ("train_x", (20, 1, 9, 9), [], r"shape \[1, 9, 9\], and the task takes \[1, 8, 8\]"),
        ("train_x", (20, 3, 8, 8), [], r"shape \[3, 8, 8\], and the task takes \[1, 8, 8\]"),
        ("train_x", (20, 60), [64, 1, 1], r"train_x: samples have the shape \[60, 1, 1\], and the task takes \[64, 1"),
        ("train_x", (20, 3, 40), [3, 1, 50], r"shape \[3, 1, 40\], and the task takes \[3, 1, 50\]"),
        ("train_x", (20, 2, 50), [3, 1, 50], r"shape \[2, 1, 50\], and the task takes \[3, 1, 50\]"),
    ],
)
def test_public_samples_that_do_not_fit_are_refused(
    name: str, shape: tuple[int, ...], of_task: list[int], text: str, tmp_path: Path
) -> None:
    np.savez(tmp_path / "public.npz", **{name: np.zeros(shape, np.float32 if of_task else np.uint8)})
    data = {"name": "arrays", "input_shape": of_task, "class_names": ["a", "b"]} if of_task else {}
    with pytest.raises(BadInput, match=text):
        prepare(public_task(tmp_path / "public.npz", **data))


@pytest.mark.parametrize("shape", [[3, 1, 8], [24, 1, 1]])
def test_public_series_and_vectors_are_normalised_as_the_boards_own(shape: list[int], tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(5, 2, (60, *shape)).astype(np.float32)
    np.savez(tmp_path / "public.npz", train_x=x[:, :, 0] if shape[2] > 1 else x[:, :, 0, 0])
    names = {"class_names": ["a", "b"], "mean": [5.0] * shape[0], "std": [2.0] * shape[0]}
    made = prepare(public_task(tmp_path / "public.npz", name="arrays", input_shape=shape, **names))
    found = made.features.of(Samples((x - 5) / 2, np.zeros(60, np.int64), (0.0,) * shape[0], (1.0,) * shape[0]))
    whole = np.concatenate([(x - 5).reshape(60, 24) / 2, np.full((60, 1), 0.3 * 24**0.5)], 1)
    whole /= np.linalg.norm(whole, axis=1, keepdims=True)
    assert (found.x.shape[1], found.own.shape[1]) == (17, 26)
    directions = np.linalg.eigh(np.cov(whole.T))[1][:, ::-1][:, :16]
    rows = (whole - whole.mean(0)) @ directions
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    shared = found.x.reshape(60, 17)[:, :16]
    np.testing.assert_allclose(shared * np.sign((rows * shared).sum(0)), rows, atol=0.03)
    with pytest.raises(BadInput, match="samples are no images or sound; give an"):
        prepare(public_task(tmp_path, name="arrays", input_shape=shape, **names))


def test_public_clips_give_the_directions_of_sound(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for number in range(20):
        pcm = (3000 * rng.standard_normal(450)).astype(np.int16)
        write_clip(tmp_path / f"any-{number % 3}" / f"{number}.wav", pcm, 8000)
    sound = {"sample_rate": 8000, "segment_s": 0.025, "class_names": ["a", "b"]}
    made = prepare(public_task(tmp_path, name="sound", **sound))
    assert (made.spec.model.input_shape, made.spec.model.features.count) == ((17, 1, 1), 17 + 202)
