"""Writes the metrics of a simulated device as JSON lines into a local file; they are never sent.

In the field there is no such file, because losses and accuracies are functions of private data.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hushfleet.data.samples import LabelledSamples, inputs_of
from hushfleet.edge_client.board.config import DeviceConfig
from hushfleet.edge_client.board.sample_files import load_arrays, load_indices
from hushfleet.edge_client.worker.trainer import DeviceRound
from hushfleet.learning.evaluation import NO_METRICS, Evaluation, LogitsOf, evaluate, evaluate_each
from hushfleet.learning.own_metrics import Metrics, load
from hushfleet.methods import is_shared_whole
from hushfleet.methods.local_round import Trained
from hushfleet.methods.privatize import NoisedUpdate
from hushfleet.plain_json import to_json
from hushfleet.wire.format.spec import ModelSpec, TaskSpec

if TYPE_CHECKING:
    from hushfleet.learning.graph_features import FeatureGraph


@dataclass(frozen=True)
class MetricsFile:
    """A file of a device's metrics, and the samples that they are measured on.

    :param path: JSON lines are appended to it.
    :param common_test: .npz that all devices share.
    :param local_test: this device's own held-out samples, or one bit for each image of the common test.
    :param features: computes the features of these images, if the task trains on features.
    :param metrics: the task's own metrics.
    """

    path: Path
    common_test: Path | None
    local_test: Path | None
    features: FeatureGraph | None = None
    metrics: Metrics = field(default_factory=dict)

    @classmethod
    def of(cls, config: DeviceConfig, features: FeatureGraph | None = None) -> MetricsFile | None:
        """Returns None outside simulations, and if the configuration asks for no file."""
        section = config.simulation
        if section is None or section.metrics is None:
            return None
        common, local = (None if test is None else Path(test) for test in (section.common_test, section.local_test))
        return cls(Path(section.metrics), common, local, features, load(section.own_metrics))

    def write(self, round: DeviceRound, trained: Trained, noised: NoisedUpdate, *, train_s: float) -> None:
        """Appends one line about the device's personalized model after local training, before aggregation."""
        spec = round.spec.model
        tested = {} if is_tested_later(round.spec) else self._evaluate(trained, spec, round.trainer.logits_of)
        append_line(self.path, own_metrics(round, trained, noised, tested, train_s=train_s))

    def _evaluate(self, trained: Trained, model: ModelSpec, logits_of: LogitsOf) -> dict[str, Evaluation]:
        indices = None if self.local_test is None or self.common_test is None else load_indices(self.local_test)
        common = None if self.common_test is None else self._load(self.common_test, model)
        local = self._load(self.local_test, model) if self.local_test is not None and indices is None else indices
        return evaluations(logits_of, trained.own, common, local, self.metrics)

    def _load(self, path: Path, model: ModelSpec) -> LabelledSamples:
        return inputs_of(load_arrays(path, model), self.features)


def is_tested_later(spec: TaskSpec) -> bool:
    """Returns whether a device predicts with another model than the one that a round trains: with a head that it
    chooses, or with the global model; that one is tested, after the last round."""
    return spec.model.chooses_head or is_shared_whole(spec)


def own_metrics(
    round: DeviceRound, trained: Trained, noised: NoisedUpdate, tested: Mapping[str, Evaluation], *, train_s: float
) -> dict[str, object]:
    """Returns what a simulated device measures in a round.

    :param tested: results of its personalized model, by the name of the test.
    """
    spec, line = round.spec, dict[str, object](round=round.plan.round, loss=trained.loss)
    line |= tested_fields(tested)
    mask, layers = trained.context.mask, spec.model.layout.layers
    line["personal_share"] = [np.count_nonzero(mask[layer.start : layer.stop]) / layer.size for layer in layers]
    line["clip_weights"] = _clip_weights(noised.clip_norms, spec.privacy.clip_norm)
    line["epsilon_server"] = round.store.ledger.epsilon_server(
        delta=spec.privacy.delta, task=spec.task, extra=noised.charge, accountant=spec.privacy.accountant
    )
    line["train_s"] = float(f"{train_s:.3f}")
    return line


def tested_fields(tested: Mapping[str, Evaluation]) -> dict[str, object]:
    """Returns the fields of a device's line for the results of its personalized model, by the name of the test."""
    fields = dict[str, object]()
    for name, result in tested.items():
        fields |= {f"accuracy_own_{name}": result.accuracy, f"loss_own_{name}": result.loss}
        fields |= {"metrics_own": dict(result.metrics)} if result.metrics else {}
    return fields


def evaluations(
    logits_of: LogitsOf,
    own: np.ndarray,
    common: LabelledSamples | None,
    local: LabelledSamples | np.ndarray | None,
    metrics: Metrics = NO_METRICS,
) -> dict[str, Evaluation]:
    """Returns the results of a personalized model on the common test and on the device's own.

    :param local: the own test, or its indices in the common one.
    :param metrics: measured on the own test.
    """
    results: dict[str, Evaluation] = {}
    if common is not None:
        outcomes = evaluate_each(logits_of, own, common, keep_logits=bool(metrics))
        results["common"] = outcomes.mean()
        if isinstance(local, np.ndarray):
            results["local"] = outcomes.take(local).mean(metrics)
    if local is not None and not isinstance(local, np.ndarray):
        results["local"] = evaluate(logits_of, own, local, metrics)
    return results


def append_line(path: Path, line: Mapping[str, object]) -> None:
    """Appends one JSON line, with numbers as in the event log. A line that a full disk has truncated stays separate."""
    with path.open("a+b") as out:
        if out.tell():
            out.seek(-1, os.SEEK_END)
        begin = "" if out.read(1) in (b"", b"\n") else "\n"
        out.write(f"{begin}{json.dumps(to_json(line), allow_nan=False)}\n".encode())


def _clip_weights(clip_norms: Sequence[float], clip_norm: float) -> list[float | None]:
    """Returns each layer's part of the squared clip norm, by Eq. (13) of FedGLP-ADP."""
    if not math.isfinite(clip_norm):
        return [None] * len(clip_norms)
    return [(float(norm) / clip_norm) ** 2 for norm in clip_norms]
