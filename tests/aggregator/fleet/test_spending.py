"""What boards have spent, as a report, `fleet status` and the page say it: by real rounds of real boards."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from hushfleet.aggregator.commands.field_results import write_results
from hushfleet.aggregator.config.question import noise_by_round
from hushfleet.aggregator.config.task import load_task
from hushfleet.aggregator.fleet import descriptions
from hushfleet.aggregator.fleet.tasks.spending import Spending
from hushfleet.aggregator.fleet.tasks.task_check import first_charge
from hushfleet.aggregator.fleet.view import FleetView, RunView
from hushfleet.aggregator.fleet.watching import columns
from hushfleet.aggregator.fleet.watching.columns import Circumstances, with_problems
from hushfleet.aggregator.report.readable import format_lifetime, number
from hushfleet.aggregator.results.result import Result
from hushfleet.aggregator.results.server_sees import SumFacts
from hushfleet.aggregator.rounds.charge_book import ChargeBook
from hushfleet.aggregator.storage.board import Board
from hushfleet.aggregator.storage.register import DeviceRegister
from hushfleet.privacy.accountant import Adjacency, Step, epsilon
from hushfleet.privacy.ledger import epsilon_server_of
from hushfleet.privacy.mechanism import GaussianMechanism
from hushfleet.schema import pack
from hushfleet.simulator.world.hub import LocalHub
from support.whole import Whole, prepared_digits

DELTA = 1e-5
EVALUATED = ("evaluation.every=3", "evaluation.share=0.1")
LIMITS = {"epsilon_server": 8.0, "delta": DELTA}


def spent_in(rounds: int, adjacency: Adjacency = "add-or-remove") -> float:
    """The epsilon of rounds with the multiplier of `prepared_digits`."""
    return epsilon([Step(2.0, 1.0, rounds)], delta=DELTA, adjacency=adjacency)


@pytest.fixture
def whole(tmp_path: Path) -> Iterator[Whole]:
    bench = Whole(tmp_path, LocalHub().link)
    yield bench
    bench.close()


@pytest.fixture
def register(tmp_path: Path) -> Iterator[DeviceRegister]:
    """The register of the fleet, which outlives its runs."""
    with DeviceRegister(tmp_path / "fleet", durable=False) as register:
        yield register


def begin(whole: Whole, register: DeviceRegister, run_id: str) -> None:
    whole.begin(prepared_digits(run_id))
    whole.coordinator.rounds.charges = ChargeBook(register, whole.coordinator.engine)


def test_a_report_says_what_boards_have_spent_in_all(
    whole: Whole, register: DeviceRegister, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two tasks of three rounds: a report of 0.3.0 had the second one's epsilon alone."""
    begin(whole, register, "first")
    boards = [whole.board(name) for name in ("board-1", "board-2")]
    assert whole.drive(lambda: whole.coordinator.engine.finished)
    whole.end()
    begin(whole, register, "second")
    assert whole.drive(lambda: whole.coordinator.engine.finished)
    engine, lifetimes = whole.coordinator.engine, Spending(LIMITS).lifetimes(register)
    sums = SumFacts("aggregator")
    write_results(
        engine.store, prepared_digits("second"), Console(width=400), sums=sums, federation="plants", lifetimes=lifetimes
    )
    result = Result.load(engine.store.folder / "result.json")
    for row, board in zip(result.privacy, boards, strict=True):
        own = board.store.ledger.epsilon_server(delta=DELTA)
        assert row.epsilon_server == pytest.approx(spent_in(3)), "what stood there alone"
        assert row.lifetime is not None
        assert row.lifetime.epsilon_server == pytest.approx(own) == pytest.approx(spent_in(6))
        assert row.exchange_server == pytest.approx(spent_in(3, "replace-one"))
        assert row.lifetime.exchange_server == pytest.approx(spent_in(6, "replace-one"))
        assert row.lifetime.exchange_server > 2 * own
        assert row.lifetime.delta == DELTA
    said = format_lifetime(lifetimes["board-1"])
    assert said.startswith(
        f"epsilon_server {number(spent_in(6))} (replace-one {number(spent_in(6, 'replace-one'))}) over all"
    )
    page, terminal = (engine.store.folder / "report.html").read_text(), capsys.readouterr().out
    status = descriptions.run_privacy(RunView("t", "m", "device", 3, 3, epsilon=spent_in(3)), lifetimes["board-1"])
    for text in (page, terminal, status):
        assert said in text
        assert 0 <= text.index(said) < text.rindex(number(spent_in(3))), "lifetime first"


def test_without_a_fleet_the_report_says_where_the_whole_number_is(whole: Whole) -> None:
    whole.begin(prepared_digits("alone"))
    for name in ("board-1", "board-2"):
        whole.board(name)
    assert whole.drive(lambda: whole.coordinator.engine.finished)
    engine = whole.coordinator.engine
    write_results(
        engine.store,
        prepared_digits("alone"),
        Console(quiet=True),
        sums=SumFacts("aggregator"),
        federation="plants",
        pays=lambda newest: f"It pays <b>, after {newest}",
    )
    assert Result.load(engine.store.folder / "result.json").pay == "It pays <b>, after None"
    assert "It pays &lt;b&gt;, after None." in (engine.store.folder / "report.html").read_text()
    assert [row.lifetime for row in Result.load(engine.store.folder / "result.json").privacy] == [None, None]
    assert "in other tasks is not known to this aggregator" in (engine.store.folder / "report.html").read_text()


def test_a_board_that_declined_is_not_charged_while_the_round_is_open(whole: Whole, register: DeviceRegister) -> None:
    limit = spent_in(2) + 0.1
    begin(whole, register, "open")
    poor, silent = whole.board("board-1", epsilon_server=limit), whole.board("board-2")
    engine = whole.coordinator.engine
    assert whole.drive(lambda: engine.closed_rounds == 2 and engine.plan is not None)
    whole.boards.remove(silent)  # it is there, and says nothing: the round stays open
    assert whole.drive(lambda: bool(engine.store.declines(3)))
    assert engine.plan is not None
    as_it_was = spent_in(3)  # what was noted before the board was told that it may train
    assert as_it_was > limit
    found = Spending(LIMITS | {"epsilon_server": limit}).update(register)
    assert (
        found["board-1"] == pytest.approx(spent_in(2)) == pytest.approx(poor.store.ledger.epsilon_server(delta=DELTA))
    )
    assert found["board-2"] == pytest.approx(as_it_was), "it may be training"
    view = Board("board-2", spent=found["board-2"], limit=limit, undecided=True)
    assert columns.spent(view) == f"up to {number(as_it_was)} of {number(limit)}"
    silent.store.close()


def test_a_number_above_the_cards_limit_is_explained(whole: Whole, register: DeviceRegister) -> None:
    card = spent_in(1) + 0.1
    begin(whole, register, "raised")
    for name in ("board-1", "board-2"):
        whole.board(name, epsilon_server=1000.0)  # its owner's word, after the card was written
    assert whole.drive(lambda: whole.coordinator.engine.finished)
    spent = Spending(LIMITS | {"epsilon_server": card}).update(register)["board-1"]
    view = with_problems(Board("board-1", spent=spent, limit=card), Circumstances(0.0, 3, True))
    assert columns.spent(view) == f"{number(spent)}, above its card's {number(card)}"
    (problem,) = view.problems
    assert problem.what == f"has spent epsilon_server {number(spent)}, above the limit of {number(card)} on its card"
    assert "Its owner has raised limits.epsilon_server" in problem.advice


def test_a_period_is_told_beside_all_that_was_spent(register: DeviceRegister) -> None:
    charge, day = pack(GaussianMechanism(2.0).charge()), 86400
    register.note_charges("t", 1, {"board-1": charge}, certain=False)
    began = register.first_charged_at("board-1")
    register.note_charges("t", 1, {"board-1": charge}, certain=True)
    assert register.first_charged_at("board-1") == began, "noted once"
    limits = {"epsilon_server": 2.0, "per": "90d", "epsilon_lifetime": 4.0, "delta": DELTA}
    soon = Spending(limits, clock=lambda: float(began))
    soon.update(register)
    now = soon.most("t", register)
    assert now is not None
    later = Spending(limits, clock=lambda: began + 90.0 * day)
    later.update(register)
    then = later.most("t", register)
    assert then is not None
    assert now[1].period.startswith(f"{spent_in(1):.3g} of 2 in these 90 days, which end in ")
    assert then[1].period.startswith("0 of 2 in these 90 days, which end in ")
    assert (now[1].rounds, then[1].rounds) == (0, 1), "the lifetime limit has room for two rounds more"
    said = descriptions.privacy_left(FleetView("f", 0.0, privacy_left=now[1]))
    assert said.startswith(
        f"board-1, which has spent most, stands at {number(spent_in(1))} of the 4 that its card allows"
    )
    assert f"in all since {time.strftime('%B %Y', time.localtime(began))}, and at {now[1].period} (epsilon; " in said
    assert f"; {now[1].period}, as the aggregator counts" in format_lifetime(now[0])


def test_a_period_that_ends_today_is_told_by_whoever_has_watched_it(register: DeviceRegister) -> None:
    """The page stays open over the end of a period of an hour; nothing is charged meanwhile."""
    register.note_charges("t", 1, {"board-1": pack(GaussianMechanism(2.0).charge())}, certain=True)
    began = float(register.first_charged_at("board-1"))
    moments = [began]
    limits = {"epsilon_server": 2.0, "per": "1h", "epsilon_lifetime": 4.0, "delta": DELTA}
    watching = Spending(limits, clock=lambda: moments[-1])
    said = []
    for moment in (began, began + 3600):
        moments.append(moment)
        watching.update(register)
        found = watching.most("t", register)
        assert found is not None
        said.append((found[1].period.partition(" in ")[0], found[1].rounds))
    assert said == [(f"{spent_in(1):.3g} of 2", 0), ("0 of 2", 1)]


def test_how_many_rounds_are_left_is_counted_by_what_each_costs(register: DeviceRegister) -> None:
    """W3: "enough for 5 more rounds of this task, which has 7 to come" was told of a task that fits exactly."""
    task = load_task(Path(__file__).parents[3] / "tasks" / "digits-hush.toml", ("round.rounds=6", *EVALUATED))
    noise = noise_by_round(task)
    assert [round(each, 3) == 1.0 for each in noise] == [True, True, True, False, True, True, True, False]
    train = first_charge(task)
    costs = [replace(train, noise_multiplier=train.noise_multiplier * each) for each in noise]
    limit = epsilon_server_of(costs, delta=DELTA)
    register.note_charges("t", 1, {"board-1": pack(train)}, certain=True)
    for allowed, counted in ((limit + 1e-6, 7), (limit - 1e-3, 6)):
        spending = Spending({"epsilon_server": allowed, "delta": DELTA})
        spending.update(register)
        found = spending.most("t", register, following=tuple(noise[1:]))
        assert found is not None
        assert found[1].rounds == counted
        run = RunView("t", "m", "device", rounds=8, rounds_closed=1)
        said = descriptions.privacy_left(FleetView("f", 0.0, privacy_left=found[1], run=run))
        assert ("the rest is enough for all 7 rounds that this task has to come" in said) == (counted == 7)
        assert ("enough for 6 more rounds of this task, which has 7 to come" in said) == (counted == 6)


def test_a_period_of_an_hour_has_words(register: DeviceRegister) -> None:
    register.note_charges("t", 1, {"board-1": pack(GaussianMechanism(2.0).charge())}, certain=True)
    limits = {"epsilon_server": 2.0, "per": "1h", "epsilon_lifetime": 4.0, "delta": DELTA}
    spending = Spending(limits)
    spending.update(register)
    found = spending.most("t", register)
    assert found is not None
    assert " of 2 in this hour, which ends in " in found[1].period


def test_windows_have_a_number_of_their_own(register: DeviceRegister) -> None:
    charge = pack(GaussianMechanism(2.0).charge())
    for task in ("windows-1", "all-1"):
        for round in (1, 2):
            register.note_charges(task, round, {"board-1": charge}, certain=True)
    now = register.first_charged_at("board-1")
    later = Spending(LIMITS, clock=lambda: now + 31.0 * 86400)
    for spending, rounds in ((Spending(LIMITS, clock=lambda: float(now)), 4), (later, 2)):
        lifetime = spending.lifetimes(register, "windows-1", window_s=30 * 86400)["board-1"]
        alone = f"whoever appears in the samples of the present window of 30 days alone: {spent_in(rounds):.3g}"
        assert format_lifetime(lifetime).endswith(f"; {alone}, as the aggregator counts")
        assert lifetime.epsilon_server == pytest.approx(spent_in(4)), "whoever appears in all"
    assert later.lifetimes(register)["board-1"].window == ""
