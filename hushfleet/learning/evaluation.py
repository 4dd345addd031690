"""Computes score and loss of a model on labelled samples, in batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from hushfleet.data.samples import LabelledSamples
from hushfleet.data.targets import Targets
from hushfleet.learning import own_metrics
from hushfleet.losses import loss_and_cotangent
from hushfleet.objectives import CROSS_ENTROPY

EVALUATION_BATCH = 256
NO_METRICS: own_metrics.Metrics = MappingProxyType({})


class Evaluation(NamedTuple):
    """`accuracy` in 0..1: the share of right answers or another score (`hushfleet.data.targets`). `loss`: the mean; for
    a cross-entropy in nats. NaN if there are no samples, or none with a score. `metrics`: the numbers of a task's own
    metrics, by name."""

    accuracy: float
    loss: float
    metrics: Mapping[str, float | None] = MappingProxyType({})


class Evaluations(NamedTuple):
    """The result of each sample: `correct` bool `[n]` from `Targets.right`, `losses` float64 `[n]`, and if they are
    kept for metrics, its logits float64 `[n, C]` and its label."""

    correct: np.ndarray
    losses: np.ndarray
    targets: Targets
    logits: np.ndarray | None = None
    labels: np.ndarray | None = None

    def mean(self, metrics: own_metrics.Metrics = NO_METRICS) -> Evaluation:
        """Returns score and mean loss (for a reconstruction, of normal samples only); NaN without samples. Metrics need
        kept logits."""
        counted = self.losses[self.correct] if self.targets.are_inputs else self.losses
        loss = float(counted.mean()) if len(counted) else float("nan")
        numbers = {}
        if metrics and self.logits is not None and self.labels is not None and len(self.labels):
            numbers = own_metrics.measured(metrics, self.logits, self.labels)
        return Evaluation(self.targets.scored(self.correct, self.losses), loss, numbers)

    def take(self, indices: np.ndarray) -> Evaluations:
        """Returns the results of the samples at these indices, int `[k]`."""
        kept = (None if each is None else each[indices] for each in (self.logits, self.labels))
        return Evaluations(self.correct[indices], self.losses[indices], self.targets, *kept)


LogitsOf = Callable[[np.ndarray, np.ndarray], np.ndarray]
LogitsOfModels = Callable[[Sequence[np.ndarray], np.ndarray], np.ndarray]


def evaluate(
    logits_of: LogitsOf, params: np.ndarray, samples: LabelledSamples, metrics: own_metrics.Metrics = NO_METRICS
) -> Evaluation:
    """:param logits_of: (params `[d]`, images `[b, C, H, W]`) -> logits `[b, classes]`."""
    return evaluate_each(logits_of, params, samples, keep_logits=bool(metrics)).mean(metrics)


def evaluate_each(
    logits_of: LogitsOf, params: np.ndarray, samples: LabelledSamples, *, keep_logits: bool = False
) -> Evaluations:
    """Evaluates every sample, for means over parts of a test set."""
    at_once: LogitsOfModels = lambda models, x: logits_of(models[0], x)[None]  # noqa: E731
    (found,) = evaluate_models(at_once, [params], samples, keep_logits=keep_logits)
    return found


def evaluate_models(
    logits_of: LogitsOfModels, models: Sequence[np.ndarray], samples: LabelledSamples, *, keep_logits: bool = False
) -> list[Evaluations]:
    """Evaluates every sample with each model, like `evaluate_each`, but converts each batch of samples only once.

    :param logits_of: (models `[d]` each, images `[b, C, H, W]`) -> logits `[models, b, classes]`.
    """
    objective, shape = samples.targets.objective(CROSS_ENTROPY), (len(models), len(samples))
    correct, losses, kept = np.empty(shape, bool), np.empty(shape), [list[np.ndarray]() for _ in models]
    for first in range(0, len(samples) if models else 0, EVALUATION_BATCH):
        batch = samples.take(slice(first, first + EVALUATION_BATCH))
        part, y = slice(first, first + len(batch)), batch.y
        for row, values in enumerate(logits_of(models, batch.x)):
            logits = values.astype(np.float64)
            losses[row, part], _ = loss_and_cotangent(objective, logits, y)
            correct[row, part] = samples.targets.right(logits, batch.labels)
            if keep_logits:
                kept[row].append(logits)
    found = [Evaluations(*each, samples.targets) for each in zip(correct, losses, strict=True)]
    if not keep_logits or not len(samples):
        return found
    return [each._replace(logits=np.concatenate(kept[row]), labels=samples.labels) for row, each in enumerate(found)]


def accuracies_on_parts(
    logits_of: LogitsOfModels, models: Sequence[np.ndarray], samples: LabelledSamples, parts: Sequence[np.ndarray]
) -> list[float]:
    """Returns each model's accuracy on its part of the samples, like `evaluate`, but tests all models at once.

    :param logits_of: (models `[d]` each, images `[b, C, H, W]`) -> logits `[models, b, classes]`.
    :param parts: for each model indices into `samples`, ascending.
    """
    asked = np.unique(np.concatenate(parts))
    places = [np.searchsorted(asked, part) for part in parts]
    correct = np.empty((len(models), len(asked)), bool)
    for first in range(0, len(asked), EVALUATION_BATCH):
        batch = samples.take(asked[first : first + EVALUATION_BATCH])
        for row, logits in zip(correct, logits_of(models, batch.x), strict=True):
            row[first : first + len(batch)] = samples.targets.right(logits.astype(np.float64), batch.labels)
    return [
        float(row[place].mean()) if len(place) else float("nan") for row, place in zip(correct, places, strict=True)
    ]
