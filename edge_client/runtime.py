"""Prepares a task to run on this device: checks and loads its package and graphs, and opens the data.

Graphs are programs from the network. Their size and SHA-256 were checked while they were fetched. Their operators, and
the memory and work that the largest batch needs, are checked here, before ONNX Runtime reads a byte.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import numpy as np

from hushfleet.config.spec import TaskSpec
from hushfleet.edge_client.board.accelerator import AcceleratedGradient, AcceleratorTrial
from hushfleet.edge_client.board.by_content import check_by_content
from hushfleet.edge_client.board.config import DeviceConfig
from hushfleet.edge_client.board.consent import check_stored
from hushfleet.edge_client.board.constant_time import nominal_seconds
from hushfleet.edge_client.board.drift import has_become_worse, read_tests
from hushfleet.edge_client.board.local_data import SETTLED_S, LocalData
from hushfleet.edge_client.board.notes import notes_in
from hushfleet.edge_client.board.pacing import Pacer
from hushfleet.edge_client.board.process import return_small_blocks
from hushfleet.edge_client.declines import Declined
from hushfleet.edge_client.metrics import MetricsFile
from hushfleet.edge_client.randomness import FieldRandomness, SeededRandomness
from hushfleet.edge_client.storage.round_commit import OutboxEntry
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.edge_client.trainer import DeviceRound, Trainer
from hushfleet.errors import GraphRefused, Malformed
from hushfleet.graphs.features import FeatureGraph, check_features, features_folder
from hushfleet.graphs.safety import check_graph, check_masks
from hushfleet.graphs.session import GradientGraph, InferenceGraph
from hushfleet.graphs.shapes import check_cost
from hushfleet.methods import method_of
from hushfleet.methods.privatize import NoisedUpdate
from hushfleet.model.evaluation import EVALUATION_BATCH
from hushfleet.training.local_round import Trained

_log = logging.getLogger("hushfleet.edge")


class TaskRuntime:
    """Everything that the rounds of one task need.

    :param digest: SHA-256 of the task package.
    :param gradient: the gradient graph, ONNX bytes.
    :param inference: the inference graph, ONNX bytes; `features`: the graph of the task's features, if it has any.
    :param clock: monotonic seconds.
    :param counted: as `Trainer.now`.

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
        features: bytes | None = None,
        config: DeviceConfig,
        store: DeviceStore,
        clock: Callable[[], float] = time.monotonic,
        counted: Callable[[], int] = lambda: 0,
    ) -> None:
        simulation, layout, tells_drift = config.simulation, spec.model.layout, config.limits.tell_drift
        method = method_of(spec)
        if method.parts.of_classes and not spec.model.targets.are_classes:
            raise Malformed(f"method {spec.method!r} is defined for classes alone, and the task has other targets")
        objective = spec.model.targets.objective(method.objective)
        # The sizes come from the task, because a refused graph must not reveal how many samples this device has.
        facts, memory_bytes = check_graph(gradient), config.memory_mib << 20
        check_masks(facts, spec.model.dropout)
        cost = check_cost(facts, batch=method.config.batch_size, memory_bytes=memory_bytes)
        check_cost(check_graph(inference), batch=EVALUATION_BATCH, memory_bytes=memory_bytes)
        # One thread in a simulation: many devices share the machine, and sums must not depend on its cores.
        threads = 1 if simulation else os.cpu_count() or 1
        self.features: FeatureGraph | None = None
        if spec.model.features is not None:
            features = features or b""
            check_features(features, spec.model.features, memory_bytes=memory_bytes)
            shared = None if simulation is None or simulation.common_test is None else Path(simulation.common_test)
            cache = None if shared is None else features_folder(shared.parent)
            self.features = FeatureGraph(
                self._feature_graph,
                spec.model.features,
                given=spec.model.input_shape[0],
                threads=threads,
                cache=cache,
                loaded=return_small_blocks,
            )
        if spec.data_window_s and not method.parts.takes_empty:
            raise Malformed(f"method {spec.method!r} takes no device without samples, as a window may leave it")
        check_by_content(config.data, spec)
        if spec.data_window_s and not store.ledger.entries():
            store.arrivals.forget()  # before the first training, each start trusts its own clock
        self.digest = digest
        self.spec = spec
        self.newcomer_digest = method.init_state().public.digest()  # a device that has not taken part yet
        of_data, self._note = notes_in(None if simulation else config.store_path.parent)
        self.data = LocalData(
            config.data,
            spec.model,
            features=self.features,
            may_be_empty=method.parts.takes_empty or spec.training_rounds == 0,
            note=of_data,
            settled_s=0.0 if simulation else SETTLED_S,
            arrivals=lambda keys: store.arrivals.of(keys, now=counted()),
            held_out=spec.held_out,
            by_content=spec.by_content,
        )
        self.inference = InferenceGraph(inference, layout, threads=threads)
        self.gradient = AcceleratorTrial(
            gradient,
            GradientGraph(gradient, layout, objective=objective, threads=threads),
            self.inference,
            task=digest,
            spec=spec,
            cost=cost,
            threads=threads,
            config=config,
            store=store,
        ).gradient()
        self._store = store
        self._clock = clock
        self._metrics = MetricsFile.of(config, self.features)
        self._began_training = clock()
        self._apart: Callable[[], AbstractContextManager[None]] = nullcontext
        self._nominal_s: float | None = None
        asked, in_the_field = config.limits.constant_time, simulation is None
        self.constant_time = in_the_field and spec.privacy.unit == "record" if asked is None else asked
        """True if the end of a round is announced at a time that does not depend on the number of records."""
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
            worse=(lambda: has_become_worse(read_tests(config.store_path.parent))) if tells_drift else lambda: None,
            randomness=SeededRandomness(simulation.seed, simulation.index) if simulation else FieldRandomness(),
            limits=config.limits,
            observer=None if self._metrics is None else self._write_metrics,
            replace_failed_training=True,
            arrived=self.data.samples,
            now=counted,
        )
        return_small_blocks()

    def blobs(self) -> set[bytes]:
        """Returns the digests that must stay in the store for a restart without the network."""
        return {self.digest, *(graph.digest for graph in self.spec.model.graphs)}

    def check_stored(self, entry: OutboxEntry) -> None:
        """Checks that the owner still allows a stored update. Otherwise raises `Declined`; it is then never sent."""
        try:
            for each in self._store.ledger.entries(entry.task):
                if each.round == entry.round:
                    check_stored(each.charge, self.spec.method, self.trainer.limits)
        except Declined:
            self._store.set_status(entry.task, entry.round, "refused:owner")
            raise

    def _feature_graph(self) -> bytes:
        """Reads the graph when features are computed, which is once: it takes megabytes. Raises `GraphRefused`."""
        spec = self.spec.model.features
        graph = None if spec is None else self._store.blob(spec.graph.digest)
        if graph is None:
            raise GraphRefused("the graph of the task's features is not in the store any more; restart the client")
        return graph

    def nominal_seconds(self, params: np.ndarray) -> float | None:
        """Returns the training time that the task alone implies, measured once here; None if the time is no secret."""
        if self.constant_time and self._nominal_s is None:
            self._nominal_s = nominal_seconds(self.spec, params, self.gradient, self.inference, clock=self._clock)
        return self._nominal_s

    def use_processor(self, reason: str) -> None:
        """Computes gradients on the processor from now on."""
        if isinstance(self.gradient, AcceleratedGradient):
            self.gradient.give_up(reason)

    def run_round(self, round: DeviceRound, params: np.ndarray, pacer: Pacer) -> OutboxEntry:
        """Runs the round, and stores on the board what went wrong with the data."""
        self._began_training, self._apart = self._clock(), pacer.apart
        entry = round.run(params, on_batch=lambda done, total: pacer.step())
        self._note.keep(round.failed)
        return entry

    def _write_metrics(self, round: DeviceRound, trained: Trained, noised: NoisedUpdate) -> None:
        if self._metrics is None:
            return
        train_s = self._clock() - self._began_training
        try:
            with self._apart():
                self._metrics.write(round, trained, noised, train_s=train_s)
        except OSError as error:  # the round continues without metrics
            _log.error("no metrics are kept of round %d: %s", round.plan.round, error)
