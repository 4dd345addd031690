"""Shows the answer of `hushfleet plan`, as text and as JSON values."""

from __future__ import annotations

import math
from dataclasses import asdict

from rich.markup import escape
from rich.table import Table

from hushfleet.aggregator.config.sections import EvaluationSection
from hushfleet.aggregator.planning.advice import Advice, Question
from hushfleet.aggregator.planning.evaluation_error import EvaluationError
from hushfleet.aggregator.planning.gain_errors import Answer, gain_errors
from hushfleet.aggregator.planning.year import Year
from hushfleet.aggregator.report.console import Console
from hushfleet.aggregator.report.readable import format_seconds, percent, size
from hushfleet.plain_json import to_json
from hushfleet.privacy.protection import protection
from hushfleet.secure.committee import corrupt_devices
from hushfleet.simulator.studies.plan.needs import BoardCosts, Needs
from hushfleet.wire.format.question import QuestionSpec

_STYLES: dict[Answer, str] = {"yes": "bold green", "no": "bold red", "perhaps": "bold yellow"}


def to_plain(advice: Advice, needed: Needs, boards: list[BoardCosts], year: Year | None) -> dict[str, object]:
    return {
        "question": asdict(advice.question),
        "answer": advice.answer,
        "signal": advice.estimate.signal,
        "measured_on": advice.table.measured_on,
        "way": advice.way,
        "in_words": advice.in_words,
        "accuracy": asdict(advice.estimate.accuracies) | {"gain": advice.estimate.accuracies.gain},
        "intervals": {head: interval._asdict() for head, interval in advice.intervals._asdict().items()},
        "near": advice.estimate.near,
        "outside": (*advice.table.notes, *advice.estimate.outside),
        "sizes": [{"devices": each.question.devices} | _row(each) for each in advice.sizes],
        "epsilons": [{"epsilon": each.question.epsilon} | _row(each) for each in advice.epsilons],
        "needs": asdict(needed),
        "boards": [asdict(each) for each in boards],
        "year": None if year is None else to_json(asdict(year) | {"ends_after_s": year.ends_after_s}),
    }


def _row(advice: Advice) -> dict[str, object]:
    return {"gain": advice.estimate.accuracies.gain, **advice.intervals.own._asdict(), "answer": advice.answer}


def show(console: Console, advice: Advice, needed: Needs, boards: list[BoardCosts], year: Year | None) -> None:
    """Prints the answer as text."""
    asked, found = advice.question, advice.estimate.accuracies
    console.print(f"[{_STYLES[advice.answer]}]{escape(advice.in_words)}[/].\n", soft_wrap=True)
    on = " and ".join(advice.estimate.data) or advice.table.measured_on
    accuracy = Table(f"accuracy on {escape(on)}", title_justify="left")
    for heading in ("alone", "taking part", "difference", "on yours"):
        accuracy.add_column(heading, justify="right")
    for test, alone, shared, interval in (
        ("own labels, with the board's own head", found.alone, found.chosen, advice.intervals.own),
        ("all labels alike, with the shared head", found.alone_common, found.shared, advice.intervals.common),
    ):
        accuracy.add_row(test, percent(alone), percent(shared), f"{100 * (shared - alone):+.1f} points", str(interval))
    console.print(accuracy)
    takes = Table(show_header=False)
    rows = _turning(advice) | _told(asked, needed) | _promise(asked, needed) | _costs(needed) | _boards(needed, boards)
    for name, text in rows.items():
        takes.add_row(name, escape(text))
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
    for each in advice.table.notes:
        console.print(f"[yellow]note:[/] {escape(each)}", soft_wrap=True)
    for each in advice.estimate.outside:
        console.print(f"[yellow]note:[/] outside of what was measured: {escape(each)}", soft_wrap=True)


def _measured(advice: Advice) -> str:
    """Returns the source of the figures, and how sure they are."""
    table, errors = advice.table, gain_errors()
    held, gains = errors.held(advice.way)
    source = (
        f"Measured on {table.measured_on}, with {table.least_seeds} seeds"
        if table.measured_on
        else f"Interpolated between: {'; '.join(advice.estimate.near)} ({table.made_by}, {table.date})"
    )
    return f"{source}. Such intervals held for {held} of {gains} gains ({errors.made_by})."


def _turning(advice: Advice) -> dict[str, str]:
    """Returns the answers for other fleets."""
    asked = advice.question
    return {
        f"devices at epsilon {asked.epsilon:g}": advice.sizes_in_words,
        f"epsilon with {asked.devices:,} devices": advice.epsilons_in_words,
    }


def _promise(asked: Question, needed: Needs) -> dict[str, str]:
    honest = asked.devices - corrupt_devices(asked.devices, honest_fraction=asked.honest_fraction)
    return {
        "given away": f"epsilon_server {asked.epsilon:g} at delta {asked.delta:g}, for a whole device: "
        f"{protection(asked.epsilon)} ({needed.epsilon_exchange:.3g} for exchanging its data)",
        "trust": "local: nobody" if asked.local else f"secure-sum: {honest:,} of {asked.devices:,} devices are honest",
    }


def _told(asked: Question, needed: Needs) -> dict[str, str]:
    """Says how exactly boards would tell the gain themselves, by the settings of `[evaluation]` that are usual."""
    usual = EvaluationSection()
    multiplier = needed.noise_multiplier / math.sqrt(usual.share * needed.rounds)
    question = QuestionSpec("evaluation", 1, multiplier, held_out=usual.held_out, most_gain=usual.most_gain)
    split = 1 if asked.local else asked.honest_devices
    found = EvaluationError(question, asked.devices, asked.images, split, asked.devices, usual.share)
    return {"measured by boards": found.in_words}


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
        f"work on {each.board}": f"by its profile {format_seconds(each.features_s + needed.rounds * each.round_s)} and "
        f"{each.features_wh + needed.rounds * each.round_wh:.2g} Wh in all: features "
        f"{format_seconds(each.features_s)}, a round {format_seconds(each.round_s)} and {1000 * each.round_wh:.2g} mWh"
        for each in boards
    }
