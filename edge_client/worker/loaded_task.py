"""Prepares a task to be trained here: what computes its gradients and features, and the data.

A linear model's gradient is a formula, so none of its graphs for the network is run (`learning.linear`). Other graphs
are checked and loaded by `task_graphs`.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from hushfleet.at_need import at_need
from hushfleet.edge_client.board.config import DeviceConfig
from hushfleet.edge_client.board.local_data import SETTLED_S, LocalData
from hushfleet.edge_client.board.notes import Note
from hushfleet.edge_client.board.process import return_small_blocks
from hushfleet.edge_client.storage.kept import ChosenAccelerator
from hushfleet.edge_client.worker.job_store import JobStore
from hushfleet.edge_client.worker.kept_features import KeptFeatures
from hushfleet.edge_client.worker.randomness import FieldRandomness, SeededRandomness
from hushfleet.edge_client.worker.trainer import DeviceRound, Trainer
from hushfleet.errors import GraphRefused
from hushfleet.learning.batch import GradientFunction
from hushfleet.learning.evaluation import LogitsOf
from hushfleet.methods import method_of
from hushfleet.methods.local_round import Trained
from hushfleet.methods.privatize import NoisedUpdate
from hushfleet.wire.format.spec import TaskSpec

if TYPE_CHECKING:
    from hushfleet.edge_client.board import nominal_time
    from hushfleet.edge_client.board.accelerator import AcceleratorTrial
    from hushfleet.edge_client.worker import metrics, task_graphs
    from hushfleet.learning import linear
    from hushfleet.learning.graph_features import FeatureGraph
else:
    nominal_time = at_need("hushfleet.edge_client.board.nominal_time")
    metrics = at_need("hushfleet.edge_client.worker.metrics")
    task_graphs = at_need("hushfleet.edge_client.worker.task_graphs")
    linear = at_need("hushfleet.learning.linear")

_log = logging.getLogger("hushfleet.edge")


class LoadedTask:
    """Everything that the rounds of one task need.

    :param digest: SHA-256 of the task package.
    :param graphs: ONNX files, in the order of `ModelSpec.graphs`.
    :param store: the job's part of the device's store.
    :param clock: monotonic seconds.
    :param accelerator: what was chosen for it before; `processor_only`: nothing is tried.
    :param kept_features: the board's file of features, if this task uses it.

    Raises `GraphRefused` for a graph or a size that breaks a rule, `Malformed` or `BadInput` for a method or a
    configuration of it that this device does not know.
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
        kept_features: KeptFeatures | None = None,
    ) -> None:
        simulation, layout = config.simulation, spec.model.layout
        self.spec, self._store, self._clock, self._began = spec, store, clock, clock()
        method = method_of(spec)
        # One thread in a simulation: many devices share the machine, and sums must not depend on its cores.
        threads = 1 if simulation else os.cpu_count() or 1
        self._trial: AcceleratorTrial | None = None
        self.gradient: GradientFunction
        self.inference: LogitsOf
        if spec.model.is_linear:
            objective = spec.model.targets.objective(method.objective)
            linear.check_memory(layout, batch=method.config.batch_size, memory_bytes=config.memory_mib << 20)
            self.gradient = gradient = linear.LinearGradient(layout, objective)
            self.inference = gradient.logits
        else:
            self._trial, self.inference = task_graphs.open_network(
                graphs,
                spec,
                method,
                digest=digest,
                config=config,
                threads=threads,
                accelerator=accelerator,
                processor_only=processor_only,
            )
            self.gradient = self._trial.gradient()
        graph: FeatureGraph | None = None
        if spec.model.features is not None and (kept_features is None or kept_features.makes):
            graph = task_graphs.open_features(graphs[2], spec, config=config, threads=threads)
        features = graph if kept_features is None else kept_features.of_task(spec.model, graph)
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
            one_a_clip=spec.privacy.unit == "record",
        )
        self._metrics = None if simulation is None else metrics.MetricsFile.of(config, graph)
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
            trained=self._give_back,
            observer=None if self._metrics is None else self._write_metrics,
            replace_failed_training=True,
            arrived=self.data.samples,
        )
        return_small_blocks()

    @property
    def chosen(self) -> ChosenAccelerator | None:
        """The place where gradients are computed; None if there was nothing to choose."""
        return None if self._trial is None else self._trial.chosen

    def nominal_seconds(self, params: np.ndarray) -> float:
        """Measures the training time that the task alone implies."""
        return nominal_time.nominal_seconds(self.spec, params, self.gradient, self.inference, clock=self._clock)

    def begins(self) -> None:
        """Notes that a round begins."""
        self._began = self._clock()

    def _give_back(self) -> None:
        """Makes room for the update, which takes as much memory as the training's batches."""
        if self._trial is not None and self._store.job.config.simulation is None:
            with suppress(GraphRefused):  # it works without
                self._trial.cpu.give_back()
            return_small_blocks()

    def _write_metrics(self, round: DeviceRound, trained: Trained, noised: NoisedUpdate) -> None:
        assert self._metrics is not None
        train_s = self._clock() - self._began
        try:
            self._metrics.write(round, trained, noised, train_s=train_s)
        except OSError as error:  # the round continues without metrics
            _log.error("no metrics are kept of round %d: %s", round.plan.round, error)
