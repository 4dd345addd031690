"""Describes the training objective as data: a loss or a distillation, which every runtime computes in the same way.

With a teacher, a sample's loss is (1 - w) * CE + w * D. CE is the cross-entropy with the sample's label, D is the
distance of the student's class probabilities from the teacher's, and w is the sample's own weight. With w = 0 the loss
is the cross-entropy alone; a device without a teacher trains in this way.

`distillation` (pFedSD: Jin et al., Personalized Edge Intelligence via Federated Self-Knowledge Distillation, IEEE TPDS
2022): D = T^2 KL(softmax(teacher / T) || softmax(student / T)). T^2 and the direction are the same as in the public
code (CGCL-codes/pFedSD, `_divergence`). That code adds lambda * D to the cross-entropy; divided by 1 + lambda, this is
the form above with w = lambda / (1 + lambda).

`decoupled-distillation` (ACDP-pFSD, Eqs. (6)-(8), after Zhao et al., Decoupled Knowledge Distillation, CVPR 2022):
D = KL(b_teacher || b_student) + N * KL(p_teacher || p_student). b has two probabilities: the label's and that of all
other classes together. p has the probabilities of the other classes among themselves.
Reading: the temperature KT divides the logits in p only, and nothing is multiplied by KT^2: ACDP-pFSD prints its
equations in this way. Zhao et al., and DKD-pFed after them, use the temperature in b too (`target_temperature`), and
the factor KT^2 before the sum; this factor is part of w.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, TypeVar

import numpy as np
from msgspec import Meta

from hushfleet.losses import LOSSES, Loss, log_softmax
from hushfleet.schema import Checked, require

T = TypeVar("T")
DISTILLATIONS = ("distillation", "decoupled-distillation")


@dataclass(frozen=True)
class Objective(Checked):
    """The loss of a batch.

    :param kind: a name in `hushfleet.losses.LOSSES`, or one in `DISTILLATIONS` (cross-entropy and a teacher's logits).
    :param temperature: the temperature of the distillation.
    :param non_target_weight: N of ACDP-pFSD's Eq. (8), for `decoupled-distillation`.
    :param target_temperature: the temperature of label against rest, for `decoupled-distillation`.
    """

    kind: str = "cross-entropy"
    temperature: Annotated[float, Meta(gt=0, le=1000)] = 1.0
    non_target_weight: Annotated[float, Meta(ge=0, le=1000)] = 1.0
    target_temperature: Annotated[float, Meta(gt=0, le=1000)] = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        kinds = (*LOSSES, *DISTILLATIONS)
        require(self.kind in kinds, "kind", self.kind, f"one of {', '.join(kinds)}")

    @property
    def distills(self) -> bool:
        return self.kind in DISTILLATIONS

    @property
    def loss(self) -> Loss:
        """The loss that depends on the targets alone, without a teacher."""
        return LOSSES["cross-entropy" if self.distills else self.kind]

    @property
    def of_classes(self) -> bool:
        """True if targets are classes, int64 `[B]`; otherwise they are float32 `[B, outputs]`."""
        return self.loss.of_classes

    def loss_and_cotangent(
        self, logits: np.ndarray, y: np.ndarray, teacher: np.ndarray | None = None, weight: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns each sample's loss float64 `[B]`, and its derivative by that sample's logits, float64 `[B, C]`.

        :param logits: the student's logits `[B, C]`; `teacher`: the teacher's logits, for a distillation.
        :param y: labels `[B]`, each a class; or targets `[B, C]`.
        :param weight: the weight of the distillation, `[B]`, in [0, 1].
        """
        student = np.asarray(logits, np.float64)
        losses, slopes = self.loss.losses_and_slopes(student, y)
        if not self.distills:
            return losses, slopes
        label = np.arange(student.shape[1]) == y[:, None]
        teacher, weight = np.asarray(teacher, np.float64), np.asarray(weight, np.float64)
        divergences, pulls = (self._plain if self.kind == "distillation" else self._decoupled)(student, teacher, label)
        rest = 1 - weight
        return rest * losses + weight * divergences, rest[:, None] * slopes + weight[:, None] * pulls

    def _plain(self, student: np.ndarray, teacher: np.ndarray, label: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        t = self.temperature
        divergence, pull = _divergence(student / t, teacher / t)
        return t * t * divergence, t * pull

    def _decoupled(self, student: np.ndarray, teacher: np.ndarray, label: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        batch, classes = student.shape
        heat = self.target_temperature
        students, teachers = (logits[~label].reshape(batch, classes - 1) for logits in (student, teacher))
        two = [
            np.stack([logits[label] / heat, np.logaddexp.reduce(others / heat, 1)], 1)
            for logits, others in ((student, students), (teacher, teachers))
        ]
        target, target_pull = _divergence(*two)
        target_pull /= heat
        others, others_pull = _divergence(students / self.temperature, teachers / self.temperature)
        pull = np.empty_like(student)
        pull[label] = target_pull[:, 0]
        share = self.non_target_weight / self.temperature
        # The logarithm of the summed exponentials has the softmax as its slopes.
        pull[~label] = (target_pull[:, 1:] * np.exp(log_softmax(students / heat)) + share * others_pull).ravel()
        return target + self.non_target_weight * others, pull


CROSS_ENTROPY = Objective()


def both_or_none(teacher: T | None, distill: T | None, *, distills: bool) -> tuple[T, T] | None:
    """Returns the teacher's logits and the distillation's weights, or None if both are None.

    Raises ValueError if only one is given, or if the objective has no teacher (`distills` is False).
    """
    if teacher is None and distill is None:
        return None
    if teacher is None or distill is None:
        raise ValueError("give both a teacher's logits and the distillation's weights, or neither")
    if not distills:
        raise ValueError("the objective is a loss of the targets alone, which has no teacher")
    return teacher, distill


def _divergence(student: np.ndarray, teacher: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns KL(softmax(teacher) || softmax(student)) `[B]` and its derivative by the student's logits."""
    ours, theirs = log_softmax(student), log_softmax(teacher)
    probabilities = np.exp(theirs)
    return (probabilities * (theirs - ours)).sum(1), np.exp(ours) - probabilities
