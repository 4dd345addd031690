"""Writes a described network as a C program: its sizes become constants, and the kernels are inlined around them."""

from __future__ import annotations

from importlib import resources

from hushfleet.models.model import Model
from hushfleet.models.native.singles_writer import SinglesWriter
from hushfleet.models.native.stages import VectorUnit, stages_of
from hushfleet.models.native.writer import ProgramWriter
from hushfleet.objectives import CROSS_ENTROPY, Objective

KERNELS = ("vectors.h", "convolution.h", "winograd.h", "linear.h", "loss.h", "singles.h")


def write_program(
    model: Model, target: VectorUnit, objective: Objective = CROSS_ENTROPY, *, singles: bool = False
) -> str:
    """Returns the C source text of `gradient` and `logits`, and of a gradient's second half if the objective is not
    the cross-entropy.

    :param singles: writes sums of each sample's clipped or squared gradient instead, for any objective.
    :raises BadInput: the kernels do not know a layer.
    """
    folder = resources.files("hushfleet.models.native") / "kernels"
    kernels = [(folder / name).read_text("utf-8") for name in KERNELS[: None if singles else -1]]
    writer = SinglesWriter if singles else ProgramWriter
    return "\n".join([*kernels, *writer(model, stages_of(model), target, objective).parts()])
