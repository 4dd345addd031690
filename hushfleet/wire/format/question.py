"""Defines a question to a fleet: in some rounds devices do not train, but answer with a short vector about their data.

The answer is treated like an update: it is clipped, noised, charged and summed. A task that trains may ask for its own
evaluation; a task that asks for counts, a mean or a histogram has no training rounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from hushfleet.schema import AtLeast1, Checked, Finite, NotNegative, Share, later, require

QuestionKind = Literal["evaluation", "counts", "mean", "histogram", "drift"]
HeldOut = Annotated[float, Meta(ge=0, le=0.5)]
EVALUATED = 5
"""Values of an evaluation, see `hushfleet.methods.answer`."""
Bins = Annotated[int, Meta(ge=2, le=256)]
Most = Annotated[int, Meta(ge=1, le=1_000_000)]


@dataclass(frozen=True)
class QuestionSpec(Checked):
    """A question, its rounds and its noise.

    :param every: each round whose number is a multiple of this asks, and the last round too.
    :param noise_multiplier: the noise multiplier of an answer, whose norm is at most 1.
    :param bits: bits of a value on the wire, in secure aggregation.
    :param held_out: the share of the samples that are never used in training, because an evaluation needs them.
    :param most_gain: for an evaluation: a device's gain over training alone counts as this much at most.
    :param column: for a mean or a histogram: the number of a value of a sample, from 0; or the name of a target.
    :param low: public lower limit of that column; values below it count as the limit.
    :param high: its public upper limit; values above it count as the limit.
    :param bins: the number of bins of a histogram.
    :param most: for counts: a device whose counts have a larger norm scales them down to this norm.
    """

    kind: QuestionKind
    every: AtLeast1
    noise_multiplier: NotNegative
    bits: Literal[16, 24, 32] = 32
    held_out: HeldOut = later(0.0)
    most_gain: Share = later(1.0)
    column: str = later("")
    low: Finite = later(0.0)
    high: Finite = later(1.0)
    bins: Bins = later(2)
    most: Most = later(1)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.low < self.high, "low, high", f"{self.low:g} to {self.high:g}", "rising")

    def size(self, classes: int) -> int:
        """Counts the values of an answer."""
        sizes = {"evaluation": EVALUATED, "counts": classes + 1, "mean": 1, "histogram": self.bins, "drift": 2}
        return sizes[self.kind]
