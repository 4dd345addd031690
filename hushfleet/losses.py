"""Defines the losses for training, each one value in `LOSSES`: targets, formula, and which answers are right.

| loss | targets | a sample's loss | right |
|---|---|---|---|
| `cross-entropy` | a class, int64 `[n]` | -log softmax, of its class | the class of the largest output |
| `binary` | float32 `[n, outputs]` of 0 and 1 | mean binary cross-entropy of outputs | yes or no in all outputs |
| `squared` | float32 `[n, outputs]` | mean squared error of outputs, not halved | all outputs within the tolerance |
| `huber` | float32 `[n, outputs]` | mean Huber loss of outputs, linear above an error of 1 | same as `squared` |
| `reconstruction` | the sample itself, float32 `[n, values]` | mean squared error | see `Reconstruction` |

To add a loss, write a class below and add it to `LOSSES`, and its targets to `objectives.TARGETS`: tasks, boards, every
runtime and the report then have it. `each` is written once for NumPy and PyTorch. Boards and compiled programs have no
automatic differentiation, so they use the slope that it returns; PyTorch and exported graphs differentiate the value.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from hushfleet.array_api import Array, array_namespace
from hushfleet.objectives import TARGETS, Objective
from hushfleet.schema import require

ACCURACY = "accuracy"
FAULT = "fault"
"""The name of the label of a `Reconstruction`: the column of a CSV file."""
TINY = 1e-12
"""The least squared norm in a cosine, so that logits that are zero have a gradient."""
_PASSES = 3  # over the outputs, in the search for the best constant


class Loss:
    """A loss for targets float32 `[n, outputs]`: the mean of the losses of the outputs.

    :cvar measure: the name of a model's score.
    :cvar epoch: see `hushfleet.methods.Published`.
    """

    name: ClassVar[str]
    epoch: ClassVar[int] = 0
    measure: ClassVar[str] = ACCURACY
    misfit: ClassVar[str]
    """Describes targets that do not `fit`."""

    @property
    def of_classes(self) -> bool:
        return TARGETS[self.name] == "classes"

    @property
    def of_numbers(self) -> bool:
        return TARGETS[self.name] == "numbers"

    @property
    def of_inputs(self) -> bool:
        return TARGETS[self.name] == "inputs"

    def each(self, outputs: Array, y: Array) -> tuple[Array, Array]:
        """Returns the loss of each output `[B, C]`, and its derivative by that output; NumPy or PyTorch."""
        raise NotImplementedError

    def losses_and_slopes(self, outputs: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns each sample's loss float64 `[B]`, and its derivative by the outputs, float64 `[B, C]`."""
        losses, slopes = self.each(outputs, y)
        return losses.mean(1), slopes / outputs.shape[1]

    def blank(self, count: int, outputs: int) -> np.ndarray:
        """Returns zeros in place of unknown targets."""
        return np.zeros((count, outputs), np.float32)

    def random(self, count: int, outputs: int, rng: np.random.Generator) -> np.ndarray:
        """Returns random targets for a trial of a gradient."""
        raise NotImplementedError

    def fit(self, targets: np.ndarray) -> np.ndarray:
        """Marks the samples whose (scaled) targets float32 `[n, outputs]` can be learned, bool `[n]`."""
        raise NotImplementedError

    def predicted(self, outputs: np.ndarray) -> np.ndarray:
        """Converts a network's outputs float64 `[n, outputs]` to predictions: probabilities, or numbers."""
        return outputs

    def right(self, outputs: np.ndarray, targets: np.ndarray, reach: float) -> np.ndarray:
        """Marks the right answers, bool `[n]`.

        :param outputs: float64 `[n, outputs]`, in the unit of the targets.
        :param reach: the largest error of a right number.
        """
        raise NotImplementedError

    def constant_right(self, targets: np.ndarray, reach: float) -> float:
        """Returns the share of `targets` `[n, outputs]` that the best constant answer gets right; n is above 0."""
        return float(np.unique(targets, axis=0, return_counts=True)[1].max() / len(targets))

    def scored(self, right: np.ndarray, losses: np.ndarray) -> float:
        """Returns a model's score in [0, 1] from the results of `right` and the loss for its samples; NaN: no score."""
        return float(right.mean()) if len(right) else float("nan")

    def score(self, tolerance: float | None) -> str:
        """Describes what the score counts; empty if it is plain accuracy."""
        return ""


class CrossEntropy(Loss):
    """The cross-entropy for one class of several; `hushfleet.models.losses` uses PyTorch's own operator."""

    name = "cross-entropy"

    def losses_and_slopes(self, outputs: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """:param y: the classes `[B]`."""
        label = np.arange(outputs.shape[1]) == y[:, None]
        logs = log_softmax(outputs)
        return -logs[label], np.exp(logs) - label

    def blank(self, count: int, outputs: int) -> np.ndarray:
        return np.zeros(count, np.int64)

    def random(self, count: int, outputs: int, rng: np.random.Generator) -> np.ndarray:
        return rng.integers(0, outputs, count)

    def predicted(self, outputs: np.ndarray) -> np.ndarray:
        odds = np.exp(outputs - outputs.max(1, keepdims=True))
        probabilities: np.ndarray = odds / odds.sum(1, keepdims=True)
        return probabilities

    def right(self, outputs: np.ndarray, targets: np.ndarray, reach: float) -> np.ndarray:
        return np.asarray(outputs.argmax(1) == targets)


class Binary(Loss):
    """The binary cross-entropy of each output's sigmoid, log(1 + e^z) - y z."""

    name = "binary"
    misfit = "neither 0 nor 1"

    def each(self, outputs: Array, y: Array) -> tuple[Array, Array]:
        xp: Any = array_namespace(outputs)
        zero = xp.zeros_like(outputs)
        # With logaddexp, PyTorch's slope is also right at 0, where a linear model starts.
        return xp.logaddexp(zero, outputs) - y * outputs, xp.exp(-xp.logaddexp(zero, -outputs)) - y

    def random(self, count: int, outputs: int, rng: np.random.Generator) -> np.ndarray:
        return rng.integers(0, 2, (count, outputs)).astype(np.float32)

    def fit(self, targets: np.ndarray) -> np.ndarray:
        return np.asarray(((targets == 0) | (targets == 1)).all(1))

    def predicted(self, outputs: np.ndarray) -> np.ndarray:
        return np.asarray(np.exp(-np.logaddexp(0, -outputs)))

    def right(self, outputs: np.ndarray, targets: np.ndarray, reach: float) -> np.ndarray:
        return np.asarray(((outputs > 0) == (targets > 0)).all(1))

    def score(self, tolerance: float | None) -> str:
        return "with all labels right"


class Numbers(Loss):
    """The base of losses for regression."""

    misfit = "not finite float32 numbers"

    def random(self, count: int, outputs: int, rng: np.random.Generator) -> np.ndarray:
        return rng.standard_normal((count, outputs), np.float32)

    def fit(self, targets: np.ndarray) -> np.ndarray:
        return np.asarray(np.isfinite(targets).all(1))

    def right(self, outputs: np.ndarray, targets: np.ndarray, reach: float) -> np.ndarray:
        return np.asarray((np.abs(outputs - targets) <= reach).all(1))

    def constant_right(self, targets: np.ndarray, reach: float) -> float:
        """Searches the constant output by output; with several outputs it may not be the best one."""
        right = np.ones(targets.shape, bool)
        for column in list(range(targets.shape[1])) * (1 if targets.shape[1] == 1 else _PASSES):
            right[:, column] = True
            values = np.sort(targets[right.all(1), column].astype(np.float64))
            # The best window, two tolerances wide, starts at one of the values.
            held = np.searchsorted(values, values + 2 * reach, "right") - np.arange(len(values))
            first = int(held.argmax())
            middle = (values[first] + values[first + held[first] - 1]) / 2
            right[:, column] = np.abs(targets[:, column] - middle) <= reach
        return float(right.all(1).mean())

    def score(self, tolerance: float | None) -> str:
        return f"within {tolerance} of the target"


class Squared(Numbers):
    """The squared error, not halved."""

    name = "squared"

    def each(self, outputs: Array, y: Array) -> tuple[Array, Array]:
        errors = outputs - y
        return errors**2, 2 * errors


class Huber(Numbers):
    """Half the squared error up to an error of 1, and the error minus 1/2 above it (Huber, Robust Estimation of a
    Location Parameter, 1964), so that no outlier's slope is above 1. Errors are in the unit of the scaled target."""

    name = "huber"

    def each(self, outputs: Array, y: Array) -> tuple[Array, Array]:
        errors = outputs - y
        slopes = array_namespace(outputs).clip(errors, -1, 1)
        return slopes * (errors - slopes / 2), slopes


class Reconstruction(Squared):
    """The squared error of an autoencoder, whose target is its own input, so that no labels are needed.

    The label 1 marks a fault. Faults are never used in training. The score is the area under the ROC curve, which ranks
    the samples by their errors; so `right` marks the normal samples.
    """

    name = "reconstruction"
    measure = "AUROC"
    misfit = Binary.misfit

    def fit(self, targets: np.ndarray) -> np.ndarray:
        return LOSSES["binary"].fit(targets)

    def right(self, outputs: np.ndarray, targets: np.ndarray, reach: float) -> np.ndarray:
        return normal(targets)

    def scored(self, right: np.ndarray, losses: np.ndarray) -> float:
        return auroc(losses[right], losses[~right])

    def constant_right(self, targets: np.ndarray, reach: float) -> float:
        return 0.5

    def score(self, tolerance: float | None) -> str:
        return "the probability that a sample with a fault has a larger reconstruction error than a normal one"


def normal(labels: np.ndarray) -> np.ndarray:
    """Marks the samples without a fault, bool `[n]`, from the labels `[n, outputs]` of a `Reconstruction`.

    >>> normal(np.array([[0.0], [1.0]])).tolist()
    [True, False]
    """
    return np.asarray((labels == 0).all(1))


def auroc(normal: np.ndarray, faults: np.ndarray) -> float:
    """Returns the share of pairs (one fault, one normal sample) in which the fault's error is larger; a pair with two
    equal errors counts one half. NaN without pairs.

    >>> auroc(np.array([0.1, 0.2]), np.array([0.2, 0.9]))
    0.875
    """
    if not (len(normal) and len(faults)):
        return float("nan")
    ordered = np.sort(normal)
    below = (np.searchsorted(ordered, faults, side) for side in ("left", "right"))
    return float(np.mean(list(below)) / len(ordered))


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Returns the logarithms of the softmax over the last axis of `[B, C]`.

    >>> np.exp(log_softmax(np.array([[0.0, 0.0]]))).tolist()
    [[0.5, 0.5]]
    """
    shifted = logits - logits.max(1, keepdims=True)
    normalized: np.ndarray = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    return normalized


LOSSES: dict[str, Loss] = {each.name: each for each in (CrossEntropy(), Binary(), Squared(), Huber(), Reconstruction())}


def find_loss(name: str) -> Loss:
    """Returns the loss of that name. Raises ValueError if there is none.

    >>> find_loss("huber").score(0.5)
    'within 0.5 of the target'
    """
    require(name in LOSSES, "loss", name, f"one of {', '.join(LOSSES)}, or path/to/file.py:NAME")
    return LOSSES[name]


def loss_of(objective: Objective) -> Loss:
    """Returns the loss that depends on the targets alone, without a teacher."""
    return LOSSES["cross-entropy" if objective.distills else objective.kind]


def loss_and_cotangent(
    objective: Objective,
    logits: np.ndarray,
    y: np.ndarray,
    teacher: np.ndarray | None = None,
    weight: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns each sample's loss float64 `[B]`, and its derivative by that sample's logits, float64 `[B, C]`.

    :param logits: the student's logits `[B, C]`; `teacher`: the teacher's logits, for a distillation.
    :param y: labels `[B]`, each a class; or targets `[B, C]`.
    :param weight: the weight of the distillation, `[B]`, in [0, 1].
    :raises ValueError: the objective has an own loss, which only PyTorch and exported graphs compute.
    """
    require(not objective.own, "objective", objective.own, "without an own loss, which has no formula here")
    student = np.asarray(logits, np.float64)
    losses, slopes = loss_of(objective).losses_and_slopes(student, y)
    if not objective.distills:
        return losses, slopes
    label = np.arange(student.shape[1]) == y[:, None]
    teacher, weight = np.asarray(teacher, np.float64), np.asarray(weight, np.float64)
    divergences, pulls = _DIVERGENCES[objective.kind](objective, student, teacher, label)
    rest = 1 - weight
    return rest * losses + weight * divergences, rest[:, None] * slopes + weight[:, None] * pulls


def _plain(
    objective: Objective, student: np.ndarray, teacher: np.ndarray, label: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    t = objective.temperature
    divergence, pull = _divergence(student / t, teacher / t)
    return t * t * divergence, t * pull


def _decoupled(
    objective: Objective, student: np.ndarray, teacher: np.ndarray, label: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    batch, classes = student.shape
    heat = objective.target_temperature
    students, teachers = (logits[~label].reshape(batch, classes - 1) for logits in (student, teacher))
    two = [
        np.stack([logits[label] / heat, np.logaddexp.reduce(others / heat, 1)], 1)
        for logits, others in ((student, students), (teacher, teachers))
    ]
    target, target_pull = _divergence(*two)
    target_pull /= heat
    others, others_pull = _divergence(students / objective.temperature, teachers / objective.temperature)
    pull = np.empty_like(student)
    pull[label] = target_pull[:, 0]
    share = objective.non_target_weight / objective.temperature
    # The logarithm of the summed exponentials has the softmax as its slopes.
    pull[~label] = (target_pull[:, 1:] * np.exp(log_softmax(students / heat)) + share * others_pull).ravel()
    return target + objective.non_target_weight * others, pull


def _contrastive(
    objective: Objective, student: np.ndarray, teacher: np.ndarray, label: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    (near, to_near), (far, to_far) = (_cosine(student, each) for each in np.split(teacher, 2, 1))
    excess = (far - near) / objective.temperature
    slope = np.exp(-np.logaddexp(0, -excess)) / objective.temperature
    return np.logaddexp(0, excess), slope[:, None] * (to_far - to_near)


def _cosine(student: np.ndarray, other: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the cosine `[B]` and its derivative by the student's logits."""
    squares = [(each**2).sum(1, keepdims=True) for each in (student, other)]
    ours, theirs = (np.maximum(each, TINY) ** -0.5 for each in squares)
    cosine = (student * other).sum(1, keepdims=True) * ours * theirs
    return cosine[:, 0], ours * (theirs * other - (squares[0] >= TINY) * cosine * ours * student)


_DIVERGENCES = {"distillation": _plain, "decoupled-distillation": _decoupled, "contrastive": _contrastive}


def _divergence(student: np.ndarray, teacher: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns KL(softmax(teacher) || softmax(student)) `[B]` and its derivative by the student's logits."""
    ours, theirs = log_softmax(student), log_softmax(teacher)
    probabilities = np.exp(theirs)
    return (probabilities * (theirs - ours)).sum(1), np.exp(ours) - probabilities
