"""`hushfleet plan`: will it pay to take part, before a board is flashed."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hushfleet.aggregator.planning.advice import Advice, Answer, Question
from hushfleet.aggregator.planning.gain_table import gain_table
from hushfleet.errors import BadInput, PrivacyError
from hushfleet.firmware_profiles import load_board
from hushfleet.simulator.studies.plan.needs import BoardTimes, Needs, needs
from hushfleet.simulator.studies.plan.task_file import task_text
from hushfleet.simulator.units import shown_bytes, shown_time

HELP = """Will it pay? What a board would gain by taking part, what it would give away, and what it takes.

For method `hush`: a small shared head on fixed features, secure sums, a whole device protected. The answer comes from
a table of simulated fleets (`benchmarks/private_gain.py`); the stand-ins for your images are Fashion-MNIST, letters
(more classes) and digits (`--features filters`), so try with a few of your own images before you rely on it.

Examples:

`hushfleet plan --devices 60 --images 40 --classes 10 --epsilon 4`

`hushfleet plan --devices 200 --images 20 --classes 4 --epsilon 2 --alpha 0.5` where each board sees classes of its own

`hushfleet plan --devices 60 --images 40 --classes 4 --epsilon 4 --boards raspberry-pi-zero-2-w --out task.toml`

What helps, most of all: more devices. Then a larger epsilon; images hardly matter to what is shared, but the more a
board has of them, the less it needs the others. Where the answer is no, images stay where they are, and each board
trains alone.
"""
_STYLES: dict[Answer, str] = {"yes": "bold green", "no": "bold red", "too close to call": "bold yellow"}


def register(app: typer.Typer) -> None:
    """Adds the command `plan`."""

    @app.command("plan", help=HELP)
    def plan(
        devices: Annotated[int, typer.Option(min=2, max=100_000, help="In a round.")],
        images: Annotated[int, typer.Option(min=1, help="Training images a device, on average.")],
        classes: Annotated[int, typer.Option(min=2, max=1000, help="Of images.")],
        epsilon: Annotated[float, typer.Option(help="Against the server, for a whole device and all rounds.")],
        delta: Annotated[float, typer.Option(help="Probability with which the promise may fail.")] = 1e-5,
        features: Annotated[str, typer.Option(help="scattering, filters (tiny images) or a file.onnx.")] = "scattering",
        boards: Annotated[str, typer.Option(metavar="A,B,...", help="Whose time is shown; see `hushfleet boards`.")] = "raspberry-pi-zero-2-w,raspberry-pi-5-8gb",
        honest_fraction: Annotated[float, typer.Option(min=0.01, max=1, help="Of the devices, at least; the others may work with the server.")] = 0.9,
        alpha: Annotated[float | None, typer.Option(min=0.01, help="How unlike the devices' labels are (Dirichlet), 0.5: very. Default: alike.")] = None,
        local: Annotated[bool, typer.Option("--local", help="Nobody is trusted: each device adds all of the noise.")] = False,
        out: Annotated[Path | None, typer.Option(metavar="TASK.toml", help="Also write a task file.")] = None,
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON for other programs.")] = False,
    ) -> None:  # fmt: skip
        asked = Question(
            devices=devices, images=images, classes=classes, epsilon=epsilon, delta=delta, features=features,
            honest_fraction=honest_fraction, alpha=alpha, local=local,
        )  # fmt: skip
        profiles = [load_board(name.strip()) for name in boards.split(",") if name.strip()]
        try:
            advice, needed = Advice.on(asked), needs(asked)
        except PrivacyError as error:
            raise BadInput(str(error)) from error
        times = [BoardTimes.of(board, asked, needed) for board in profiles]
        if as_json:
            print(json.dumps(to_plain(advice, needed, times), indent=2))
        else:
            show(Console(highlight=False), advice, needed, times)
        if out is not None:
            try:
                with out.open("x", encoding="utf-8") as file:
                    file.write(task_text(asked, needed))
            except OSError as error:
                raise BadInput(f"--out {out}: it cannot be written: {error.strerror}") from error
            if not as_json:
                Console(highlight=False).print(f"task    {escape(str(out))}: fill in class_names, then run it")


def to_plain(advice: Advice, needed: Needs, times: list[BoardTimes]) -> dict[str, object]:
    return {
        "question": asdict(advice.question),
        "answer": advice.answer,
        "in_words": advice.in_words,
        "accuracy": asdict(advice.estimate.accuracies) | {"gain": advice.estimate.accuracies.gain},
        "near": advice.estimate.near,
        "outside": advice.estimate.outside,
        "least_devices": advice.least_devices(),
        "least_epsilon": advice.least_epsilon(),
        "needs": asdict(needed),
        "boards": [asdict(each) for each in times],
    }


def show(console: Console, advice: Advice, needed: Needs, times: list[BoardTimes]) -> None:
    """For people."""
    asked, found = advice.question, advice.estimate.accuracies
    console.print(f"[{_STYLES[advice.answer]}]{escape(advice.in_words)}[/].\n", soft_wrap=True)
    accuracy = Table("accuracy, about", title_justify="left")
    for heading in ("alone", "taking part", "difference"):
        accuracy.add_column(heading, justify="right")
    for test, alone, shared in (
        ("own labels, with the head that a board chooses", found.alone, found.chosen),
        ("all labels alike, with the shared head", found.alone_common, found.shared),
    ):
        accuracy.add_row(test, _percent(alone), _percent(shared), f"{100 * (shared - alone):+.1f} points")
    console.print(accuracy)
    takes = Table(show_header=False)
    for name, text in (_turning(advice) | _promise(asked, needed) | _costs(needed) | _times(needed, times)).items():
        takes.add_row(name, text)
    console.print(takes)
    table = gain_table()
    console.print(
        f"Interpolated between: {'; '.join(advice.estimate.near)}. Over {table.least_seeds} seeds or more the gain varies by "
        f"+-{100 * found.spread:.1f} points. Measured by {table.made_by} on {table.date}. How long a round lasts is up "
        "to the slowest board: hushfleet forecast.",
        soft_wrap=True,
    )
    for each in advice.estimate.outside:
        console.print(f"[yellow]note:[/] outside of what was measured: {escape(each)}", soft_wrap=True)


def _turning(advice: Advice) -> dict[str, str]:
    """Where the answer would be another."""
    asked, least, smallest = advice.question, advice.least_devices(), advice.least_epsilon()
    return {
        f"pays at epsilon {asked.epsilon:g}": (
            "with no fleet up to 100,000 devices" if least is None else f"from {least:,} devices on"
        ),
        f"pays with {asked.devices:,} devices": (
            "at no epsilon up to 32" if smallest is None else f"from epsilon {smallest:.2g} on"
        ),
    }


def _promise(asked: Question, needed: Needs) -> dict[str, str]:
    honest = math.ceil(asked.honest_fraction * asked.devices)
    return {
        "given away": f"epsilon_server {asked.epsilon:g} at delta {asked.delta:g}, for a whole device "
        f"({needed.epsilon_exchange:.3g} for exchanging its data)",
        "trust": "local: nobody" if asked.local else f"secure-sum: {honest:,} of {asked.devices:,} devices are honest",
    }


def _costs(needed: Needs) -> dict[str, str]:
    masked = f", {needed.bits} bits each; a committee of {needed.members}" if needed.bits else ""
    return {
        "rounds, clip norm": f"{needed.rounds}, {needed.clip_norm:g}",
        "noise multiplier": f"{needed.noise_multiplier:.3g} of the sum; a device adds {needed.share_std:.3g} clip norms",
        "values in an update": f"{needed.values:,}{masked}",
        "a device sends": f"{shown_bytes(needed.up + needed.answer)} a round, {shown_bytes(needed.total_up)} in all",
        "and receives": f"{shown_bytes(needed.down)} a round, {shown_bytes(needed.total_down)} in all",
    }


def _times(needed: Needs, times: list[BoardTimes]) -> dict[str, str]:
    return {
        f"work on {each.board}": f"{shown_time(each.features_s + needed.rounds * each.round_s)} in all: features "
        f"{shown_time(each.features_s)}, a round {shown_time(each.round_s)}"
        for each in times
    }


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
