"""A task ready to run on this device: its package checked, its graphs checked and loaded, its data at hand.

Graphs are programs from the network. Size and SHA-256 were checked while fetching; the operators, and what the
largest batch needs in memory and work, are checked here, before ONNX Runtime sees a byte.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np

from hushfleet.config.spec import MAX_GRAPH_BYTES, TaskSpec
from hushfleet.edge_client.board.config import DeviceConfig
from hushfleet.edge_client.board.constant_time import nominal_seconds
from hushfleet.edge_client.board.local_data import LocalData
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.edge_client.trainer import FieldRandomness, Randomness, SeededRandomness, TrainedRound, Trainer
from hushfleet.graphs.safety import check_graph
from hushfleet.graphs.session import GradientGraph, InferenceGraph
from hushfleet.graphs.shapes import check_cost
from hushfleet.methods import make_method
from hushfleet.model.evaluation import EVALUATION_BATCH


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
        # The sizes are the task's: whether a graph is refused must not tell how many samples this device has.
        for graph, batch in ((gradient, method.config.batch_size), (inference, EVALUATION_BATCH)):
            facts = check_graph(graph, max_bytes=MAX_GRAPH_BYTES)
            check_cost(facts, batch=batch, memory_bytes=config.memory_mib << 20)
        self.digest = digest
        self.newcomer_digest = method.init_state().public.digest()
        self.spec = spec
        self.data = LocalData(config.data, spec.model, may_be_empty=spec.privacy.unit == "record")
        self._nominal_s: float | None = None
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

    @property
    def constant_time(self) -> bool:
        """Whether the end of a round is announced at a moment that does not follow the number of records."""
        asked = self._config.limits.constant_time
        in_the_field = self._config.simulation is None
        return (in_the_field and self.spec.privacy.unit == "record") if asked is None else asked

    def nominal_seconds(self, params: np.ndarray, *, clock: Callable[[], float]) -> float:
        """What a round's training takes on this board by the task alone; measured once."""
        if self._nominal_s is None:
            self._nominal_s = nominal_seconds(self.spec, params, self.gradient, self.inference, clock=clock)
        return self._nominal_s

    def trainer(self) -> Trainer:
        """With the data as they are when it needs them."""
        return Trainer(
            device=self._config.device.id,
            store=self._store,
            spec=self.spec,
            gradient=self.gradient,
            logits_of=self.inference,
            samples=self.data.samples,
            randomness=self._randomness(),
            limits=self._config.limits,
            observer=self._observer,
        )

    def _randomness(self) -> Randomness:
        simulation = self._config.simulation
        if simulation is None:
            return FieldRandomness()
        return SeededRandomness(simulation.seed, simulation.index)
