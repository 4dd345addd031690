"""`[round]` of a task file: when rounds open and close, how their updates are aggregated, and buffered rounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from hushfleet.aggregator.config.sections import MethodSection, PrivacySection
from hushfleet.config.spec import Rounds
from hushfleet.methods.method import Method
from hushfleet.methods.stages import NumberReport
from hushfleet.schema import AtLeast1, Checked, Share
from hushfleet.secure.committee import committee_rule
from hushfleet.wire.format.messages import MAX_COHORT


@dataclass(frozen=True)
class RoundSection(Checked):
    """`[round]`: how many rounds, who takes part, when a round closes.

    A round closes when the share `quorum` of the cohort has sent accepted updates, when all devices have answered, or
    after `deadline_s` with at least `min_updates` updates; with fewer it is extended.

    With `privacy.accounting = "secure"` a sum of fewer than `min_updates` is never opened; left out, `min_updates` is
    nine tenths of the cohort.

    `aggregation` says how the updates are combined, separately for each parameter, over the devices that sent it: their
    `mean`; their `median`; or the `trimmed-mean`, without the share `trim` of them at either end (rounded down). With
    the last two a few devices that send arbitrary values cannot control the result; they cost accuracy and memory
    (docs/privacy.md, "A member that lies").

    With `patience` the task ends when the global model's accuracy on the aggregator's own public test set (in a
    simulation the common test set) has not exceeded its best value for this number of rounds; 0: after `rounds`. This
    uses none of the devices' data, so it costs no privacy.

    With `mode = "buffered"` a round waits for no device (FedBuff): any device trains on the newest global model when it
    can, and `buffer_size` updates make the next model. An update of a model that is `max_staleness` (20) models old is
    still accepted, with the weight 1/sqrt(1 + staleness). `deadline_s` is then the longest time of one training.
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

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.trim is not None) != (self.aggregation == "trimmed-mean"):
            raise ValueError(
                f"trim and aggregation = 'trimmed-mean' need each other, and aggregation = {self.aggregation!r} has "
                f"trim = {self.trim}; it is the share of the updates that is left out at either end, for example 0.1"
            )
        if self.buffered:
            self._check_buffer()
        elif self.buffer_size is not None or self.max_staleness is not None:
            raise ValueError(
                f'buffer_size = {self.buffer_size}, max_staleness = {self.max_staleness}: need mode = "buffered"'
            )
        if self.patience >= self.rounds:
            raise ValueError(f"patience = {self.patience}: must be below rounds = {self.rounds}, or it ends nothing")

    @property
    def buffered(self) -> bool:
        return self.mode == "buffered"

    def _check_buffer(self) -> None:
        """Completes the settings of buffered rounds. Raises `ValueError` for settings that have no meaning in them."""
        if self.buffer_size is None:
            raise ValueError('mode = "buffered" needs buffer_size, the updates that make a new model, for example 10')
        plain = RoundSection()
        for name in ("cohort_size", "quorum", "min_updates"):
            if getattr(self, name) != getattr(plain, name):
                raise ValueError(f"{name} = {getattr(self, name)}: mode = 'buffered' waits for nobody; leave it out")
        if self.aggregation != "mean":
            raise ValueError(f"aggregation = {self.aggregation!r}: a stale update counts less, which needs the 'mean'")
        if self.max_staleness is None:
            object.__setattr__(self, "max_staleness", 20)

    def check_updates(self, cohort: int) -> None:
        """Raises `ValueError` if a round needs more updates than it has devices."""
        if self.min_updates > cohort:
            raise ValueError(
                f"round.min_updates = {self.min_updates}: a round has {cohort} devices (data.devices, "
                f"round.cohort_size), so none could ever close with so many updates; take {cohort} or fewer"
            )

    def check(self, devices: int, *, honest_fraction: float | None) -> None:
        """Raises `ValueError` if a fleet of this size could never open a round, or close one with a model.

        :param honest_fraction: the honest fraction of secure sums, whose cohort follows from the roster, not from the
            devices that are present when the round opens; None: no secure sums.
        """
        is_named = honest_fraction is None and not self.buffered  # in each round's plan
        if self.cohort_size > MAX_COHORT and is_named:
            raise ValueError(
                f"round.cohort_size = {self.cohort_size}: a round's plan names at most {MAX_COHORT} devices; take that "
                "or fewer, or 0 for as many as fit"
            )
        cohort = self.cohort_size or (min(devices, MAX_COHORT) if is_named else devices)
        if (self.buffer_size or 0) > devices:
            raise ValueError(
                f"round.buffer_size = {self.buffer_size}: the fleet has {devices} devices (data.devices), and each "
                f"sends one update a version; take {devices} or fewer"
            )
        if cohort > devices:
            raise ValueError(
                f"round.cohort_size = {cohort}: the fleet has {devices} devices (data.devices); take 0 for all of them"
            )
        self.check_updates(cohort)
        if honest_fraction is not None:
            committee = committee_rule(cohort, honest_fraction=honest_fraction, roster=devices)
            if committee.packed < 1:
                raise ValueError(
                    f"privacy.honest_fraction = {honest_fraction:g}: of {committee.members} members of a committee "
                    f"{committee.corrupt} may be corrupt, so none could ever open a sum; more trust is needed"
                )
        if self.min_devices is None:
            return
        if self.min_devices > devices:
            raise ValueError(
                f"round.min_devices = {self.min_devices}: the fleet has {devices} devices (data.devices), so no round "
                f"could ever open; take {devices} or fewer"
            )
        if self.min_devices < self.min_updates and honest_fraction is None:
            raise ValueError(
                f"round.min_devices = {self.min_devices}: a round that opens with so few devices could never close "
                f"with round.min_updates = {self.min_updates}; take {self.min_updates} or more"
            )


def check_buffered(privacy: PrivacySection, method: MethodSection, parts: Callable[[], Method]) -> None:
    """Raises `ValueError` if an update of an earlier version, or from any device that happens to send one, has no
    meaning for the task's buffered rounds.

    :param parts: returns the method's parts.
    """
    if privacy.accounting == "secure":
        raise ValueError(
            'round.mode = "buffered": masks cancel within one cohort that is settled before, so '
            'privacy.accounting = "secure" has no buffer. The sum over whoever comes in a window is '
            'round.mode = "synchronous" with deadline_s and min_updates'
        )
    if privacy.accounting == "as-published":
        raise ValueError(
            'round.mode = "buffered": privacy.accounting = "as-published" divides the noise among a cohort, and '
            'each update of a buffer has its whole noise; take privacy.accounting = "strict"'
        )
    made = parts()
    refused = {
        "weighs updates by the model that they are added to": made.server.weighs,
        "gives devices more than the model of a version": bool(made.server.vectors),
        "steers a round by the reports of the one before": any(isinstance(s, NumberReport) for s in made.stages),
        "lets devices choose their own noise": made.max_preference is not None,
    }
    for words in (words for words, is_so in refused.items() if is_so):
        raise ValueError(
            f'round.mode = "buffered": method.name = {method.name!r} {words}, which has no meaning where a '
            "sum has updates of several versions; take for example 'dp-fedavg' or 'hush'"
        )
