"""Defines the targets of a task: the loss with which they are learned, their scale, and when an answer is right.

The score of a model is the share of right answers: accuracy, subset accuracy (scikit-learn's `accuracy_score`), or the
share of predictions within the tolerance. For an autoencoder it is the area under the ROC curve.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from hushfleet.array_api import np
from hushfleet.objectives import TARGETS, Objective
from hushfleet.schema import Checked, Finite, Positive, Probability, later, require

if TYPE_CHECKING:
    from hushfleet.losses import Loss

Tolerance = Annotated[float, Meta(gt=0, le=1e30, description="above 0")]


@dataclass(frozen=True)
class Targets(Checked):
    """The targets of a task. `mean` and `std` are public numbers that the task gives, never computed from private
    data.

    :param loss: a name in `hushfleet.objectives.TARGETS`.
    :param tolerance: for numbers: how far an output may be from its target, in the target's unit.
    :param mean: for numbers, one for each output: a network learns (target - mean) / std. Empty: 0 and 1.
    :param false_alarms: for a reconstruction: the share of normal samples that a device may call unusual.
    """

    loss: str = "cross-entropy"
    tolerance: Tolerance | None = None
    mean: tuple[Finite, ...] = ()
    std: tuple[Positive, ...] = ()
    false_alarms: Probability | None = later(None)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.loss in TARGETS, "loss", self.loss, f"one of {', '.join(TARGETS)}")
        numbers, where = self.are_numbers, f"given where a loss takes numbers; {self.loss} "
        where += "does" if numbers else "does not"
        require((self.tolerance is not None) == numbers, "tolerance", self.tolerance, where)
        require(numbers or not (self.mean or self.std), "mean, std", self.mean, where)
        require(
            (self.false_alarms is not None) == self.are_inputs,
            "false_alarms",
            self.false_alarms,
            "given for 'reconstruction' alone",
        )
        require(len(self.mean) == len(self.std), "mean, std", len(self.mean), "one of each for an output")

    @property
    def are_classes(self) -> bool:
        return TARGETS[self.loss] == "classes"

    @property
    def are_numbers(self) -> bool:
        return TARGETS[self.loss] == "numbers"

    @property
    def are_inputs(self) -> bool:
        """True if a network learns to reconstruct its input, and labels only say which samples are faults."""
        return TARGETS[self.loss] == "inputs"

    def columns(self, class_names: Sequence[str]) -> Sequence[str] | None:
        """Returns the columns of a table that are targets; empty: one of labels; None: there may be none."""
        return None if self.are_inputs else () if self.are_classes else class_names

    def outputs(self, class_names: Sequence[str], input_shape: Sequence[int]) -> int:
        """Returns the number of a network's outputs."""
        return math.prod(input_shape) if self.are_inputs else len(class_names)

    def objective(self, of_method: Objective) -> Objective:
        """Returns the objective whose gradient the task's graph computes.

        :param of_method: the method's objective, which may be a distillation; distillation needs classes.
        """
        return of_method if self.are_classes else Objective(self.loss)

    def learned(self, labels: np.ndarray, x: np.ndarray) -> np.ndarray:
        """Converts labels to the loss's targets: `[n]`, or scaled `[n, outputs]`, or the rows of the inputs `x`."""
        return x.reshape(len(x), math.prod(x.shape[1:])) if self.are_inputs else self._scaled(labels)

    def _scaled(self, targets: np.ndarray) -> np.ndarray:
        if not self.mean:
            return targets
        return np.asarray((targets - np.array(self.mean)) / np.array(self.std), np.float32)

    def predicted(self, outputs: np.ndarray) -> np.ndarray:
        """Converts outputs `[n, outputs]` to predictions: probabilities, or numbers in the target's unit; float64."""
        return self._loss.predicted(self._in_unit(outputs))

    def right(self, outputs: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """Marks the right answers, bool `[n]`.

        :param outputs: a network's outputs, `[n, outputs]`.
        :param targets: unscaled, in their own unit.
        """
        return self._loss.right(self._in_unit(outputs), targets, self._reach)

    def scored(self, right: np.ndarray, losses: np.ndarray) -> float:
        """Returns a model's score from the results of `right` and the loss for its samples; NaN if there is none."""
        return self._loss.scored(right, losses)

    def constant_right(self, targets: np.ndarray) -> float:
        """Returns the share of `targets` `[n, outputs]` that the best constant answer gets right. Not for classes."""
        return self._loss.constant_right(targets, self._reach)

    def misfits(self, targets: np.ndarray) -> np.ndarray:
        """Marks the samples whose targets float32 `[n, outputs]`, in their own unit, cannot be learned, bool `[n]`."""
        with np.errstate(over="ignore"):  # becomes infinite, which does not fit
            return ~self._loss.fit(self._scaled(targets))

    def blank(self, count: int, outputs: int) -> np.ndarray:
        """Returns zeros in place of unknown targets."""
        return self._loss.blank(count, outputs)

    @property
    def measure(self) -> str:
        """The name of the score in reports."""
        return self._loss.measure

    def describe(self) -> str:
        """Describes what the score counts, for people; empty if it is plain accuracy."""
        return self._loss.score(self.tolerance)

    @property
    def _loss(self) -> Loss:
        from hushfleet.losses import LOSSES

        return LOSSES[self.loss]

    def _in_unit(self, outputs: np.ndarray) -> np.ndarray:
        outputs = outputs.astype(np.float64)
        return outputs * np.array(self.std) + np.array(self.mean) if self.mean else outputs

    @property
    def _reach(self) -> float:
        """The tolerance, and a little more, so that the rounding of a float32 target does not make an answer wrong."""
        return (self.tolerance or 0) * (1 + 1e-6)


CLASSES = Targets()
