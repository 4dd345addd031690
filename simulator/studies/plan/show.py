"""Shows the answer of `hushfleet plan`, as text and as JSON values."""

from __future__ import annotations

from dataclasses import asdict

from rich.markup import escape
from rich.table import Table

from hushfleet.aggregator.observe.console import Console
from hushfleet.aggregator.planning.advice import BETWEEN_DATA, Advice, Answer, Question
from hushfleet.aggregator.planning.year import Year
from hushfleet.aggregator.results.report.readable import percent, size
from hushfleet.plain_json import to_json
from hushfleet.privacy.protection import protection
from hushfleet.secure.committee import corrupt_devices
from hushfleet.simulator.studies.plan.needs import BoardCosts, Needs
from hushfleet.simulator.units import format_seconds

_STYLES: dict[Answer, str] = {"yes": "bold green", "no": "bold red", "perhaps": "bold yellow"}


def to_plain(advice: Advice, needed: Needs, boards: list[BoardCosts], year: Year | None) -> dict[str, object]:
    return {
        "question": asdict(advice.question),
        "answer": advice.answer,
        "signal": advice.estimate.signal,
        "measured_on": advice.table.measured_on,
        "in_words": advice.in_words,
        "accuracy": asdict(advice.estimate.accuracies) | {"gain": advice.estimate.accuracies.gain},
        "near": advice.estimate.near,
        "outside": advice.estimate.outside,
        "least_devices": advice.least_devices(),
        "least_epsilon": advice.least_epsilon(),
        "needs": asdict(needed),
        "boards": [asdict(each) for each in boards],
        "year": None if year is None else to_json(asdict(year) | {"ends_after_s": year.ends_after_s}),
    }


def show(console: Console, advice: Advice, needed: Needs, boards: list[BoardCosts], year: Year | None) -> None:
    """Prints the answer as text."""
    asked, found = advice.question, advice.estimate.accuracies
    console.print(f"[{_STYLES[advice.answer]}]{escape(advice.in_words)}[/].\n", soft_wrap=True)
    accuracy = Table("accuracy, about", title_justify="left")
    for heading in ("alone", "taking part", "difference"):
        accuracy.add_column(heading, justify="right")
    for test, alone, shared in (
        ("own labels, with the board's own head", found.alone, found.chosen),
        ("all labels alike, with the shared head", found.alone_common, found.shared),
    ):
        accuracy.add_row(test, percent(alone), percent(shared), f"{100 * (shared - alone):+.1f} points")
    console.print(accuracy)
    takes = Table(show_header=False)
    for name, text in (_turning(advice) | _promise(asked, needed) | _costs(needed) | _boards(needed, boards)).items():
        takes.add_row(name, text)
    console.print(takes)
    if year is not None:
        years = Table(show_header=False, title="the same task in each period", title_justify="left")
        for name, text in year.rows().items():
            years.add_row(name, text)
        console.print(years)
    console.print(
        f"{escape(_measured(advice))} How long a round lasts is up to the slowest board: hushfleet forecast.",
        soft_wrap=True,
    )
    for each in advice.estimate.outside:
        console.print(f"[yellow]note:[/] outside of what was measured: {escape(each)}", soft_wrap=True)


def _measured(advice: Advice) -> str:
    """Returns the source of the figures, and how sure they are."""
    table, spread = advice.table, f"+-{100 * advice.estimate.accuracies.spread:.1f} points"
    if table.measured_on:
        return f"Measured on {table.measured_on}: over {table.least_seeds} seeds the gain varies by {spread}."
    return (
        f"Interpolated between: {'; '.join(advice.estimate.near)}. Over {table.least_seeds} seeds or more the gain "
        f"varies by {spread}, and from one data set to another by some {100 * BETWEEN_DATA:.0f}. Measured by "
        f"{table.made_by} on {table.date}."
    )


def _turning(advice: Advice) -> dict[str, str]:
    """Returns the fleets for which the answer would differ."""
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
    honest = asked.devices - corrupt_devices(asked.devices, honest_fraction=asked.honest_fraction)
    return {
        "given away": f"epsilon_server {asked.epsilon:g} at delta {asked.delta:g}, for a whole device: "
        f"{protection(asked.epsilon)} ({needed.epsilon_exchange:.3g} for exchanging its data)",
        "trust": "local: nobody" if asked.local else f"secure-sum: {honest:,} of {asked.devices:,} devices are honest",
    }


def _costs(needed: Needs) -> dict[str, str]:
    masked = f", {needed.bits} bits each; a committee of {needed.members}" if needed.bits else ""
    of = "" if needed.directions is None else f", of {needed.directions} directions"
    return {
        "rounds, clip norm": f"{needed.rounds}, {needed.clip_norm:g}",
        "noise multiplier": f"{needed.noise_multiplier:.3g} of the sum; a device adds "
        f"{needed.share_std:.3g} clip norms",
        "values in an update": f"{needed.values:,}{of}{masked}",
        "a device sends": f"{size(needed.up + needed.answer)} a round, {size(needed.total_up)} in all",
        "and receives": f"{size(needed.down)} a round, {size(needed.total_down)} in all",
    }


def _boards(needed: Needs, boards: list[BoardCosts]) -> dict[str, str]:
    return {
        f"work on {each.board}": f"{format_seconds(each.features_s + needed.rounds * each.round_s)} and "
        f"{each.features_wh + needed.rounds * each.round_wh:.2g} Wh in all: features "
        f"{format_seconds(each.features_s)}, a round {format_seconds(each.round_s)} and {1000 * each.round_wh:.2g} mWh"
        for each in boards
    }
