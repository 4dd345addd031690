"""Another provider than the processor's: chosen by a trial, never needed. CUDA is played by one that is here."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from hushfleet.edge_client.board import accelerator
from hushfleet.edge_client.board.accelerator import AcceleratedGradient, free_memory_bytes
from hushfleet.edge_client.board.config import DeviceConfig
from hushfleet.edge_client.status import format_status, status
from hushfleet.errors import GraphRefused
from hushfleet.learning.graph_session import GradientGraph
from support.edge import Bench

MakeBench = Callable[..., Bench]
OTHER = "AzureExecutionProvider"  # in every build of ONNX Runtime; it leaves all operators to the processor

assert OTHER in ort.get_available_providers()


@pytest.fixture
def board(config: DeviceConfig, monkeypatch: pytest.MonkeyPatch) -> DeviceConfig:
    """A board with a GPU that is three times as fast as its processor, and memory enough."""
    monkeypatch.setattr(accelerator, "PROVIDER", OTHER)
    monkeypatch.setattr(accelerator, "free_memory_bytes", lambda: 1 << 32)
    monkeypatch.setattr("hushfleet.edge_client.board.nominal_time.nominal_seconds", seconds(gpu=1.0, cpu=3.0))
    return replace(config, simulation=None, limits=replace(config.limits, memory_mib=2000, constant_time=False))


def seconds(*, gpu: float, cpu: float) -> Callable[..., float]:
    def nominal(spec: object, params: object, gradient: GradientGraph, logits_of: object, *, clock: object) -> float:
        return gpu if OTHER in gradient._graph.session.get_providers() else cpu

    return nominal


def wanting(config: DeviceConfig, wanted: Any) -> DeviceConfig:
    return replace(config, device=replace(config.device, accelerator=wanted))


def train(bench: Bench, round: int = 1) -> Any:
    bench.server.open_round(round)
    bench.acked(round)
    return bench.loaded.gradient


def test_what_is_right_and_faster_is_used_and_kept(
    make_bench: MakeBench, board: DeviceConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make_bench(config=board)
    assert isinstance(train(bench), AcceleratedGradient)
    kept = bench.store.accelerator()
    assert kept is not None
    assert (kept.used, kept.runtime) == ("cuda", ort.__version__)
    assert kept.reason == "in a trial the GPU took 0.33 times as long as the processor"
    report = status(bench.config, bench.store)
    assert report["accelerator"] == {"used": "cuda", "words": kept.reason}
    assert f"computes    on the GPU: {kept.reason}" in format_status(report, details=True)

    monkeypatch.setattr("hushfleet.edge_client.board.nominal_time.nominal_seconds", seconds(gpu=9.0, cpu=3.0))
    bench.restart()
    assert isinstance(train(bench, 2), AcceleratedGradient), "the trial is made once"
    monkeypatch.setattr(ort, "__version__", "99.0")
    bench.restart()
    assert isinstance(train(bench, 3), GradientGraph), "another ONNX Runtime is tried anew"


@pytest.mark.parametrize(
    ("wanted", "gpu", "free_mib", "used"),
    [("auto", 4.0, 4000, "cpu"), ("cuda", 4.0, 4000, "cuda"), ("auto", 1.0, 700, "cpu"), ("cuda", 1.0, 700, "cpu")],
)
def test_a_choice_follows_speed_and_memory(
    make_bench: MakeBench,
    board: DeviceConfig,
    monkeypatch: pytest.MonkeyPatch,
    wanted: str,
    gpu: float,
    free_mib: int,
    used: str,
) -> None:
    monkeypatch.setattr("hushfleet.edge_client.board.nominal_time.nominal_seconds", seconds(gpu=gpu, cpu=3.0))
    monkeypatch.setattr(accelerator, "free_memory_bytes", lambda: free_mib << 20)
    bench = make_bench(config=wanting(board, wanted))
    train(bench)
    kept = bench.store.accelerator()
    assert kept is not None
    assert kept.used == used
    assert ("MiB are free" in kept.reason) == (free_mib == 700)


def test_nothing_is_chosen_where_there_is_nothing_to_choose(
    make_bench: MakeBench, board: DeviceConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench = make_bench(config=wanting(board, "cpu"))
    assert isinstance(train(bench), GradientGraph)
    monkeypatch.setattr(accelerator, "PROVIDER", "NoneExecutionProvider")
    bench.restart(device=wanting(board, "cuda").device)
    assert isinstance(train(bench, 2), GradientGraph)
    assert bench.store.accelerator() is None
    assert status(bench.config, bench.store)["accelerator"] is None
    assert "device.accelerator is cuda, and ONNX Runtime" in caplog.text


def spoilt(monkeypatch: pytest.MonkeyPatch, spoil: Callable[[int], float]) -> None:
    """The other provider's n-th gradient is multiplied by `spoil(n)`, which may raise."""
    real, calls = GradientGraph.__call__, [0]

    def call(self: GradientGraph, *arguments: Any, **named: Any) -> tuple[float, np.ndarray]:
        loss, gradient = real(self, *arguments, **named)
        if OTHER in self._graph.session.get_providers():
            calls[0] += 1
            gradient *= spoil(calls[0])
        return loss, gradient

    monkeypatch.setattr(GradientGraph, "__call__", call)


def test_a_provider_that_computes_wrong_is_not_used(
    make_bench: MakeBench, board: DeviceConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoilt(monkeypatch, lambda count: 1.01 if count == 4 else 1.0)
    bench = make_bench(config=wanting(board, "cuda"))
    assert isinstance(train(bench), GradientGraph)
    kept = bench.store.accelerator()
    assert kept is not None
    assert kept.reason == "the GPU is not used: its gradients differ from the processor's by 0.01 of their length"


def test_a_failure_in_the_middle_loses_no_round(
    make_bench: MakeBench, board: DeviceConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(count: int) -> float:
        if count > 5:  # four batches are compared, and the round has three
            raise GraphRefused("CUDA failure 700: an illegal memory access")
        return 1.0

    spoilt(monkeypatch, failing)
    bench = make_bench(config=board)
    train(bench)
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert line.startswith("the GPU failed: CUDA failure 700: an illegal memory access; from now on")
    kept = bench.store.accelerator()
    assert kept is not None
    assert (kept.used, kept.chosen) == ("cpu", "cuda"), "what the fleet hears does not follow what happened to images"
    bench.restart()
    assert isinstance(train(bench, 2), GradientGraph)


def test_a_record_on_which_the_graph_itself_fails_leaves_the_others_on_the_gpu() -> None:
    """With the unit `record` it may change nothing but its own gradient, and the processor's have other last bits."""

    def refusing(times: float) -> Callable[..., tuple[float, np.ndarray]]:
        def call(params: np.ndarray, x: np.ndarray) -> tuple[float, np.ndarray]:
            if x.max() > 1:
                raise GraphRefused("ONNX Runtime cannot execute the graph on this batch")
            return 0.0, times * x

        return call

    failures: list[str] = []
    gradient: Any = AcceleratedGradient(refusing(1.0), refusing(1.001), failures.append)  # type: ignore[arg-type]
    params, x = np.zeros(1), np.ones(1)
    with pytest.raises(GraphRefused):
        gradient(params, 2 * x)
    assert gradient(params, x)[1] == 1.001
    assert not failures


def test_the_processor_goes_on_after_a_round_that_ended_the_client(make_bench: MakeBench, board: DeviceConfig) -> None:
    bench = make_bench(config=board)
    bench.store.count_attempt("round", "digits-test/1")
    assert isinstance(train(bench), GradientGraph)


def test_memory_is_read_as_the_kernel_tells_it() -> None:
    assert 1 << 20 < free_memory_bytes() < 1 << 50
