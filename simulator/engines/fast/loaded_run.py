"""Loads the contents of a run folder at their first use, and keeps them in the worker."""

from __future__ import annotations

import gc
import json
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hushfleet.aggregator.storage.checkpoints import Checkpoints
from hushfleet.data.form import PUBLIC_DATA
from hushfleet.data.held_out import both_parts
from hushfleet.data.samples import LabelledSamples, Samples, inputs_of
from hushfleet.edge_client.board.config import LimitsSection
from hushfleet.edge_client.board.sample_files import load_arrays, load_indices
from hushfleet.edge_client.worker.metrics import evaluations, is_tested_later
from hushfleet.errors import BadInput
from hushfleet.learning.anomaly import alarm_rates, divided, errors_of, judging, own_reconstruction, threshold
from hushfleet.learning.batch import GradientFunction
from hushfleet.learning.evaluation import Evaluation, LogitsOf
from hushfleet.learning.graph_session import InferenceGraph
from hushfleet.learning.linear import LinearGradient
from hushfleet.learning.own_metrics import Metrics
from hushfleet.learning.own_metrics import load as load_metrics
from hushfleet.losses import normal
from hushfleet.methods import method_of
from hushfleet.methods.task_method import TaskMethod
from hushfleet.models import is_own
from hushfleet.objectives import Objective
from hushfleet.paths import in_file
from hushfleet.secure.membership_list import MembershipList
from hushfleet.secure.secure_round import SecureRound
from hushfleet.simulator.cohort_store import StateSlots, index_of
from hushfleet.simulator.engines.fast.runtimes import ON_DEVICES, make_gradient
from hushfleet.simulator.engines.fast.sums import SummedRound, UnmaskedRound
from hushfleet.simulator.fleet import Fleet, SimulatedDevice
from hushfleet.simulator.run_folder import RunFolder, public_fleet
from hushfleet.wire.format.messages import RoundPlan
from hushfleet.wire.format.spec import BlobRef, SecureSpec, TaskSpec

if TYPE_CHECKING:
    from hushfleet.learning.graph_features import FeatureGraph

KEPT_BYTES = 1 << 29  # of training images in each worker; others are read again when they are used


class LoadedRun:
    """Loads the contents of a run folder when they are first used.

    :param runtime: runtime that computes gradients, one of `hushfleet.simulator.engines.fast.runtimes.RUNTIMES`.
    """

    def __init__(self, path: Path, runtime: str) -> None:
        self.folder = RunFolder(path)
        self.runtime = runtime
        self._train: dict[str, LabelledSamples] = {}  # the last used entry comes last
        self._train_bytes = 0
        self._limits: dict[tuple[float, float], LimitsSection] = {}
        self._global: tuple[bytes, np.ndarray] | None = None
        self.secure: SecureRound | None = None

    @cached_property
    def spec(self) -> TaskSpec:
        return TaskSpec.from_bytes(self.folder.package.read_bytes())

    @cached_property
    def package(self) -> bytes:
        """SHA-256 of the task package."""
        return BlobRef.of(self.folder.package.read_bytes()).digest

    @cached_property
    def slots(self) -> StateSlots:
        return StateSlots(self.folder.states)

    def limits(self, epsilon_limit: float, preference: float) -> LimitsSection:
        """Returns what a device allows; most allow the same."""
        key = epsilon_limit, preference
        if key not in self._limits:
            self._limits[key] = LimitsSection.of_simulation(
                self.spec.privacy, epsilon_server=epsilon_limit, noise_preference=preference
            )
        return self._limits[key]

    @cached_property
    def method(self) -> TaskMethod:
        return method_of(self.spec)

    @cached_property
    def network(self) -> str:
        """The name for `get_model`: devices know a network in a file by the file's name, not by its path."""
        name = self.spec.model.name
        return self._model["name"] if in_file(name) else name

    @cached_property
    def _model(self) -> dict[str, str]:
        """The section `model` of the task."""
        return json.loads(self.folder.task.read_text())["model"]

    @cached_property
    def objective(self) -> Objective:
        """The objective whose gradient is computed, with the task's own loss if it has one."""
        loss = self._model["loss"]
        return replace(self.spec.model.targets.objective(self.method.objective), own=loss if is_own(loss) else "")

    @cached_property
    def gradient(self) -> GradientFunction:
        model = self.spec.model
        if self.runtime == ON_DEVICES and model.is_linear:
            return LinearGradient(model.layout, self.objective)
        graph = self._graph(model.gradient)
        names = self.network, model.outputs
        more: dict[str, Any] = {"input_shape": model.input_shape, "vocabulary": model.form.vocabulary}
        return make_gradient(self.runtime, *names, model.layout, graph, self.objective, **more)

    @cached_property
    def inference(self) -> LogitsOf:
        """The runtime's own inference if it has one: testing personalized models on large sets takes as long as
        training."""
        model = self.spec.model
        own = getattr(self.gradient, "logits", None)
        return own or InferenceGraph(self._graph(model.inference), model.layout)

    def own_inference(self, device: str) -> LogitsOf:
        """The inference as this device uses it."""
        return own_reconstruction(self.inference, self.spec.model.layout, partial(self._judging, device))

    def _judging(self, device: str) -> LabelledSamples:
        samples, spec = self._parts(device)[0], self.spec
        return self._inputs(judging(samples, spec.model.layout, by_content=spec.by_content))

    def alarms(self, device: str, params: np.ndarray) -> dict[str, float]:
        """Returns what a device's alarms are worth on its own test, with the threshold that it would choose; empty if
        it has too few samples to choose one."""
        judged_by, test, layout = self._judging(device), self.local_test(device), self.spec.model.layout
        own = own_reconstruction(self.inference, layout, lambda: judged_by)
        try:
            chosen = threshold(own, params, layout, judged_by)
        except BadInput:
            return {}
        return alarm_rates(errors_of(own, params, test), ~normal(test.labels), chosen)

    @cached_property
    def metrics(self) -> Metrics:
        """The task's own metrics."""
        return load_metrics(json.loads(self.folder.task.read_text())["model"].get("metrics", ()))

    @cached_property
    def features(self) -> FeatureGraph | None:
        """The graph that computes features of images, once per set in a run; None if the task trains on images."""
        spec = self.spec.model.features
        if spec is None:
            return None
        from hushfleet.learning.graph_features import FeatureGraph

        graph, shape = partial(self._graph, spec.graph), self.spec.model.input_shape
        return FeatureGraph(graph, spec, input_shape=shape, cache=self.folder.features)

    @cached_property
    def common_test(self) -> LabelledSamples:
        return self._inputs(self._fleet.common_test) if self._is_divided else self._load(self.folder.common_test)

    @cached_property
    def _is_divided(self) -> bool:
        """Whether the data set is a public one, which this process divides itself; else each device has files."""
        return json.loads(self.folder.task.read_text())["data"]["name"] in PUBLIC_DATA

    @cached_property
    def _fleet(self) -> Fleet:
        return public_fleet(self.folder)

    def global_params(self, plan: RoundPlan) -> np.ndarray:
        """Returns the global model float32 `[d]` at a round's start, followed by the method's vectors, read-only."""
        if self._global is None or self._global[0] != plan.global_digest:
            layout, vectors = self.spec.model.layout, self.method.server.vectors
            checkpoints = Checkpoints(self.folder.aggregator, layout, vectors=vectors, durable=False)
            params = checkpoints.read(plan.round - 1)
            params.setflags(write=False)
            self._global = plan.global_digest, params
        return self._global[1]

    def membership_list(self, plan: RoundPlan) -> MembershipList | None:
        """Returns the membership list of a round with secure aggregation; None for other rounds."""
        return None if plan.secure is None else self._membership_list

    @cached_property
    def _membership_list(self) -> MembershipList:
        return MembershipList.from_bytes(self.folder.membership_list.read_bytes())

    def secure_round(
        self, spec: SecureSpec, plan: RoundPlan, membership_list: MembershipList, *, size: int
    ) -> SecureRound:
        """Returns the round without masks, the same object for all devices of a chunk."""
        if self.secure is None:
            kind = UnmaskedRound if self.spec.asks(plan.round) else SummedRound
            self.secure = kind(spec, plan, membership_list, size=size)
        return self.secure

    def train(self, device: str) -> LabelledSamples:
        samples = self._train.pop(device, None)
        if samples is None:
            stored, _ = self._parts(device)
            if self.spec.model.targets.are_inputs:
                stored, _ = divided(stored, by_content=self.spec.by_content)
            samples = self._inputs(stored)
            self._train_bytes += samples.nbytes
        self._train[device] = samples
        while self._train_bytes > KEPT_BYTES and len(self._train) > 1:
            self._train_bytes -= self._train.pop(next(iter(self._train))).nbytes
        return samples

    def held_out(self, device: str) -> LabelledSamples:
        """Returns the device's samples that are never used in training."""
        return self._inputs(self._parts(device)[1])

    def _parts(self, device: str) -> tuple[Samples, Samples]:
        """Returns the stored samples for training, and those that are held out."""
        return both_parts(self._stored(device), self.spec.held_out, are_all=not self.spec.by_content)

    def unlabelled(self, device: str) -> LabelledSamples | None:
        """Returns images without labels for the device's personalized head: the labels in the result have no
        meaning."""
        if self._is_divided:
            subset = self._device(device).unlabelled
            if subset is None:
                return None
            samples = subset.samples
            return self._inputs(replace(samples, labels=np.zeros_like(samples.labels)))
        path = self.folder.device(device).unlabelled
        return self._load(path) if path.exists() else None

    def local_test(self, device: str) -> LabelledSamples:
        if (indices := self.local_indices(device)) is not None:
            return self.common_test.take(indices)
        if self._is_divided:
            return self._inputs(self._device(device).local_test.samples)
        return self._load(self.folder.device(device).local_test)

    def local_indices(self, device: str) -> np.ndarray | None:
        """Returns the indices of the device's own test images in the common test, int `[n]`; None if it has others."""
        if not self._is_divided:
            return load_indices(self.folder.device(device).local_test)
        subset = self._device(device).local_test
        return subset.indices if subset.source is self._fleet.common_test else None

    def tested(self, device: str, own: np.ndarray) -> dict[str, Evaluation]:
        """Returns the results of a device's personalized model, as `evaluations` does; none if another model counts,
        after the last round."""
        if is_tested_later(self.spec):
            return {}
        local: np.ndarray | LabelledSamples | None = self.local_indices(device)
        local = self.local_test(device) if local is None else local
        return evaluations(self.inference, own, self.common_test, local, self.metrics)

    def _device(self, device: str) -> SimulatedDevice:
        return self._fleet.devices[index_of(device)]

    def _load(self, path: Path) -> LabelledSamples:
        return self._inputs(load_arrays(path, self.spec.model))

    def _stored(self, device: str) -> Samples:
        if self._is_divided:
            return self._device(device).train.samples
        return load_arrays(self.folder.device(device).train, self.spec.model)

    def _inputs(self, samples: Samples) -> LabelledSamples:
        return inputs_of(samples, self.features)

    def _graph(self, ref: BlobRef) -> bytes:
        return (self.folder.graphs / f"{ref.digest.hex()}.onnx").read_bytes()


@lru_cache(maxsize=2)
def loaded_run(path: Path, runtime: str) -> LoadedRun:
    """Returns this process's loaded run of a folder."""
    gc.freeze()  # what is imported stays: each collection would look through it
    return LoadedRun(path, runtime)


@dataclass(frozen=True)
class DeviceJob:
    """A worker's job for one device; all that it does not name is in the run folder `path`."""

    path: Path
    runtime: str
    device: str

    @property
    def run(self) -> LoadedRun:
        """The run, loaded once in each process."""
        return loaded_run(self.path, self.runtime)
