"""Where a task's gradients are computed on this board, as it lies in the store."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hushfleet.config.schema import Checked
from hushfleet.config.spec import Digest

Accelerator = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class ChosenAccelerator(Checked):
    """The outcome of a trial, which no image of the board was in.

    :param task: digest of the task package that it was for.
    :param runtime: the version of ONNX Runtime.
    :param chosen: what the fleet may know.
    :param reason: for people on the board.
    :param failed: why the processor took over later. It may follow the number of images, and stays on the board.
    """

    task: Digest
    runtime: str
    chosen: Accelerator
    reason: str
    failed: str | None = None

    @property
    def used(self) -> Accelerator:
        return "cpu" if self.failed is not None else self.chosen
