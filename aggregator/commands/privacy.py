"""`hushfleet privacy`: compute epsilon from noise, and noise from epsilon, for both adversaries.

It always shows two adversaries. Client sampling counts only for the release: an adversary who sees a device's own
bytes also sees whether it took part, so against the server a device is charged as if it was drawn in every round. It
also shows two guesses: whether a unit took part or not (add or remove), and which of two units took part (exchange).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from hushfleet.aggregator.options import Option, with_options
from hushfleet.errors import BadInput, PrivacyError
from hushfleet.privacy.terms import HONEST_FRACTION, TRUST, Accountant, Accounting, Unit


@dataclass(frozen=True, kw_only=True)
class PrivacyOptions:
    """The question: noise, rounds, and who takes part."""

    # fmt: off
    rounds: Annotated[int, Option(help="Rounds; with --unit record, batches over the whole task.")]
    delta: Annotated[float, Option(help="Probability with which the promise may fail.")]
    noise_multiplier: Annotated[float | None, Option(help="Noise of the sum of --noise-split devices, over the clip norm.")] = None
    target: Annotated[float | None, Option("--epsilon", help="Find the noise multiplier that gives this epsilon to the released models.")] = None
    sample_rate: Annotated[float, Option(help="Probability that a unit takes part in a round (Poisson).")] = 1.0
    noise_split: Annotated[int, Option(help="Devices that divide the noise: each adds 1/sqrt(N) of it. 1 is local privacy.")] = 1
    participants: Annotated[int | None, Option(help="Devices whose updates are added up; --noise-split if not given.")] = None
    unit: Annotated[Unit, Option(help="Unit of privacy: a whole device or one record.")] = "device"
    units: Annotated[int | None, Option(help="Number of such units, to compare with 1/delta.")] = None
    parameters: Annotated[int | None, Option(help="Number of values in an update, for its signal-to-noise ratio.")] = None
    accounting: Annotated[Accounting | None, Option(help="Trust model: strict (trust nobody), secure (sums of enough honest devices), as-published.")] = None
    devices: Annotated[int | None, Option(help="Number of devices in a secure sum when none is missing.")] = None
    honest_fraction: Annotated[float, Option(help="Least share of honest devices, with secure sums.")] = HONEST_FRACTION
    min_devices: Annotated[int | None, Option(help="Fewest devices in a sum that is opened; default: nine tenths of --devices.")] = None
    accountant: Annotated[Accountant, Option(help="Accountant that computes epsilon; rdp: as in the papers.")] = "exact"
    check: Annotated[bool, Option("--check", help="Also print the results of Opacus' RDP and PRV accountants; takes seconds.")] = False
    as_json: Annotated[bool, Option("--json", help="Print JSON; an unbounded epsilon is null.")] = False
    # fmt: on


@with_options
def privacy(
    options: PrivacyOptions,
) -> None:
    """Compute epsilon from a noise multiplier, or the noise multiplier for an epsilon, against both adversaries.

    Ten devices that divide the noise of 20 rounds among them (FedGLP-ADP at its "epsilon = 2"):

        hushfleet privacy --noise-multiplier 3.975 --rounds 20 --delta 0.1 --noise-split 10

    The noise that gives epsilon 2 to the released models, nothing divided:

        hushfleet privacy --epsilon 2 --rounds 20 --delta 0.01

    Record-level noise, 3000 batches with each record drawn with probability 1/100:

        hushfleet privacy --unit record --epsilon 4 --rounds 3000 --sample-rate 0.01 --delta 1e-5

    A hundred devices with secure sums; a tenth may be corrupt and another tenth missing:

        hushfleet privacy --accounting secure --devices 100 --parameters 5130 --epsilon 2 --rounds 20 --delta 1e-5

    The table shows epsilon for adding or removing a unit, and for replacing one unit by another. `--accountant rdp` computes as
    the papers do, with Rényi's bound, which is larger.
    """
    from hushfleet.aggregator.commands.privacy_figures import (
        checked,
        honest_of,
        print_json,
        print_table,
        sums_of,
        view_of,
    )
    from hushfleet.aggregator.config.secure_sums import LEAST_SHARE
    from hushfleet.privacy.accounting.noise_for import check_delta
    from hushfleet.privacy.adversaries import multipliers, snr_db
    from hushfleet.privacy.adversaries import noise_multiplier as noise_multiplier_of
    from hushfleet.privacy.charge import DEVICE_ADJACENCY, RECORD_ADJACENCY

    noise_multiplier, noise_split = options.noise_multiplier, options.noise_split
    if (noise_multiplier is None) == (options.target is None):
        raise BadInput("give either --noise-multiplier or --epsilon, the other one is computed")
    if options.rounds < 1:
        raise BadInput(f"--rounds must be 1 or more, got {options.rounds}")
    if options.unit == "record" and (noise_split != 1 or options.participants not in (None, 1)):
        raise BadInput("record-level noise is added whole on each device: leave out --noise-split, --participants")
    if options.unit == "record" and options.parameters is not None:
        raise BadInput("--parameters asks about device-level noise: leave it out with --unit record")
    if options.accounting == "strict" and noise_split != 1:
        raise BadInput("strict noise is not divided: leave out --noise-split")
    if (options.accounting == "secure") != (options.devices is not None):
        raise BadInput("--accounting secure needs --devices, and --devices needs --accounting secure")
    if options.devices is None and (options.min_devices is not None or options.honest_fraction != HONEST_FRACTION):
        raise BadInput("--honest-fraction and --min-devices need --accounting secure")
    if options.parameters is not None and options.parameters < 1:
        raise BadInput(f"--parameters must be 1 or more, got {options.parameters}")
    try:
        if options.devices is not None:
            if (
                options.unit == "record"
                or noise_split != 1
                or options.participants is not None
                or options.sample_rate != 1
            ):
                raise BadInput(
                    "a secure sum takes --devices, --honest-fraction and --min-devices alone: remove the other options"
                )
            least = (
                options.min_devices
                if options.min_devices is not None
                else max(2, math.ceil(LEAST_SHARE * options.devices - 1e-9))
            )
            noise_split = honest_of(least, options.devices, options.honest_fraction)
        summed = options.participants if options.participants is not None else noise_split
        if noise_multiplier is None:
            noise_multiplier = noise_multiplier_of(
                options.target or 0.0,
                rounds=options.rounds,
                delta=options.delta,
                sample_rate=options.sample_rate,
                noise_split=noise_split,
                participants=summed,
                accountant=options.accountant,
            )
        noise = multipliers(noise_multiplier, noise_split=noise_split, participants=summed, unit=options.unit)
        own, rate = "its own updates: server, broker, wire", options.sample_rate if options.unit == "record" else 1.0
        seen = noise.server
        if options.devices is not None:
            own, seen = "sums, and what the corrupt devices know", noise.release
        view = partial(
            view_of, unit=options.unit, rounds=options.rounds, delta=options.delta, accountant=options.accountant
        )
        both = (
            view("server", own, seen, rate),
            view("release", "released models only", noise.release, options.sample_rate),
        )
        judged = options.units if options.units is not None else (summed if summed > 1 else None)
        notes = [] if judged is None else check_delta(options.delta, judged, as_published=True)
        sums = None
        if options.devices is not None:
            if options.parameters is None:
                raise BadInput("the bits of a value depend on the number of values: give --parameters")
            sums = sums_of(noise_multiplier, noise_split, options.devices, options.parameters)
            notes.append(
                f"{noise_split} of the fewest {least} devices are honest for certain; {sums['bits']} bits a value, "
                f"{sums['steps']:.1f} steps in a clip norm, noise of {sums['noise']:.1f} steps in the sum and "
                f"{sums['part']:.1f} from each device; rounding costs {100 * sums['extra']:.2f} % of noise"
            )
        elif options.parameters is not None:
            ratio = snr_db(1.0, both[0].noise_multiplier, options.parameters)
            notes.append(f"signal-to-noise ratio of one device's {options.parameters} values: {ratio:.1f} dB at most")
        opinions = (
            checked(both, (rate, options.sample_rate), options.rounds, options.accountant) if options.check else {}
        )
    except PrivacyError as error:
        raise BadInput(str(error)) from error
    if options.sample_rate < 1 and options.unit == "device":
        notes.append("the server sees who takes part: its number is for a device that is drawn in every round")
    facts = {
        "unit": options.unit,
        "adjacency": RECORD_ADJACENCY if options.unit == "record" else DEVICE_ADJACENCY,
        "accountant": options.accountant,
        "noise_multiplier": noise_multiplier,
        "rounds": options.rounds,
        "sample_rate": options.sample_rate,
        "noise_split": noise_split,
        "participants": summed,
        "trust": None if options.accounting is None else TRUST[options.accounting],
        "sums": sums,
    }
    if options.check:
        facts["check"] = [opinion._asdict() | {"differs": opinion.differs} for opinion in opinions.values()]
    if options.as_json:
        print_json(facts, both, notes)
    else:
        print_table(facts, both, notes)
        for name, opinion in opinions.items():
            print(f"check: {name}: {opinion.text}")
