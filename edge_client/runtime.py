"""A task ready to run on this device: its package checked, its graphs checked and loaded, its data at hand.

Graphs are programs from the network. Size and SHA-256 were checked while fetching; the operators are checked
here, before ONNX Runtime sees a byte.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from edge_client.config import DeviceConfig
from edge_client.local_data import LocalData
from edge_client.store import DeviceStore
from edge_client.trainer import FieldRandomness, Randomness, SeededRandomness, TrainedRound, Trainer
from hushfleet.graph_safety import check_graph
from hushfleet.graphs import GradientGraph, InferenceGraph
from hushfleet.methods import make_method
from hushfleet.spec import MAX_GRAPH_BYTES, TaskSpec


class TaskRuntime:
    """All that a round of one task needs.

    :param digest: SHA-256 of the task package.
    :param newcomer_digest: of the public state of a device that has not taken part yet.
    :param gradient: the gradient graph, ONNX bytes; likewise `inference`.

    Raises `GraphRefused` for a graph that breaks a rule, `Malformed` or `BadInput` for a method or a
    configuration of it that this device does not know.
    """

    def __init__(
        self,
        *,
        digest: bytes,
        spec: TaskSpec,
        gradient: bytes,
        inference: bytes,
        config: DeviceConfig,
        store: DeviceStore,
        observer: Callable[[TrainedRound], None] | None = None,
    ) -> None:
        method = make_method(spec.method, spec.method_config, spec.privacy, spec.model.layout, rounds=spec.rounds)
        for graph in (gradient, inference):
            check_graph(graph, max_bytes=MAX_GRAPH_BYTES)
        self.digest = digest
        self.newcomer_digest = method.init_state().public.digest()
        self.spec = spec
        self.data = LocalData(config.data, spec.model)
        self._config = config
        self._store = store
        self._observer = observer
        layout = spec.model.layout
        # One thread in a simulation: many devices share the machine, and sums must not depend on its cores.
        threads = 1 if config.simulation else os.cpu_count() or 1
        self.gradient = GradientGraph(gradient, layout, threads=threads)
        self.inference = InferenceGraph(inference, layout, threads=threads)

    def blobs(self) -> set[bytes]:
        """The digests that must stay in the store for a restart without the network."""
        return {self.digest, self.spec.model.gradient.digest, self.spec.model.inference.digest}

    def trainer(self) -> Trainer:
        """With the data as they are now. Raises `BadInput` where there are none."""
        limits = self._config.limits
        return Trainer(
            device=self._config.device.id,
            store=self._store,
            spec=self.spec,
            gradient=self.gradient,
            logits_of=self.inference,
            samples=self.data.samples(),
            randomness=self._randomness(),
            epsilon_limit=limits.epsilon_server,
            delta=limits.delta,
            preference=limits.noise_preference,
            observer=self._observer,
        )

    def _randomness(self) -> Randomness:
        simulation = self._config.simulation
        if simulation is None:
            return FieldRandomness()
        return SeededRandomness(simulation.seed, simulation.index)
