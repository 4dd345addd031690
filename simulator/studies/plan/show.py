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
from hushfleet.simulator.studies.templates import filled
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
        "public": None if advice.table.public is None else advice.table.public._asdict(),
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
    found = advice.estimate.accuracies
    console.print(f"[{_STYLES[advice.answer]}]{escape(advice.in_words)}[/].\n", soft_wrap=True)
    on = " and ".join(advice.estimate.data) or advice.table.measured_on
    accuracy = Table(f"accuracy on {escape(on)}", title_justify="left")
    for heading in ("alone", "taking part", "difference", "on yours"):
        accuracy.add_column(heading, justify="right")
    for test, alone, shared, interval in (
        ("own labels, with the board's personalized head", found.alone, found.chosen, advice.intervals.own),
        ("all labels alike, with the shared head", found.alone_common, found.shared, advice.intervals.common),
    ):
        accuracy.add_row(test, percent(alone), percent(shared), f"{100 * (shared - alone):+.1f} points", str(interval))
    console.print(accuracy)
    if advice.table.public is not None:
        console.print(advice.table.public.in_words, soft_wrap=True)
    takes = Table(show_header=False)
    for name, text in rows(advice, needed, boards).items():
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


def rows(advice: Advice, needed: Needs, boards: list[BoardCosts]) -> dict[str, str]:
    """Returns what taking part needs and gives away, in words by name, from `rows.txt.j2`."""
    asked = advice.question
    text = filled(
        __name__,
        "rows.txt.j2",
        {"size": size, "seconds": format_seconds},
        advice=advice,
        asked=asked,
        needed=needed,
        boards=boards,
        evaluation=_evaluation(asked, needed).in_words,
        protection=protection(asked.epsilon),
        honest=asked.devices - corrupt_devices(asked.devices, honest_fraction=asked.honest_fraction),
    )
    return dict(line.split(": ", 1) for line in text.splitlines())


def _evaluation(asked: Question, needed: Needs) -> EvaluationError:
    """Returns how exactly boards would tell the gain themselves, by the settings of `[evaluation]` that are usual."""
    usual = EvaluationSection()
    multiplier = needed.noise_multiplier / math.sqrt(usual.share * needed.rounds)
    question = QuestionSpec("evaluation", 1, multiplier, held_out=usual.held_out, most_gain=usual.most_gain)
    split = 1 if asked.local else asked.honest_devices
    return EvaluationError(question, asked.devices, asked.images, split, asked.devices, usual.share)
