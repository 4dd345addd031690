"""Fixtures of a device: a small real task, its configuration, and a bench with both sides (edge.py).

A folder whose tests need them imports them in its conftest.py, or a test file imports them itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hushfleet.edge_client.agent import Agent
from hushfleet.edge_client.board.config import (
    BrokerSection,
    DeviceConfig,
    DeviceSection,
    LimitsSection,
    OwnDataSection,
    SimulationSection,
)
from hushfleet.edge_client.fleet.health import BoardHealth
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.edge_client.worker.in_process import InProcess
from hushfleet.models import get_model
from hushfleet.models.export import export_graphs
from hushfleet.simulator.world.hub import Chaos, LocalHub
from hushfleet.wire.format.spec import BlobRef, DropoutSpec, ModelSpec, PrivacySpec, TaskSpec, WireSpec
from support.edge import CHUNK_BYTES, DEVICE, Bench, Clock, Package, ScriptedAggregator, Stop, write_samples


@pytest.fixture(scope="session")
def package() -> Package:
    model = get_model("digits-cnn")
    graphs = export_graphs(model)
    spec = TaskSpec(
        task="digits-test",
        rounds=5,
        method="dp-fedavg",
        method_config={"batch_size": 16, "local_epochs": 1},
        privacy=PrivacySpec("device", "strict", clip_norm=1.0, noise_multiplier=2.0, delta=1e-5),
        wire=WireSpec(step=0.25, chunk_bytes=CHUNK_BYTES),  # updates of several chunks
        model=ModelSpec(
            name=model.name,
            layout=model.layout,
            input_shape=model.input_shape,
            class_names=tuple(str(i) for i in range(10)),
            mean=(0.3,),
            std=(0.4,),
            dropout=tuple(DropoutSpec(tuple(d.shape), d.rate) for d in model.dropout),
            gradient=BlobRef.of(graphs.gradient),
            inference=BlobRef.of(graphs.inference),
        ),
        memory_mib=100,
    )
    blobs = {hashlib.sha256(graph).digest(): graph for graph in (graphs.gradient, graphs.inference)}
    return Package(spec, b"", blobs, model.init(7)).with_spec()


@pytest.fixture(scope="session")
def linear(package: Package) -> Package:
    """A task whose model is one linear layer, so that a device chooses a head of its own."""
    model = get_model("linear", input_shape=(1, 8, 8))
    graphs = export_graphs(model)
    spec = replace(
        package.spec.model,
        name="linear",
        layout=model.layout,
        gradient=BlobRef.of(graphs.gradient),
        inference=BlobRef.of(graphs.inference),
        dropout=(),
    )
    blobs = {hashlib.sha256(graph).digest(): graph for graph in (graphs.gradient, graphs.inference)}
    return replace(package, blobs=blobs, initial=model.init(7)).with_spec(model=spec)


@pytest.fixture
def config(tmp_path: Path) -> DeviceConfig:
    write_samples(tmp_path / "train.npz")
    return DeviceConfig(
        device=DeviceSection(DEVICE, str(tmp_path / "state"), federation="test"),
        broker=BrokerSection("mqtt://localhost"),
        data=OwnDataSection("arrays", str(tmp_path / "train.npz"), values="pixels"),
        limits=LimitsSection(epsilon_server=1000.0, memory_mib=500),
        simulation=SimulationSection(seed=1, index=0),
    )


@pytest.fixture
def make_bench(package: Package, config: DeviceConfig) -> Iterator[Callable[..., Bench]]:
    """`make_bench(package=..., config=...)`: a device that is started, and an aggregator that has announced.

    :param durable: as on a board: commits are synced, and pages are so small that a full file has no room left.
    """
    benches: list[Bench] = []

    def make(
        package: Package = package,
        config: DeviceConfig = config,
        *,
        announce: bool = True,
        chaos: Chaos | None = None,
        durable: bool = False,
    ) -> Bench:
        hub, clock = LocalHub(chaos=chaos), Clock()
        server = ScriptedAggregator(hub, package)
        store = DeviceStore(config.store_path, device=DEVICE, durable=durable)
        health = None if config.fleet is None else BoardHealth(config, now=clock())
        agent = Agent(
            config,
            lambda will: hub.link(DEVICE, will),
            store,
            clock=clock,
            stop=Stop(clock),
            health=health,
            workshop=InProcess(clock=clock),
        )
        bench = Bench(hub, server, config, clock, store, agent)
        benches.append(bench)
        agent.start()
        if announce:
            server.announce()
        return bench

    yield make
    for bench in benches:
        bench.agent.close()
        bench.store.close()
