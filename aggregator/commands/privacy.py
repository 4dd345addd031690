"""`hushfleet privacy`: from noise to epsilon and back, for both adversaries at once.

Two adversaries, always together. Client sampling counts for the release only: whoever sees a device's own
bytes also sees whether it took part, so against the server a device is charged as if drawn every round. And
two guesses: whether a unit was in or nothing (add or remove), and which of two units was in (exchange).
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hushfleet.errors import BadInput, PrivacyError
from hushfleet.privacy.accounting.epsilon import Accountant, Step, check_delta, epsilon, noise_multiplier_for
from hushfleet.privacy.mechanism import DEVICE_ADJACENCY, RECORD_ADJACENCY, GaussianMechanism
from hushfleet.privacy.snr import snr_db

HELP = """What a noise level costs in epsilon, or what an epsilon costs in noise: against both adversaries.

Ten devices that divide the noise of 20 rounds among them (FedGLP-ADP at its "epsilon = 2"):

    hushfleet privacy --noise-multiplier 3.975 --rounds 20 --delta 0.1 --noise-split 10

The noise that gives epsilon 2 to the released models, nothing divided:

    hushfleet privacy --epsilon 2 --rounds 20 --delta 0.01

Record-level noise, 3000 batches with each record drawn with probability 1/100:

    hushfleet privacy --unit record --epsilon 4 --rounds 3000 --sample-rate 0.01 --delta 1e-5

Epsilon is for adding or removing a unit, and beside it for exchanging one for another. `--accountant rdp` computes as
the papers do, with Rényi's bound, which is larger.
"""


class Unit(StrEnum):
    device = "device"
    record = "record"


class AccountantName(StrEnum):
    exact = "exact"
    rdp = "rdp"


@dataclass(frozen=True)
class View:
    """What one adversary can learn. An epsilon is inf without noise.

    :param epsilon: for adding or removing a unit.
    :param epsilon_exchange: for exchanging one for another; None where the accountant does not know it.
    """

    adversary: str
    sees: str
    unit: str
    noise_multiplier: float
    epsilon: float
    epsilon_exchange: float | None
    delta: float

    @property
    def meaning(self) -> str:
        """Of `epsilon`."""
        what = "update the device's" if self.unit == "device" else "record in"
        return self._guessed(self.epsilon, f"is this {what}, or nothing?")

    @property
    def meaning_exchange(self) -> str | None:
        if self.epsilon_exchange is None:
            return None
        what = "updates" if self.unit == "device" else "records"
        return self._guessed(self.epsilon_exchange, f"which of two {what} is it?")

    def _guessed(self, epsilon: float, question: str) -> str:
        """How often the best guess between two worlds is right: (e^epsilon + delta) / (e^epsilon + 1)."""
        wrong = (1 - self.delta) / (math.exp(min(epsilon, 700)) + 1)
        if wrong < 0.001:
            return f'hardly a promise: a guess at "{question}" may be right more than 99.9 % of the time'
        return f'a guess at "{question}" is right at most {100 * (1 - wrong):.1f} % of the time (a coin: 50 %)'


def views(
    *,
    unit: str,
    noise_multiplier: float,
    rounds: int,
    delta: float,
    sample_rate: float,
    noise_split: int,
    participants: int,
    accountant: Accountant = "exact",
) -> tuple[View, View]:
    """Both adversaries' numbers. Raises `PrivacyError` for values outside their range."""
    mechanism = GaussianMechanism(noise_multiplier, noise_split=noise_split)
    record = unit == "record"
    server = mechanism.multiplier_server
    release = noise_multiplier if record else mechanism.multiplier_release(participants)
    server_rate = sample_rate if record else 1.0

    def view(adversary: str, sees: str, multiplier: float, rate: float) -> View:
        steps = [Step(multiplier, rate, rounds)]
        spent = epsilon(steps, delta=delta, accountant=accountant)
        exchanged = None
        if accountant == "exact" or rate == 1:
            exchanged = epsilon(steps, delta=delta, accountant=accountant, adjacency="exchange")
        return View(adversary, sees, unit, multiplier, spent, exchanged, delta)

    return (
        view("server", "its own updates: server, broker, wire", server, server_rate),
        view("release", "released models only", release, sample_rate),
    )


def register(app: typer.Typer) -> None:
    """Adds the command `privacy` to `app`."""

    @app.command(help=HELP)
    def privacy(
        noise_multiplier: float | None = typer.Option(
            None, "--noise-multiplier", help="Noise of the sum of --noise-split devices, over the clip norm."
        ),
        target: float | None = typer.Option(
            None,
            "--epsilon",
            help="Find the noise multiplier that gives this epsilon to the released models.",
        ),
        rounds: int = typer.Option(..., "--rounds", help="Rounds; with --unit record, batches over the whole task."),
        delta: float = typer.Option(..., "--delta", help="Probability with which the promise may fail."),
        sample_rate: float = typer.Option(
            1.0, "--sample-rate", help="Probability that a unit takes part in a round (Poisson)."
        ),
        noise_split: int = typer.Option(
            1,
            "--noise-split",
            help="Devices that divide the noise: each adds 1/sqrt(N) of it. 1 is local privacy.",
        ),
        participants: int | None = typer.Option(
            None, "--participants", help="Devices whose updates are added up; --noise-split if not given."
        ),
        unit: Annotated[Unit, typer.Option("--unit", help="What is protected.")] = Unit.device,
        units: int | None = typer.Option(None, "--units", help="How many of them there are, to judge delta by."),
        parameters: int | None = typer.Option(
            None, "--parameters", help="Values sent, for the signal-to-noise ratio of one device's update."
        ),
        accountant: Annotated[
            AccountantName, typer.Option("--accountant", help="How epsilon is found; rdp as in the papers.")
        ] = AccountantName.exact,
        as_json: bool = typer.Option(False, "--json", help="Print JSON; an unbounded epsilon is null."),
    ) -> None:
        if (noise_multiplier is None) == (target is None):
            raise BadInput("give either --noise-multiplier or --epsilon, the other one is computed")
        if rounds < 1:
            raise BadInput(f"--rounds must be 1 or more, got {rounds}")
        if unit is Unit.record and (noise_split != 1 or participants not in (None, 1)):
            raise BadInput("record-level noise is added whole on each device: leave out --noise-split, --participants")
        if unit is Unit.record and parameters is not None:
            raise BadInput("--parameters asks about device-level noise: leave it out with --unit record")
        summed = participants if participants is not None else noise_split
        try:
            if noise_multiplier is None:
                total = noise_multiplier_for(
                    epsilon=target or 0.0,
                    delta=delta,
                    steps=rounds,
                    sample_rate=sample_rate,
                    accountant=accountant.value,
                )
                # `total` is the noise of the whole sum; the option speaks of the sum of noise_split devices.
                noise_multiplier = total / GaussianMechanism(1.0, noise_split=noise_split).multiplier_release(summed)
            both = views(
                unit=unit.value,
                noise_multiplier=noise_multiplier,
                rounds=rounds,
                delta=delta,
                sample_rate=sample_rate,
                noise_split=noise_split,
                participants=summed,
                accountant=accountant.value,
            )
            judged = units if units is not None else (summed if summed > 1 else None)
            notes = [] if judged is None else check_delta(delta, judged, as_published=True)
            if parameters is not None:
                ratio = snr_db(1.0, both[0].noise_multiplier, parameters)
                notes.append(f"signal-to-noise ratio of one device's {parameters} values: {ratio:.1f} dB at most")
        except PrivacyError as error:
            raise BadInput(str(error)) from error
        if sample_rate < 1 and unit is Unit.device:
            notes.append("the server sees who takes part: its number is for a device that is drawn in every round")
        facts = {
            "unit": unit.value,
            "adjacency": RECORD_ADJACENCY if unit is Unit.record else DEVICE_ADJACENCY,
            "accountant": accountant.value,
            "noise_multiplier": noise_multiplier,
            "rounds": rounds,
            "sample_rate": sample_rate,
            "noise_split": noise_split,
            "participants": summed,
        }
        if as_json:
            _print_json(facts, both, notes)
        else:
            _print_table(facts, both, notes)


def _print_json(facts: dict[str, Any], both: tuple[View, View], notes: list[str]) -> None:
    adversaries = []
    for view in both:
        fields = {name: value for name, value in asdict(view).items() if name != "unit"}
        for name in ("epsilon", "epsilon_exchange"):
            fields[name] = fields[name] if fields[name] is not None and math.isfinite(fields[name]) else None
        adversaries.append(fields | {"meaning": view.meaning, "meaning_exchange": view.meaning_exchange})
    print(json.dumps(facts | {"adversaries": adversaries, "notes": notes}, indent=2, allow_nan=False))


def _print_table(facts: dict[str, Any], both: tuple[View, View], notes: list[str]) -> None:
    console = Console(highlight=False)
    table = Table("against whoever sees", "noise multiplier", "", "epsilon", "exchange", "delta")
    for view in both:
        table.add_row(
            view.sees,
            f"{view.noise_multiplier:.4g}",
            f"epsilon_{view.adversary}",
            f"{view.epsilon:.4g}",
            "-" if view.epsilon_exchange is None else f"{view.epsilon_exchange:.4g}",
            f"{view.delta:g}",
        )
    console.print(table)
    for view in both:
        console.print(f"epsilon_{view.adversary} {view.epsilon:.4g}: {escape(view.meaning)}")
        if view.meaning_exchange is not None:
            console.print(f"  exchange {view.epsilon_exchange:.4g}: {escape(view.meaning_exchange)}")
    console.print(f"noise multiplier {facts['noise_multiplier']:.6g}; accountant: {facts['accountant']}")
    console.print(f"adjacency: {escape(facts['adjacency'])}; exchange: one of them for another")
    for note in notes:
        console.print(f"[yellow]note:[/] {escape(note)}")
