"""Prepares a task to be trained here: checks and loads its graphs, and opens the data.

Graphs are programs from the network. Their size and SHA-256 were checked while they were fetched. Their operators, and
the memory and work that the largest batch needs, are checked here, before ONNX Runtime reads a byte: no size may depend
on a label, or be larger for one number of samples than for a larger one, because a failure and the time that training
takes can be seen. Below these rules the process limits what a graph can take (`limits`).
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hushfleet.at_need import at_need
from hushfleet.edge_client.board.accelerator import AcceleratorTrial
from hushfleet.edge_client.board.config import DeviceConfig
from hushfleet.edge_client.board.local_data import SETTLED_S, LocalData
from hushfleet.edge_client.board.notes import Note
from hushfleet.edge_client.board.process import return_small_blocks
from hushfleet.edge_client.storage.kept import ChosenAccelerator
from hushfleet.edge_client.worker.job_store import JobStore
from hushfleet.edge_client.worker.randomness import FieldRandomness, SeededRandomness
from hushfleet.edge_client.worker.trainer import DeviceRound, Trainer
from hushfleet.learning.evaluation import EVALUATION_BATCH
from hushfleet.learning.graph_safety import check_graph, check_masks
from hushfleet.learning.graph_session import GradientGraph, InferenceGraph
from hushfleet.learning.graph_shapes import check_cost
from hushfleet.methods import method_of
from hushfleet.methods.local_round import Trained
from hushfleet.methods.privatize import NoisedUpdate
from hushfleet.paths import features_folder
from hushfleet.wire.format.spec import TaskSpec

if TYPE_CHECKING:
    from hushfleet.edge_client.board import nominal_time
    from hushfleet.edge_client.worker import metrics
    from hushfleet.learning import graph_features
else:
    nominal_time = at_need("hushfleet.edge_client.board.nominal_time")
    metrics = at_need("hushfleet.edge_client.worker.metrics")
    graph_features = at_need("hushfleet.learning.graph_features")

_log = logging.getLogger("hushfleet.edge")


class LoadedTask:
    """Everything that the rounds of one task need.

    :param digest: SHA-256 of the task package.
    :param graphs: ONNX files, in the order of `ModelSpec.graphs`.
    :param store: the job's part of the device's store.
    :param clock: monotonic seconds.
    :param accelerator: what was chosen for it before; `processor_only`: nothing is tried.

    Raises `GraphRefused` for a graph that breaks a rule, `Malformed` or `BadInput` for a method or a configuration of
    it that this device does not know.
    """

    def __init__(
        self,
        spec: TaskSpec,
        graphs: Sequence[bytes],
        *,
        digest: bytes,
        config: DeviceConfig,
        store: JobStore,
        note: Note,
        clock: Callable[[], float] = time.monotonic,
        accelerator: ChosenAccelerator | None = None,
        processor_only: bool = False,
    ) -> None:
        simulation, layout = config.simulation, spec.model.layout
        self.spec, self._store, self._clock, self._began = spec, store, clock, clock()
        method = method_of(spec)
        objective = spec.model.targets.objective(method.objective)
        gradient, inference = graphs[:2]
        # The sizes come from the task, because a refused graph must not reveal how many samples this device has.
        facts, memory_bytes = check_graph(gradient), config.memory_mib << 20
        check_masks(facts, spec.model.dropout)
        check_cost(facts, batch=method.config.batch_size, memory_bytes=memory_bytes)
        check_cost(check_graph(inference), batch=EVALUATION_BATCH, memory_bytes=memory_bytes)
        # One thread in a simulation: many devices share the machine, and sums must not depend on its cores.
        threads = 1 if simulation else os.cpu_count() or 1
        features: graph_features.FeatureGraph | None = None
        if spec.model.features is not None:
            graph_features.check_features(graphs[2], spec.model.features, memory_bytes=memory_bytes)
            shared = None if simulation is None or simulation.common_test is None else Path(simulation.common_test)
            features = graph_features.FeatureGraph(
                lambda: graphs[2],
                spec.model.features,
                given=spec.model.input_shape[0],
                threads=threads,
                cache=None if shared is None else features_folder(shared.parent),
                loaded=return_small_blocks,
            )
        self.data = LocalData(
            config.data,
            spec.model,
            features=features,
            may_be_empty=method.parts.takes_empty or spec.training_rounds == 0,
            note=note,
            settled_s=0.0 if simulation else SETTLED_S,
            arrivals=store.arrived,
            held_out=spec.held_out,
            by_content=spec.by_content,
        )
        self.inference = InferenceGraph(inference, layout, threads=threads)
        self._trial = AcceleratorTrial(
            gradient,
            GradientGraph(gradient, layout, objective=objective, threads=threads),
            self.inference,
            task=digest,
            spec=spec,
            threads=threads,
            config=config,
            kept=accelerator,
            wanted="cpu" if simulation is not None or processor_only else config.device.accelerator,
        )
        self.gradient = self._trial.gradient()
        self._metrics = None if simulation is None else metrics.MetricsFile.of(config, features)
        self.trainer = Trainer(
            device=config.device.id,
            store=store,
            spec=spec,
            method=method,
            gradient=self.gradient,
            logits_of=self.inference,
            samples=self.data.samples,
            held_out=self.data.held_out,
            left_out=lambda: self.data.left_out,
            worse=lambda: store.job.worse,
            randomness=SeededRandomness(simulation.seed, simulation.index) if simulation else FieldRandomness(),
            limits=config.limits,
            observer=None if self._metrics is None else self._write_metrics,
            replace_failed_training=True,
            arrived=self.data.samples,
        )
        return_small_blocks()

    @property
    def chosen(self) -> ChosenAccelerator | None:
        """The place where gradients are computed; None if there was nothing to choose."""
        return self._trial.chosen

    def nominal_seconds(self, params: np.ndarray) -> float:
        """Measures the training time that the task alone implies."""
        return nominal_time.nominal_seconds(self.spec, params, self.gradient, self.inference, clock=self._clock)

    def begins(self) -> None:
        """Notes that a round begins."""
        self._began = self._clock()

    def _write_metrics(self, round: DeviceRound, trained: Trained, noised: NoisedUpdate) -> None:
        assert self._metrics is not None
        train_s = self._clock() - self._began
        try:
            self._metrics.write(round, trained, noised, train_s=train_s)
        except OSError as error:  # the round continues without metrics
            _log.error("no metrics are kept of round %d: %s", round.plan.round, error)
