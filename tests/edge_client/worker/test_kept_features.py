"""The board's file of features: rounds without ONNX Runtime, and what the file may never have."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hushfleet.data.samples import Samples
from hushfleet.edge_client.board.config import DeviceConfig, OwnDataSection, WorkerSection
from hushfleet.edge_client.board.retention import DAY_S, Retention
from hushfleet.edge_client.storage.state_files import FEATURES
from hushfleet.edge_client.worker.in_process import InProcess
from hushfleet.edge_client.worker.job import Job, NeedsFeatures, Outcome
from hushfleet.edge_client.worker.kept_features import FeaturesLacking, KeptFeatures
from hushfleet.edge_client.worker.process import ChildProcess
from hushfleet.learning.graph_features import FeatureGraph
from hushfleet.models import get_model
from hushfleet.models.onnx_nodes import Graph
from hushfleet.params import ParamLayout
from hushfleet.wire.format.spec import BlobRef, FeatureSpec, ModelSpec
from support.edge import Bench, Package, write_samples

from .test_child import open_and_wait, runs

MakeBench = Callable[..., Bench]
COUNT, ROW_BYTES = 6, 32 + 4 * 6
NOTED = (
    "def seen(self, job, do=work.JobWork.do):\n"
    "    logging.getLogger('hushfleet.edge').warning('%s %s', job.features, 'onnxruntime' in sys.modules)\n"
    "    return do(self, job)\n"
    "import logging; work.JobWork.do = seen"
)


def features_graph() -> bytes:
    matrix = np.random.default_rng(0).standard_normal((64, COUNT)).astype(np.float32)
    graph = Graph()
    flat = graph.node("Flatten", "x", axis=1)
    return graph.to_bytes(graph.node("Relu", graph.node("MatMul", flat, graph.constant(matrix))), (1, 8, 8), COUNT)


@pytest.fixture
def on_features(linear: Package) -> Package:
    """A linear model on six features; its graphs for the network are never run."""
    graph = features_graph()
    model = replace(
        linear.spec.model,
        layout=ParamLayout(("head.weight", "prior"), ((10, COUNT), (10,))),
        input_shape=(COUNT, 1, 1),
        features=FeatureSpec((1, 8, 8), COUNT, BlobRef.of(graph)),
    )
    blobs = {**linear.blobs, BlobRef.of(graph).digest: graph}
    initial = get_model("linear", input_shape=(COUNT, 1, 1)).init(7)
    return replace(linear, blobs=blobs, initial=initial).with_spec(model=model)


@pytest.fixture
def field(config: DeviceConfig) -> DeviceConfig:
    """A board in the field, with a new worker each round."""
    return replace(config, simulation=None, worker=WorkerSection(0.0))


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The jobs of all workers: what they do with the file, and whether ONNX Runtime is in their memory."""
    runs(NOTED, monkeypatch)
    lines: list[str] = []
    monkeypatch.setattr("hushfleet.edge_client.worker.handover._log.log", lambda level, form, text: lines.append(text))
    return lines


def begun(make: MakeBench, package: Package, config: DeviceConfig) -> Bench:
    bench = make(package=package, config=config)
    bench.agent.rounds._handover._workshop = ChildProcess(config.store_path.with_name(FEATURES))
    return bench


def test_features_are_made_once_and_rounds_go_without_onnx_runtime(
    make_bench: MakeBench, on_features: Package, field: DeviceConfig, seen: list[str]
) -> None:
    made = ["kept False", "make True", "kept False"]
    bench, file = begun(make_bench, on_features, field), field.store_path.with_name(FEATURES)
    for round, jobs in ((1, made), (2, ["kept False"]), (3, made)):
        if round == 3:
            write_samples(Path(field.data.path), count=20, seed=9)
        seen.clear()
        open_and_wait(bench, round)
        assert bench.server.declines == []
        assert seen == jobs
        assert file.stat().st_size == 64 + (20 if round == 3 else 48) * ROW_BYTES, "no other sample's"
    assert file.stat().st_mode & 0o777 == 0o600
    bench.server.package = on_features.with_spec(task="another")
    bench.server.announce()
    bench.steps()
    assert not file.exists(), "another task"


def test_a_file_that_cannot_be_written_costs_memory_and_no_round(
    make_bench: MakeBench, on_features: Package, field: DeviceConfig, seen: list[str]
) -> None:
    bench = begun(make_bench, on_features, field)
    field.store_path.with_name(FEATURES).mkdir()
    open_and_wait(bench)
    assert bench.server.declines == []
    assert seen == ["kept False", "make True"]


def test_a_full_disk_costs_memory_and_no_round(
    make_bench: MakeBench, on_features: Package, field: DeviceConfig, monkeypatch: pytest.MonkeyPatch, seen: list[str]
) -> None:
    full = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))"
    runs(f"{NOTED}\n{full}", monkeypatch)
    bench = begun(make_bench, on_features, field)
    open_and_wait(bench)
    assert bench.server.declines == []
    assert seen == ["kept False", "make True", "kept False", "none True"]


class Lacking(InProcess):
    """A worker that lacks features whatever it gets."""

    jobs: list[str]

    def begin(self, job: Job) -> None:
        self.jobs.append(job.features)

    def poll(self) -> Outcome | None:
        return NeedsFeatures() if self.jobs else None


@pytest.mark.parametrize("has_features", [True, False])
def test_a_worker_that_always_lacks_features_is_dead(
    make_bench: MakeBench, on_features: Package, package: Package, field: DeviceConfig, has_features: bool
) -> None:
    bench = make_bench(package=on_features if has_features else package, config=field)
    lacking = bench.agent.rounds._handover._workshop = Lacking()
    lacking.jobs = []
    bench.opens(1)
    bench.until(lambda: bool(bench.server.declines))
    jobs = ["kept", "make", "kept", "none"] if has_features else ["none"]
    assert lacking.jobs == 2 * jobs, "with data, and without"
    assert bench.agent.rounds._handover._job.graphs == (), "a guardian keeps no megabytes"
    assert not bench.store.ledger.entries()


def samples_of(count: int) -> Samples:
    rng = np.random.default_rng(0)
    return Samples(rng.integers(0, 256, (count, 1, 8, 8), np.uint8), np.arange(count), (0.3,), (0.4,))


@pytest.fixture
def model(on_features: Package) -> ModelSpec:
    return on_features.spec.model


def kept(path: Path, model: ModelSpec, *, makes: bool = False) -> KeptFeatures:
    found = KeptFeatures(makes=makes)
    found.file = os.open(path, os.O_RDWR | os.O_CREAT)
    assert model.features is not None
    return found.of_task(model, FeatureGraph(features_graph, model.features) if makes else None)


@pytest.mark.parametrize("count", [0, 1, 7])
def test_they_are_the_graphs_own(tmp_path: Path, model: ModelSpec, count: int) -> None:
    samples, path = samples_of(count), tmp_path / "file"
    assert model.features is not None
    expected = FeatureGraph(features_graph, model.features).of(samples)
    for found in (kept(path, model, makes=True).of(samples), kept(path, model).of(samples)):
        np.testing.assert_array_equal(found.x, expected.x)
        np.testing.assert_array_equal(found.y, expected.y)


def test_only_new_samples_are_computed(tmp_path: Path, model: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    kept(tmp_path / "file", model, makes=True).of(samples_of(5))
    counts: list[int] = []
    real = FeatureGraph.computed

    def counted(self: FeatureGraph, samples: Samples, *, skips: bool) -> np.ndarray:
        counts.append(len(samples))
        return real(self, samples, skips=skips)

    monkeypatch.setattr(FeatureGraph, "computed", counted)
    kept(tmp_path / "file", model, makes=True).of(samples_of(8))
    assert counts == [3]


@pytest.mark.parametrize("fault", ["torn", "bit", "empty", "more", "fewer", "graph", "normal"])
def test_any_other_file_is_not_used(tmp_path: Path, model: ModelSpec, fault: str) -> None:
    path = tmp_path / "file"
    kept(path, model, makes=True).of(samples_of(5))
    data = bytearray(path.read_bytes())
    if fault == "torn":
        path.write_bytes(data[:-3])
    elif fault == "bit":
        data[100] ^= 1
        path.write_bytes(data)
    elif fault == "empty":
        path.write_bytes(b"")
    elif fault == "graph":
        assert model.features is not None
        model = replace(model, features=replace(model.features, graph=BlobRef(bytes(32), 9)))
    elif fault == "normal":
        model = replace(model, mean=(0.5,))
    with pytest.raises(FeaturesLacking):
        kept(path, model).of(samples_of({"more": 6, "fewer": 4}.get(fault, 5)))


def test_retention_deletes_them_too(tmp_path: Path) -> None:
    """The features of a photograph do not outlive it."""
    image, file = tmp_path / "data" / "a" / "1.png", tmp_path / FEATURES
    image.parent.mkdir(parents=True)
    image.write_bytes(b"an image")
    file.write_bytes(b"its features")
    now = [image.stat().st_ctime]
    retention = Retention(OwnDataSection("folder", str(tmp_path / "data"), keep="1d"), tmp_path, now=lambda: now[0])
    for day in range(4):
        assert file.exists() == image.exists()
        now[0] += 1.1 * DAY_S
        retention.advance(1e6 * day)
    assert not image.exists()
    assert not file.exists()
