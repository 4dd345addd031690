"""Computes and prints the figures of `hushfleet privacy`: what each adversary can learn, and the ring of secure
aggregation."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.markup import escape
from rich.table import Column, Table

from hushfleet.aggregator.commands.privacy_options import PrivacyOptions
from hushfleet.aggregator.commands.second_opinion import Opinion, second_opinion
from hushfleet.aggregator.config.secure_aggregation import LEAST_SHARE
from hushfleet.aggregator.report.console import Console
from hushfleet.errors import BadInput
from hushfleet.privacy.accountant import Step, epsilon
from hushfleet.privacy.adversaries import multipliers, snr_db
from hushfleet.privacy.adversaries import noise_multiplier as noise_multiplier_of
from hushfleet.privacy.charge import DEVICE_ADJACENCY, RECORD_ADJACENCY
from hushfleet.privacy.noise_for import check_delta
from hushfleet.privacy.protection import QUESTIONS, worth
from hushfleet.privacy.ring import least_bits, scale_for
from hushfleet.privacy.ring_length import chosen_length
from hushfleet.privacy.terms import TRUST, Accountant, Unit
from hushfleet.secure.committee import least_honest
from hushfleet.secure.prime_field import PRIMES


@dataclass(frozen=True)
class AdversaryView:
    """The knowledge of one adversary. An epsilon is inf without noise.

    :param epsilon: for adding or removing a unit.
    :param epsilon_exchange: for replacing one unit by another; None if the accountant cannot compute it.
    :param meaning: the meaning of `epsilon`, in words.
    """

    adversary: str
    sees: str
    noise_multiplier: float
    epsilon: float
    epsilon_exchange: float | None
    delta: float
    meaning: str
    meaning_exchange: str | None


@dataclass(frozen=True)
class PrivacyFigures:
    """The answer: the question's facts, the two adversaries, notes, and Opacus' opinions by the name of an epsilon."""

    facts: dict[str, Any]
    views: tuple[AdversaryView, AdversaryView]
    notes: list[str]
    opinions: dict[str, Opinion] = field(default_factory=dict)


def figures(options: PrivacyOptions) -> PrivacyFigures:
    """Raises `PrivacyError` for values outside their range, and `BadInput`."""
    split, least = options.noise_split, options.min_devices
    if options.devices is not None:
        least = max(2, math.ceil(LEAST_SHARE * options.devices - 1e-9)) if least is None else least
        split = _honest_of(least, options.devices, options.honest_fraction)
    summed = split if options.participants is None else options.participants
    terms: dict[str, Any] = {"rounds": options.rounds, "delta": options.delta, "accountant": options.accountant}
    noise_multiplier = options.noise_multiplier
    if noise_multiplier is None:
        target, rate = options.target or 0.0, options.sample_rate
        noise_multiplier = noise_multiplier_of(
            target, sample_rate=rate, noise_split=split, participants=summed, **terms
        )
    noise = multipliers(noise_multiplier, noise_split=split, participants=summed, unit=options.unit)
    own, seen = "its own updates: server, broker, wire", noise.server
    if options.devices is not None:
        own, seen = "sums, and what the corrupt devices know", noise.release
    rates = (options.sample_rate if options.unit == "record" else 1.0, options.sample_rate)
    views = (
        view_of("server", own, seen, rates[0], unit=options.unit, **terms),
        view_of("release", "released models only", noise.release, rates[1], unit=options.unit, **terms),
    )
    judged = options.units if options.units is not None else (summed if summed > 1 else None)
    notes = [] if judged is None else check_delta(options.delta, judged, as_published=True)
    sums = None
    if options.devices is not None:
        if options.parameters is None:
            raise BadInput("the bits of a value depend on the number of values: give --parameters")
        sums = _sums_of(noise_multiplier, split, options.devices, options.parameters)
        notes.append(
            f"{split} of the fewest {least} devices are honest for certain; {sums['bits']} bits a value, "
            f"{sums['steps']:.1f} steps in a clip norm, noise of {sums['noise']:.1f} steps in the sum and "
            f"{sums['part']:.1f} from each device; rounding costs {100 * sums['extra']:.2f} % of noise"
        )
    elif options.parameters is not None:
        ratio = snr_db(1.0, views[0].noise_multiplier, options.parameters)
        notes.append(f"signal-to-noise ratio of one device's {options.parameters} values: {ratio:.1f} dB at most")
    if options.sample_rate < 1 and options.unit == "device":
        notes.append("the server sees who takes part: its number is for a device that is drawn in every round")
    facts = {
        "unit": options.unit,
        "adjacency": RECORD_ADJACENCY if options.unit == "record" else DEVICE_ADJACENCY,
        "accountant": options.accountant,
        "noise_multiplier": noise_multiplier,
        "rounds": options.rounds,
        "sample_rate": options.sample_rate,
        "noise_split": split,
        "participants": summed,
        "trust": None if options.accounting is None else TRUST[options.accounting],
        "sums": sums,
    }
    found = PrivacyFigures(facts, views, notes)
    if options.check:
        for view, rate in zip(views, rates, strict=True):
            found.opinions.update(_checked(view, Step(view.noise_multiplier, rate, options.rounds), options.accountant))
        facts["check"] = [opinion._asdict() | {"differs": opinion.differs} for opinion in found.opinions.values()]
    return found


def view_of(
    adversary: str, sees: str, multiplier: float, rate: float, *, unit: Unit, rounds: int, delta: float,
    accountant: Accountant,
) -> AdversaryView:  # fmt: skip
    """Raises `PrivacyError` for values outside their range."""
    two = "records" if unit == "record" else "updates"
    steps = [Step(multiplier, rate, rounds)]
    spent = epsilon(steps, delta=delta, accountant=accountant)
    replaced = meaning = None
    if accountant == "exact" or rate == 1:
        replaced = epsilon(steps, delta=delta, accountant=accountant, adjacency="replace-one")
        meaning = worth(replaced, delta, f"which of two {two} is it?")
    return AdversaryView(
        adversary, sees, multiplier, spent, replaced, delta, worth(spent, delta, QUESTIONS[unit]), meaning
    )


def _honest_of(least: int, devices: int, honest_fraction: float) -> int:
    if not (2 <= least <= devices and 0 < honest_fraction <= 1):
        raise BadInput(
            f"a sum has 2 devices or more, and an honest fraction lies in (0, 1]; got {least} of {devices} devices and "
            f"{honest_fraction:g}"
        )
    honest = least_honest(least, devices=devices, honest_fraction=honest_fraction, drawn=devices)
    if honest == 0:
        raise BadInput(
            f"the smallest sum of {least} devices may have no honest device, so there is no promise: raise "
            "--min-devices or --honest-fraction"
        )
    return honest


def _sums_of(multiplier: float, honest: int, devices: int, size: int) -> dict[str, float]:
    """Returns the ring of a task with these numbers; lengths are in steps of the ring."""
    terms: dict[str, Any] = {"honest_devices": honest, "devices": devices, "size": chosen_length(size)}
    bits = least_bits(PRIMES, noise_multiplier=multiplier, **terms)
    scale = scale_for(prime=PRIMES[bits], noise_multiplier=multiplier, **terms)
    noise = math.sqrt(scale.variance)
    lengths = {"steps": scale.steps, "noise": noise, "part": noise / math.sqrt(honest)}
    return {"bits": bits, **lengths, "inflation": scale.inflation, "extra": scale.extra}


def _checked(view: AdversaryView, step: Step, accountant: Accountant) -> dict[str, Opinion]:
    """Returns Opacus' opinion on an epsilon, if it is finite. Raises `BadInput` if Opacus is not installed."""
    if not math.isfinite(view.epsilon):
        return {}
    try:
        found = second_opinion([step], delta=view.delta, charged=view.epsilon, accountant=accountant)
    except ImportError as error:
        raise BadInput("--check asks Opacus, which is not installed: pip install 'hushfleet[server]'") from error
    return {f"epsilon_{view.adversary}": found}


def print_json(found: PrivacyFigures) -> None:
    """Prints the figures for scripts; an unbounded epsilon is null."""
    views = [
        {
            name: None if isinstance(value, float) and math.isinf(value) else value
            for name, value in asdict(view).items()
        }
        for view in found.views
    ]
    print(json.dumps(found.facts | {"adversaries": views, "notes": found.notes}, indent=2, allow_nan=False))


def print_table(found: PrivacyFigures) -> None:
    console = Console(highlight=False)
    table = Table("against whoever sees", "noise multiplier", Column(no_wrap=True), "epsilon", "replace-one", "delta")
    meanings = []
    for view in found.views:
        replaced = "-" if view.epsilon_exchange is None else f"{view.epsilon_exchange:.4g}"
        numbers = (f"{view.noise_multiplier:.4g}", f"epsilon_{view.adversary}", f"{view.epsilon:.4g}", replaced)
        table.add_row(view.sees, *numbers, f"{view.delta:g}")
        meanings.append(f"epsilon_{view.adversary} {view.epsilon:.4g}: {view.meaning}")
        meanings += [] if view.meaning_exchange is None else [f"  replace-one {replaced}: {view.meaning_exchange}"]
    console.print(table)
    facts = found.facts
    trust = [] if facts["trust"] is None else [f"trust: {facts['trust']}"]
    for line in (
        *meanings,
        f"noise multiplier {facts['noise_multiplier']:.6g}; accountant: {facts['accountant']}",
        *trust,
        f"adjacency: {facts['adjacency']}; replace-one: one of them by another",
    ):
        console.print(escape(line))
    for note in found.notes:
        console.print(f"[yellow]note:[/] {escape(note)}")
    for name, opinion in found.opinions.items():
        print(f"check: {name}: {opinion.text}")
