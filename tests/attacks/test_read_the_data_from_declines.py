"""Whoever sees the broker compares what a device says with and without one record: a decline is charged nothing.

What must not tell: that a record does not fit the task, that there is no data at all, that a graph which the aggregator
wrote fails on some values, that training fails on these data for whatever reason.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from hushfleet.data.samples import Samples
from hushfleet.edge_client.board.config import DeviceConfig, OwnDataSection
from hushfleet.errors import GraphRefused
from hushfleet.learning.batch import ClientBatch
from hushfleet.learning.graph_safety import check_graph
from hushfleet.learning.graph_session import GradientGraph, InferenceGraph
from hushfleet.learning.own_samples import LoadedSamples
from hushfleet.models import get_model
from hushfleet.models.export import export_graphs
from hushfleet.objectives import Objective
from hushfleet.wire.format.spec import BlobRef, PrivacySpec
from support.edge import Bench, Package

Make = Callable[..., Bench]

DEVICE_UNIT = PrivacySpec("device", "strict", 1.0, 2.0, 1e-5)
RECORD_UNIT = PrivacySpec("record", "strict", 1.0, 1.1, 1e-5, sample_rate=0.5, batches=3)
COUNT = 12


@dataclass(frozen=True)
class Said:
    """All that a device published in a round."""

    states: tuple[str, ...]
    declines: tuple[tuple[str, str], ...]
    updates: tuple[bytes, ...]
    charged: int


@pytest.fixture
def said(make_bench: Make, package: Package, config: DeviceConfig) -> Callable[..., Said]:
    """What a device says in round 1, with its own key and seed each time."""

    def of(
        data: OwnDataSection | None = None,
        *,
        privacy: PrivacySpec = RECORD_UNIT,
        graph: bytes | None = None,
        params: np.ndarray | None = None,
        constant_time: bool = False,
        **changes: Any,
    ) -> Said:
        task = package.with_spec(task="asked", privacy=privacy, **changes)
        if graph is not None:
            task = task.with_spec(model=replace(task.spec.model, gradient=BlobRef.of(graph)))
            task = replace(task, blobs={**task.blobs, hashlib.sha256(graph).digest(): graph})
        state = Path(config.device.state_dir)
        folder = state.with_name(f"state-{len(list(state.parent.iterdir()))}")
        board = replace(
            config,
            device=replace(config.device, state_dir=str(folder)),
            data=data or config.data,
            limits=replace(config.limits, constant_time=constant_time, epsilon_server=math.inf),
        )
        bench = make_bench(task, board)
        if params is not None:
            bench.server.global_params = params
        bench.until(lambda: bool(bench.server.births))
        bench.server.open_round(1)
        for _ in range(500):
            bench.agent.step(0.0)
            bench.server.pump()
            bench.clock.now += 0.05
            if bench.server.declines or bench.entry_status(1) == "acked":
                break
        server = bench.server
        return Said(
            tuple(birth.state for birth in server.births),
            tuple((decline.code, decline.reason) for decline in server.declines),
            tuple(unsigned(update) for update in server.updates),
            bench.store.ledger.rounds_charged(),
        )

    return of


def unsigned(update: bytes) -> bytes:
    """Without the signature, which ends it: each device has a key of its own."""
    return update[:-64]


# records that do not fit


def values(count: int = COUNT) -> np.ndarray:
    return np.random.default_rng(5).random((count, 1, 8, 8)).astype(np.float32)


def labels(count: int = COUNT) -> np.ndarray:
    return np.arange(count) % 10


def npz(path: Path, x: np.ndarray, y: np.ndarray) -> OwnDataSection:
    np.savez(path, x=x, y=y)
    return OwnDataSection("arrays", str(path), values="numbers")


def with_nan(path: Path) -> OwnDataSection:
    one = np.full((1, 1, 8, 8), np.nan, np.float32)
    return npz(path, np.concatenate((values(), one)), np.append(labels(), 3))


def with_label_out_of_range(path: Path) -> OwnDataSection:
    return npz(path, values(COUNT + 1), np.append(labels(), 10))


def with_label_of_no_class(path: Path) -> OwnDataSection:
    return npz(path, values(COUNT + 1), np.append(labels(), 0.5))


def csv(path: Path, *more: bytes) -> OwnDataSection:
    header = ",".join(["label", *(f"p{i}" for i in range(64))])
    lines = [f"{label},{','.join(map(str, row.ravel()))}" for row, label in zip(values(), labels(), strict=True)]
    path.write_bytes("\n".join([header, *lines]).encode() + b"".join(b"\n" + line for line in more))
    return OwnDataSection("csv", str(path))


REST = b",0" * 63
LINES = {
    "a gap": b"3," + REST,
    "nan": b"3,nan" + REST,
    "too few fields": b"3,1,2",
    "no class": b"horse,0" + REST,
    "no label": b",0" + REST,
    "no UTF-8": b"3,\xff" + REST,
    "a field that is too long": b"3," + b"1" * 200_000 + REST,
}


@pytest.mark.parametrize("wrong", [with_nan, with_label_out_of_range, with_label_of_no_class])
def test_a_record_of_an_array_that_does_not_fit_counts_as_none(
    wrong: Callable[[Path], OwnDataSection], said: Callable[..., Said], tmp_path: Path
) -> None:
    without = said(npz(tmp_path / "a.npz", values(COUNT + 1)[:COUNT], labels()))
    if wrong is with_nan:
        without = said(npz(tmp_path / "a.npz", values(), labels()))
    assert without.updates
    assert said(wrong(tmp_path / "b.npz")) == without


@pytest.mark.parametrize("line", LINES)
def test_a_line_that_does_not_fit_counts_as_none(line: str, said: Callable[..., Said], tmp_path: Path) -> None:
    without = said(csv(tmp_path / "a.csv"))
    assert without.updates
    assert said(csv(tmp_path / "b.csv", LINES[line])) == without


def images(folder: Path) -> Path:
    from PIL import Image

    for number in range(COUNT):
        place = folder / str(number % 10)
        place.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 256, (8, 8), np.uint8)
        Image.fromarray(pixels).save(place / f"{number}.png")
    return folder


def test_an_image_of_no_class_counts_as_none(said: Callable[..., Said], tmp_path: Path) -> None:
    without = said(OwnDataSection("folder", str(images(tmp_path / "a"))))
    assert without.updates
    other = images(tmp_path / "b")
    (other / "horse").mkdir()
    (other / "horse" / "1.png").write_bytes((other / "1" / "1.png").read_bytes())
    assert said(OwnDataSection("folder", str(other))) == without


# no data at all


def test_data_that_cannot_be_used_are_as_good_as_none(said: Callable[..., Said], tmp_path: Path) -> None:
    """A camera's software makes the folder or the file with the first record, so that this is one record, too."""
    none = said(npz(tmp_path / "none.npz", values()[:0], labels()[:0]))
    assert none.updates
    assert none.charged == 1
    (tmp_path / "garbage.npz").write_bytes(b"garbage")
    whole = (tmp_path / "none.npz").read_bytes()
    (tmp_path / "cut.npz").write_bytes(whole[: len(whole) // 2])
    for data in (
        OwnDataSection("arrays", str(tmp_path / "missing.npz"), values="numbers"),
        OwnDataSection("arrays", str(tmp_path / "garbage.npz"), values="numbers"),
        OwnDataSection("arrays", str(tmp_path / "cut.npz"), values="numbers"),
        OwnDataSection("csv", str(tmp_path / "missing.csv")),
        OwnDataSection("folder", str(tmp_path / "missing")),
        npz(tmp_path / "shape.npz", values()[:, :, :4], labels()),
    ):
        assert said(data) == none, data


# a graph that fails on some data


def failing_on_labels_above_4(package: Package) -> bytes:
    """The task's own gradient, and a table of five entries in which the labels are looked up: of label 7 ONNX Runtime
    says that index 7 is out of bounds."""
    model = onnx.load_from_string(package.blobs[package.spec.model.gradient.digest])
    graph = model.graph
    (maker,) = [node for node in graph.node if "loss" in node.output]
    maker.output[list(maker.output).index("loss")] = "loss.own"
    graph.initializer.append(numpy_helper.from_array(np.zeros(5, np.float32), "table"))
    graph.node.extend(
        [
            helper.make_node("Gather", ["table", "y"], ["looked.up"]),
            helper.make_node("ReduceSum", ["looked.up"], ["looked.up.sum"], keepdims=0),
            helper.make_node("Add", ["loss.own", "looked.up.sum"], ["loss"]),
        ]
    )
    return bytes(model.SerializeToString())


@pytest.mark.parametrize("privacy", [DEVICE_UNIT, RECORD_UNIT], ids=["device", "record"])
def test_a_graph_that_fails_on_some_labels_tells_nothing(
    privacy: PrivacySpec, said: Callable[..., Said], package: Package, tmp_path: Path
) -> None:
    graph = failing_on_labels_above_4(package)
    low = said(npz(tmp_path / "low.npz", values(), labels() % 5), privacy=privacy, graph=graph)
    high = said(npz(tmp_path / "high.npz", values(), labels() % 5 + 5), privacy=privacy, graph=graph)
    for each in (low, high):
        assert each.declines == ()
        assert (len(each.updates), each.charged) == (1, 1)
    assert low.states == high.states


@pytest.mark.parametrize("privacy", [DEVICE_UNIT, RECORD_UNIT], ids=["device", "record"])
def test_nor_does_it_with_a_model_that_is_no_model(
    privacy: PrivacySpec, said: Callable[..., Said], package: Package, tmp_path: Path
) -> None:
    """With it every device declines, but not for the same reason."""
    graph, model = failing_on_labels_above_4(package), np.full_like(package.initial, np.nan)
    low = said(npz(tmp_path / "low.npz", values(), labels() % 5), privacy=privacy, graph=graph, params=model)
    high = said(npz(tmp_path / "high.npz", values(), labels() % 5 + 5), privacy=privacy, graph=graph, params=model)
    assert low == high
    assert low.declines == (("no-privacy", "the round's model has values that are not finite"),)


def test_with_records_a_graph_that_fails_on_one_leaves_out_that_one(package: Package) -> None:
    """Else one record would take the others' part of an update with it."""
    model = package.spec.model
    gradient = GradientGraph(failing_on_labels_above_4(package), model.layout)
    sums, failed = [], []
    for kept in (labels() < 5, labels() < 99):
        x, y = values()[kept], labels()[kept].astype(np.int64)
        batch = ClientBatch(gradient, x, y, (), {}, np.empty(model.layout.size, np.float32))
        out = np.empty(model.layout.size, np.float32)
        batch.clipped_sum(package.initial, 0.5, out)
        sums.append(out)
        failed.append(batch.failures)
    np.testing.assert_array_equal(*sums)
    assert failed[0] == []
    assert "out of" in failed[1][0]


def test_a_graph_that_fails_on_whatever_data_is_declined(
    said: Callable[..., Said], package: Package, tmp_path: Path
) -> None:
    """It is the task that fails, and nobody would find out why no board learns anything."""
    model = onnx.load_from_string(failing_on_labels_above_4(package))
    for tensor in model.graph.initializer:
        if tensor.name == "table":
            tensor.CopyFrom(numpy_helper.from_array(np.zeros(0, np.float32), "table"))
    assert tensor.data_type == TensorProto.FLOAT
    graph, told = bytes(model.SerializeToString()), []
    for y in (labels(), labels() * 0):
        data = npz(tmp_path / f"{y.sum()}.npz", values(), y)
        for privacy in (DEVICE_UNIT, RECORD_UNIT):
            each = said(data, privacy=privacy, graph=graph, constant_time=privacy is RECORD_UNIT)
            assert each.updates == ()
            told += each.declines
    assert {code for code, _ in told} == {"graph"}
    assert len({reason for _, reason in told}) == 1, "and ONNX Runtime's own words, which have labels, stay here"


# training that fails


def failing_with(error: Exception, monkeypatch: pytest.MonkeyPatch, *, above: float) -> None:
    """On bright images alone, as an amount of memory that follows from the data would be too much."""
    plain = GradientGraph.__call__

    def call(self: GradientGraph, params: Any, x: Any, *rest: Any, **more: Any) -> Any:
        if len(x) and x.max() > above:
            raise error
        return plain(self, params, x, *rest, **more)

    monkeypatch.setattr(GradientGraph, "__call__", call)


@pytest.mark.parametrize("error", [MemoryError("no room for 12 images"), ZeroDivisionError("of 12 images")], ids=repr)
@pytest.mark.parametrize("privacy", [DEVICE_UNIT, RECORD_UNIT], ids=["device", "record"])
@pytest.mark.parametrize("constant_time", [False, True])
def test_training_that_fails_on_some_data_tells_nothing(
    privacy: PrivacySpec,
    error: Exception,
    constant_time: bool,
    said: Callable[..., Said],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    dark, bright = (npz(tmp_path / f"{scale}.npz", values() * scale, labels()) for scale in (0.1, 10))
    failing_with(error, monkeypatch, above=5.0)
    sent = said(dark, privacy=privacy, constant_time=constant_time)
    assert "noise alone is sent" not in caplog.text
    with caplog.at_level(logging.ERROR):
        failed = said(bright, privacy=privacy, constant_time=constant_time)
    assert sent.declines == failed.declines == ()
    assert (sent.states, sent.charged) == (failed.states, failed.charged)
    assert len(sent.updates) == len(failed.updates) == 1
    assert "noise alone is sent" in caplog.text
    assert "12 images" in caplog.text, "the owner is told all of it"
    if privacy is RECORD_UNIT:  # it sends what it would send without data
        none = npz(tmp_path / "none.npz", values()[:0], labels()[:0])
        assert failed.updates == said(none, privacy=privacy, constant_time=constant_time).updates


def test_training_that_fails_on_whatever_data_is_declined(
    said: Callable[..., Said], monkeypatch: pytest.MonkeyPatch
) -> None:
    failing_with(ZeroDivisionError("whatever the data are"), monkeypatch, above=-math.inf)
    assert [code for code, _ in said(privacy=DEVICE_UNIT).declines] == ["error"]


def test_without_noise_training_that_fails_is_declined(
    said: Callable[..., Said], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nothing is promised there, and what would be sent instead has no noise to hide in."""
    failing_with(ZeroDivisionError("of 12 images"), monkeypatch, above=5.0)
    bright = npz(tmp_path / "bright.npz", values() * 10, labels())
    told = said(bright, privacy=replace(DEVICE_UNIT, noise_multiplier=0.0))
    assert [code for code, _ in told.declines] == ["error"]


def failing_on_bright_images(package: Package) -> bytes:
    """The task's own inference, and a table of five entries in which each image's largest value is looked up."""
    model = onnx.load_from_string(package.blobs[package.spec.model.inference.digest])
    graph = model.graph
    (maker,) = [node for node in graph.node if "logits" in node.output]
    maker.output[list(maker.output).index("logits")] = "logits.own"
    graph.initializer.append(numpy_helper.from_array(np.zeros(5, np.float32), "table"))
    graph.initializer.append(numpy_helper.from_array(np.array([1, 2, 3]), "all.but.the.batch"))
    graph.node.extend(
        [
            helper.make_node("Relu", ["x"], ["not.negative"]),
            helper.make_node("ReduceMax", ["not.negative", "all.but.the.batch"], ["largest"], keepdims=0),
            helper.make_node("Cast", ["largest"], ["place"], to=TensorProto.INT64),
            helper.make_node("Gather", ["table", "place"], ["looked.up"]),
            helper.make_node("ReduceSum", ["looked.up"], ["looked.up.sum"], keepdims=0),
            helper.make_node("Add", ["logits.own", "looked.up.sum"], ["logits"]),
        ]
    )
    return bytes(model.SerializeToString())


def test_with_records_one_without_a_teacher_is_left_out_alone(package: Package) -> None:
    """pFedSD asks the graph of inference for logits of all samples, before any gradient is noised."""
    graph, layout, params = failing_on_bright_images(package), package.spec.model.layout, package.initial
    check_graph(graph, max_bytes=1 << 20)
    x = np.concatenate((values(2), 10 * values(1), values(1)))
    samples = Samples(x, labels(4).astype(np.int64), (0.0,), (1.0,))
    inference = InferenceGraph(graph, layout)
    objective = Objective("distillation", temperature=3.0)
    exported = export_graphs(get_model(package.spec.model.name), objective=objective)
    gradient = GradientGraph(exported.gradient, layout, objective=objective)
    found = LoadedSamples(samples, gradient, inference, by_record=True).logits(params)
    assert np.isnan(found).any(1).tolist() == [False, False, True, False]
    np.testing.assert_allclose(found[[0, 1, 3]], inference(params, x[[0, 1, 3]]), rtol=1e-5)
    with pytest.raises(GraphRefused):
        LoadedSamples(samples, gradient, inference).logits(params)

    sums = []
    for kept in ([0, 1, 3], [0, 1, 2, 3]):
        taught = {"teacher": found[kept], "distill": np.full(len(kept), 0.5, np.float32)}
        out = np.empty(layout.size, np.float32)
        batch = ClientBatch(gradient, x[kept], samples.labels[kept], (), taught, np.empty_like(out))
        batch.clipped_sum(params, 0.5, out)
        sums.append(out)
    assert np.any(sums[0])
    np.testing.assert_array_equal(*sums)


def test_an_personalized_model_that_cannot_be_trained_stays_as_it_was(
    said: Callable[..., Said], package: Package, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Ditto trains a second model without noise: nothing of it may show in what is sent."""
    method = {"method": "ditto", "method_config": {"batch_size": 16}}
    data = npz(tmp_path / "a.npz", values(), labels())
    plain, calm = GradientGraph.__call__, said(data, **method)

    def call(self: GradientGraph, params: Any, x: Any, *rest: Any, **more: Any) -> Any:
        if len(x) > 1:  # the shared model's gradients are taken one by one
            raise GraphRefused("index 7 is out of bounds")
        return plain(self, params, x, *rest, **more)

    monkeypatch.setattr(GradientGraph, "__call__", call)
    assert said(data, **method) == calm


def with_huge_gradients(package: Package) -> bytes:
    """3e38 times the task's own gradient of the last bias."""
    model = onnx.load_from_string(package.blobs[package.spec.model.gradient.digest])
    graph, name = model.graph, f"grad.{package.spec.model.layout.names[-1]}"
    (maker,) = [node for node in graph.node if name in node.output]
    maker.output[list(maker.output).index(name)] = "small"
    graph.initializer.append(numpy_helper.from_array(np.array(3e38, np.float32), "factor"))
    graph.node.append(helper.make_node("Mul", ["small", "factor"], [name]))
    return bytes(model.SerializeToString())


def test_a_sum_of_clipped_gradients_that_could_overflow_is_declined(
    said: Callable[..., Said], package: Package, tmp_path: Path
) -> None:
    """With a clip norm near the largest float32 the sum of some records is infinite, and of fewer it is not."""
    one = values(1)
    few, many = (npz(tmp_path / f"{count}.npz", np.repeat(one, count, 0), labels(count) * 0) for count in (1, 40))
    large = replace(RECORD_UNIT, clip_norm=1e38, noise_multiplier=0.1, sample_rate=1.0)
    told = [said(data, privacy=large, graph=with_huge_gradients(package)) for data in (few, many)]
    assert told[0] == told[1]
    assert [code for code, _ in told[0].declines] == ["no-privacy"]
