"""`[round]` of a task file: when rounds open and close, how their updates are aggregated, and buffered rounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from msgspec import Meta

from hushfleet.aggregator.config import rules
from hushfleet.schema import AtLeast1, Checked, Share
from hushfleet.wire.format.spec import Rounds

RULES_OF_OTHER_MODE: dict[str, dict[str, Any]] = {
    "buffered": {"cohort_size": 0, "quorum": 1.0, "min_updates": 1},
    "synchronous": {"buffer_size": None, "max_staleness": None},
}
"""For each mode: resets the rules that only have a meaning in the other one."""


@dataclass(frozen=True)
class RoundSection(Checked):
    """`[round]`: how many rounds, who takes part, when a round closes.

    A round closes when the share `quorum` of the cohort has sent accepted updates, when all devices have answered, or
    after `deadline_s` with at least `min_updates` updates; with fewer it is extended.

    :param mode: `buffered`: a round waits for no device (FedBuff): any device trains on the newest global model when it
        can, and `buffer_size` updates make the next model.
    :param buffer_size: with `buffered`.
    :param max_staleness: with `buffered`: an update of a model that is this many models old is still accepted, with the
        weight 1/sqrt(1 + staleness); 20 if left out.
    :param rounds: number of training rounds.
    :param cohort_size: devices of a round; 0: all.
    :param min_devices: a round opens when this many devices can take part.
    :param quorum: share of the cohort whose updates close a round.
    :param min_updates: the fewest updates of a model. With `privacy.accounting = "secure"` a sum of fewer is never
        opened; left out, it is then nine tenths of the cohort.
    :param deadline_s: seconds from a round's opening; with `buffered` the longest time of one training.
    :param aggregation: how updates are combined, separately for each parameter, over the devices that sent it: their
        `mean`; their `median`; or the `trimmed-mean`. With the last two a few devices that send arbitrary values cannot
        control the result; they cost accuracy and memory (docs/privacy.md, "A member that lies").
    :param trim: share of the updates that `trimmed-mean` leaves out at either end, rounded down.
    :param patience: the task ends when the global model's accuracy on the aggregator's own public test set (in a
        simulation the common test set) has not exceeded its best value for this number of rounds; 0: after `rounds`.
        This uses none of the devices' data, so it costs no privacy.
    """

    mode: Literal["synchronous", "buffered"] = "synchronous"
    buffer_size: AtLeast1 | None = None
    max_staleness: Annotated[int, Meta(ge=1, le=1000)] | None = None
    rounds: Rounds = 20
    cohort_size: Annotated[int, Meta(ge=0)] = 0
    min_devices: AtLeast1 | None = None
    quorum: Share = 1.0
    min_updates: AtLeast1 = 1
    deadline_s: Annotated[float, Meta(gt=0, le=30 * 86400)] = 600.0
    aggregation: Literal["mean", "trimmed-mean", "median"] = "mean"
    trim: Annotated[float, Meta(gt=0, lt=0.5)] | None = None
    patience: Annotated[int, Meta(ge=0)] = 0

    rules = rules.ROUND

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.has_cohort and self.max_staleness is None:
            object.__setattr__(self, "max_staleness", 20)

    @property
    def has_cohort(self) -> bool:
        """Whether a round waits for certain devices; else for `buffer_size` updates of whichever devices come."""
        return self.mode == "synchronous"

    @property
    def least_present(self) -> int | None:
        """How many devices must be able to take part for a round to open; None: as many as it has devices."""
        return self.min_devices or (None if self.has_cohort else 1)

    @property
    def protects_each_alone(self) -> bool:
        """Whether an update hides in no sum: a median may be one device's value, and a sum over several models may have
        two updates of a device, and counts the older one less."""
        return self.aggregation != "mean" or not self.has_cohort
