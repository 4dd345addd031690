"""What a sample's right answer is, by which loss it is learned, and when a model's answer counts as right.

| loss | targets | a sample's loss | right |
|---|---|---|---|
| `cross-entropy` | a class, int64 `[n]` | -log softmax, of its class | the class of the largest output |
| `binary` | float32 `[n, outputs]` of 0 and 1 | mean binary cross-entropy of outputs | yes or no in all outputs |
| `squared` | float32 `[n, outputs]` | mean squared error of outputs, not halved | all outputs within the tolerance |

The score of a model is the share of right answers: accuracy, subset accuracy (scikit-learn's `accuracy_score`), and the
share of predictions within the tolerance.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from msgspec import Meta

from hushfleet.config.schema import Checked, Finite, Positive, require
from hushfleet.model.objectives import Objective

Loss = Literal["cross-entropy", "binary", "squared"]
Tolerance = Annotated[float, Meta(gt=0, le=1e30, description="above 0")]
_PASSES = 3  # of a search, output by output


@dataclass(frozen=True)
class Targets(Checked):
    """Of a task. `mean` and `std` are public numbers that the task gives, never computed from private data.

    :param tolerance: of `squared`: how far an output may be from its target, in the target's unit.
    :param mean: of `squared`, for each output: a network learns (target - mean) / std. Empty: 0 and 1.
    """

    loss: Loss = "cross-entropy"
    tolerance: Tolerance | None = None
    mean: tuple[Finite, ...] = ()
    std: tuple[Positive, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        squared = self.loss == "squared"
        require((self.tolerance is not None) == squared, "tolerance", self.tolerance, 'given where loss = "squared"')
        require(squared or not (self.mean or self.std), "mean, std", self.mean, 'given where loss = "squared"')
        require(len(self.mean) == len(self.std), "mean, std", len(self.mean), "one of each for an output")

    @property
    def are_classes(self) -> bool:
        return self.loss == "cross-entropy"

    def objective(self, of_method: Objective) -> Objective:
        """Whose gradient the task's graph computes.

        :param of_method: of the method, which may distil: that is defined for classes alone.
        """
        return of_method if self.are_classes else Objective(self.loss)

    def learned(self, targets: np.ndarray) -> np.ndarray:
        """What the loss is given: the targets, those of `squared` scaled. `[n]` or `[n, outputs]`."""
        if not self.mean:
            return targets
        return np.asarray((targets - np.array(self.mean)) / np.array(self.std), np.float32)

    def predicted(self, outputs: np.ndarray) -> np.ndarray:
        """A network's outputs `[n, outputs]` as answers: probabilities, or numbers in the target's unit; float64."""
        outputs = outputs.astype(np.float64)
        if self.loss == "squared":
            return outputs * np.array(self.std) + np.array(self.mean) if self.mean else outputs
        if self.loss == "binary":
            return np.asarray(np.exp(-np.logaddexp(0, -outputs)))
        odds = np.exp(outputs - outputs.max(1, keepdims=True))
        probabilities: np.ndarray = odds / odds.sum(1, keepdims=True)
        return probabilities

    def right(self, outputs: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """Which answers count as right, bool `[n]`.

        :param outputs: of a network, `[n, outputs]`.
        :param targets: as they were given, in their own unit.
        """
        if self.are_classes:
            return np.asarray(outputs.argmax(1) == targets)
        if self.loss == "binary":
            return np.asarray(((outputs > 0) == (targets > 0)).all(1))
        return np.asarray(self._within(self.predicted(outputs) - targets).all(1))

    def constant_right(self, targets: np.ndarray) -> float:
        """The share of `targets` that the best constant answer gets right, which is what guessing reaches; not of
        classes.

        :param targets: `[n, outputs]`, n above 0. With several outputs of `squared` the constant is sought output by
            output, and may not be the best.
        """
        if self.loss == "binary":
            return float(np.unique(targets, axis=0, return_counts=True)[1].max() / len(targets))
        right = np.ones(targets.shape, bool)
        for column in list(range(targets.shape[1])) * (1 if targets.shape[1] == 1 else _PASSES):
            right[:, column] = True
            values = np.sort(targets[right.all(1), column].astype(np.float64))
            # The best window of two tolerances begins at a value.
            held = np.searchsorted(values, values + 2 * self._reach, "right") - np.arange(len(values))
            first = int(held.argmax())
            middle = (values[first] + values[first + held[first] - 1]) / 2
            right[:, column] = self._within(targets[:, column] - middle)
        return float(right.all(1).mean())

    @property
    def _reach(self) -> float:
        """The tolerance, and a little more: a float32 target is not to be missed by its own rounding."""
        return (self.tolerance or 0) * (1 + 1e-6)

    def _within(self, errors: np.ndarray) -> np.ndarray:
        return np.asarray(np.abs(errors) <= self._reach)

    def blank(self, count: int, outputs: int) -> np.ndarray:
        """Some targets, where none are known: zeros."""
        return np.zeros(count, np.int64) if self.are_classes else np.zeros((count, outputs), np.float32)

    def words(self) -> str:
        """What the score counts, for people; empty where it is plain accuracy."""
        right = {"binary": "with all labels right", "squared": f"within {self.tolerance} of the target"}
        return right.get(self.loss, "")


def random_targets(objective: Objective, count: int, outputs: int, rng: np.random.Generator) -> np.ndarray:
    """Targets to try a gradient with: int64 `[count]`, or float32 `[count, outputs]`."""
    if objective.kind == "squared":
        return rng.standard_normal((count, outputs), np.float32)
    if objective.kind == "binary":
        return rng.integers(0, 2, (count, outputs)).astype(np.float32)
    return rng.integers(0, outputs, count)


CLASSES = Targets()
