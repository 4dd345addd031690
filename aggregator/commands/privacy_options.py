"""The options of `hushfleet privacy`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from hushfleet.aggregator.report.options import Option
from hushfleet.privacy.terms import HONEST_FRACTION, Accountant, Accounting, Unit


@dataclass(frozen=True, kw_only=True)
class PrivacyOptions:
    """The question: noise, rounds, and who takes part."""

    rounds: Annotated[int, Option(help="Rounds; with --unit record, batches over the whole task.")]
    delta: Annotated[float, Option(help="Probability with which the promise may fail.")]
    noise_multiplier: Annotated[
        float | None, Option(help="Noise of the sum of --noise-split devices, over the clip norm.")
    ] = None
    target: Annotated[
        float | None,
        Option("--epsilon", help="Find the noise multiplier that gives this epsilon to the released models."),
    ] = None
    sample_rate: Annotated[float, Option(help="Probability that a unit takes part in a round (Poisson).")] = 1.0
    noise_split: Annotated[
        int, Option(help="Devices that divide the noise: each adds 1/sqrt(N) of it. 1 is local privacy.")
    ] = 1
    participants: Annotated[
        int | None, Option(help="Devices whose updates are added up; --noise-split if not given.")
    ] = None
    unit: Annotated[Unit, Option(help="Unit of privacy: a whole device or one record.")] = "device"
    units: Annotated[int | None, Option(help="Number of such units, to compare with 1/delta.")] = None
    parameters: Annotated[int | None, Option(help="Number of values in an update, for its signal-to-noise ratio.")] = (
        None
    )
    accounting: Annotated[
        Accounting | None,
        Option(help="Trust model: strict (trust nobody), secure (sums of enough honest devices), as-published."),
    ] = None
    devices: Annotated[int | None, Option(help="Number of devices in secure aggregation when none is missing.")] = None
    honest_fraction: Annotated[float, Option(help="Least share of honest devices, with secure aggregation.")] = (
        HONEST_FRACTION
    )
    min_devices: Annotated[
        int | None, Option(help="Fewest devices in a sum that is opened; default: nine tenths of --devices.")
    ] = None
    accountant: Annotated[Accountant, Option(help="Accountant that computes epsilon; rdp: as in the papers.")] = "exact"
    check: Annotated[
        bool, Option("--check", help="Also print the results of Opacus' RDP and PRV accountants; takes seconds.")
    ] = False
    as_json: Annotated[bool, Option("--json", help="Print JSON; an unbounded epsilon is null.")] = False
