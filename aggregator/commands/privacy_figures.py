"""Computes the figures of `hushfleet privacy`: what each adversary can learn, and the ring of a secure sum."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import Any

from rich.markup import escape
from rich.table import Column, Table

from hushfleet.aggregator.commands.second_opinion import Opinion, second_opinion
from hushfleet.aggregator.observe.console import Console
from hushfleet.errors import BadInput
from hushfleet.privacy.accounting.epsilon import Step, epsilon
from hushfleet.privacy.protection import QUESTIONS, worth
from hushfleet.privacy.ring import least_bits, scale_for
from hushfleet.privacy.terms import Accountant, Unit
from hushfleet.secure.committee import least_honest
from hushfleet.secure.prime_field import PRIMES


@dataclass(frozen=True)
class AdversaryView:
    """The knowledge of one adversary. An epsilon is inf without noise.

    :param epsilon: for adding or removing a unit.
    :param epsilon_exchange: for exchanging one unit for another; None if the accountant cannot compute it.
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


def view_of(
    adversary: str, sees: str, multiplier: float, rate: float, *, unit: Unit, rounds: int, delta: float,
    accountant: Accountant,
) -> AdversaryView:  # fmt: skip
    """Raises `PrivacyError` for values outside their range."""
    two = "records" if unit == "record" else "updates"
    steps = [Step(multiplier, rate, rounds)]
    spent = epsilon(steps, delta=delta, accountant=accountant)
    exchanged = meaning = None
    if accountant == "exact" or rate == 1:
        exchanged = epsilon(steps, delta=delta, accountant=accountant, adjacency="exchange")
        meaning = worth(exchanged, delta, f"which of two {two} is it?")
    return AdversaryView(
        adversary, sees, multiplier, spent, exchanged, delta, worth(spent, delta, QUESTIONS[unit]), meaning
    )


def honest_of(least: int, devices: int, honest_fraction: float) -> int:
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


def sums_of(multiplier: float, honest: int, devices: int, size: int) -> dict[str, float]:
    """Returns the ring of a task with these numbers; lengths are in steps of the ring."""
    bits = least_bits(PRIMES, noise_multiplier=multiplier, honest_devices=honest, devices=devices, size=size)
    scale = scale_for(
        prime=PRIMES[bits], noise_multiplier=multiplier, honest_devices=honest, devices=devices, size=size
    )
    noise = math.sqrt(scale.variance)
    return {
        "bits": bits,
        "steps": scale.steps,
        "noise": noise,
        "part": noise / math.sqrt(honest),
        "inflation": scale.inflation,
        "extra": scale.extra,
    }


def checked(
    both: tuple[AdversaryView, AdversaryView], rates: tuple[float, float], rounds: int, accountant: Accountant
) -> dict[str, Opinion]:
    """Returns Opacus' opinion on each finite epsilon, by name. Raises `BadInput` if Opacus is not installed."""
    try:
        return {
            f"epsilon_{view.adversary}": second_opinion(
                [Step(view.noise_multiplier, rate, rounds)],
                delta=view.delta,
                charged=view.epsilon,
                accountant=accountant,
            )
            for view, rate in zip(both, rates, strict=True)
            if math.isfinite(view.epsilon)
        }
    except ImportError as error:
        raise BadInput("--check asks Opacus, which is not installed: pip install 'hushfleet[server]'") from error


def print_json(facts: dict[str, Any], both: tuple[AdversaryView, AdversaryView], notes: list[str]) -> None:
    adversaries = [asdict(view) for view in both]
    for fields in adversaries:
        for name in ("epsilon", "epsilon_exchange"):
            fields[name] = fields[name] if fields[name] is not None and math.isfinite(fields[name]) else None
    print(json.dumps(facts | {"adversaries": adversaries, "notes": notes}, indent=2, allow_nan=False))


def print_table(facts: dict[str, Any], both: tuple[AdversaryView, AdversaryView], notes: list[str]) -> None:
    console = Console(highlight=False)
    table = Table("against whoever sees", "noise multiplier", Column(no_wrap=True), "epsilon", "exchange", "delta")
    for view in both:
        exchange = "-" if view.epsilon_exchange is None else f"{view.epsilon_exchange:.4g}"
        numbers = (f"{view.noise_multiplier:.4g}", f"epsilon_{view.adversary}", f"{view.epsilon:.4g}", exchange)
        table.add_row(view.sees, *numbers, f"{view.delta:g}")
    console.print(table)
    for view in both:
        console.print(f"epsilon_{view.adversary} {view.epsilon:.4g}: {escape(view.meaning)}")
        if view.epsilon_exchange is not None and view.meaning_exchange is not None:
            console.print(f"  exchange {view.epsilon_exchange:.4g}: {escape(view.meaning_exchange)}")
    console.print(f"noise multiplier {facts['noise_multiplier']:.6g}; accountant: {facts['accountant']}")
    if facts["trust"] is not None:
        console.print(f"trust: {facts['trust']}")
    console.print(f"adjacency: {escape(facts['adjacency'])}; exchange: one of them for another")
    for note in notes:
        console.print(f"[yellow]note:[/] {escape(note)}")
