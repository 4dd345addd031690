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

`contrastive` (MOON: Li et al., Model-Contrastive Federated Learning, CVPR 2021, Eq. (3)): the teacher has the logits of
two models, z_1 and z_2, one after the other: D = log(1 + exp((cos(z, z_2) - cos(z, z_1)) / temperature)).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, TypeVar

from msgspec import Meta

from hushfleet.schema import Checked, require

T = TypeVar("T")
TARGETS: dict[str, Literal["classes", "labels", "numbers", "inputs"]] = {
    "cross-entropy": "classes",
    "binary": "labels",
    "squared": "numbers",
    "huber": "numbers",
    "reconstruction": "inputs",
}
"""The targets of each loss of `hushfleet.losses`: `classes`, int64 `[n]`; `labels`, yes or no for each output;
`numbers`, which have a unit, so they may be scaled, and a tolerance; or the network's `inputs`."""

DISTILLATIONS = ("distillation", "decoupled-distillation", "contrastive")


@dataclass(frozen=True)
class Objective(Checked):
    """The loss of a batch.

    :param kind: a name in `TARGETS`, or one in `DISTILLATIONS` (cross-entropy and a teacher's logits).
    :param temperature: the temperature of the distillation.
    :param non_target_weight: N of ACDP-pFSD's Eq. (8), for `decoupled-distillation`.
    :param target_temperature: the temperature of label against rest, for `decoupled-distillation`.
    :param own: the name of an own loss (`hushfleet.models.own_loss`) of the targets of `kind`, in its place; or empty.
    """

    kind: str = "cross-entropy"
    temperature: Annotated[float, Meta(gt=0, le=1000)] = 1.0
    non_target_weight: Annotated[float, Meta(ge=0, le=1000)] = 1.0
    target_temperature: Annotated[float, Meta(gt=0, le=1000)] = 1.0
    own: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        kinds = (*TARGETS, *DISTILLATIONS)
        require(self.kind in kinds, "kind", self.kind, f"one of {', '.join(kinds)}")

    @property
    def distills(self) -> bool:
        return self.kind in DISTILLATIONS

    def teacher_values(self, outputs: int) -> int:
        """Returns the number of a teacher's values for a sample, for a network with so many outputs."""
        return 2 * outputs if self.kind == "contrastive" else outputs

    @property
    def of_classes(self) -> bool:
        """True if targets are classes, int64 `[B]`; otherwise they are float32 `[B, outputs]`."""
        return self.distills or TARGETS[self.kind] == "classes"


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
