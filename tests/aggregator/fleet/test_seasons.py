"""`[season]`: the fleet service starts each season's task by itself, on time, once, and from files alone."""

from __future__ import annotations

import logging
import shutil
import tomllib
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch
from zoneinfo import ZoneInfo

import numpy as np
import pytest
import safetensors.numpy
from typer.testing import CliRunner

from hushfleet import atomic_file
from hushfleet.aggregator.commands.main import build_app
from hushfleet.aggregator.config.task import load_task, parse_task
from hushfleet.aggregator.fleet import descriptions
from hushfleet.aggregator.fleet.tasks.next_task import set_task
from hushfleet.aggregator.fleet.tasks.seasons import AGAIN_S, SeasonStarter, begin_season, season_view
from hushfleet.aggregator.fleet.tasks.task_check import season_note
from hushfleet.aggregator.fleet.trust.folder import FleetFolder
from hushfleet.aggregator.fleet.watching.round_numbers import change, show
from hushfleet.aggregator.fleet.watching.watch import FleetWatch
from hushfleet.aggregator.planning.season import SeasonCalendar
from hushfleet.aggregator.results.events import EventLog
from hushfleet.errors import BadInput
from hushfleet.privacy.budget import Budget
from hushfleet.privacy.charge import DEVICE_ADJACENCY, Charge
from hushfleet.privacy.ledger import epsilon_server_of
from hushfleet.schema import read_file
from support.desk import TASK, make_folder

DAY_S = 86400.0
ZONE = ZoneInfo("Europe/Berlin")
BEGAN = datetime(2027, 1, 1, 1, tzinfo=ZONE).timestamp()
SEASON = """
[season]
every = "90d"
epsilon = 2.0
lifetime = 5.0
[schedule]
timezone = "Europe/Berlin"
"""


def season_text(season: str = SEASON, **data: Any) -> str:
    names = "".join(f"{key} = {value}\n" for key, value in data.items())
    plain = TASK.replace("noise_multiplier = 1.0\n", "").replace("delta = 1e-3", "delta = 1e-5")
    return plain.replace('name = "digits"\n', f'name = "digits"\n{names}') + season


def begin(folder: FleetFolder, at: float = BEGAN, *, model: bool = True) -> None:
    """The aggregator has opened the first round of the present run, and closed it if it has a `model`."""
    log = EventLog(folder.run / "events.jsonl", clock=lambda: at)
    log.write("run", task=f"{folder.run.name}-1", method="m", unit="device", delta=1e-5, rounds=2, devices=2)
    log.write("round_open", round=1)
    log.write("round_close", round=1, participants=2)
    if model:
        place = folder.run / "aggregator"
        place.mkdir(parents=True)
        safetensors.numpy.save_file({"bias": np.zeros(1, np.float32)}, place / "global-1.safetensors")


@pytest.fixture
def folder(tmp_path: Path) -> FleetFolder:
    made = make_folder(tmp_path / "fleet", task=season_text())
    begin(made)
    return made


def day(number: float) -> float:
    return BEGAN + number * DAY_S


@pytest.mark.parametrize(
    ("looks", "runs"),
    [
        ([0, 30, 89.9], ["small"] * 3),
        ([90.1], ["small-2"]),
        ([90.1, 90.1, 120, 179], ["small-2"] * 4),
        ([90.1, 180.1, 270.1, 360.1, 450.1], ["small-2", "small-3", "small-4", "small-4", "small-4"]),
        ([130], ["small-2"]),  # late
        ([91, 80, 91], ["small-2"] * 3),  # a clock that is set back
        ([280, 90.5, 275], ["small-4"] * 3),  # off for half a year: the present season, once
        ([280, 380, 470, 580], ["small-4", "small-5", "small-6", "small-6"]),  # what was left out costs nothing
    ],
)
def test_each_season_begins_on_its_day_and_once(
    folder: FleetFolder, looks: list[float], runs: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    starter, named = SeasonStarter(folder), []
    for at in looks:
        starter._clock = lambda at=at: day(at)
        starter.act(None, at * DAY_S)  # type: ignore[arg-type]  # it publishes nothing
        if not folder.run.exists():
            begin(folder, day(at))
        named.append(folder.run.name)
    assert named == runs
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING], "nothing failed on the way"
    assert folder.run.name == "small" or read_file(folder.task)["season"]["first"] == BEGAN


def test_a_season_before_its_first_round_waits_for_ever(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "fleet", task=season_text())
    assert begin_season(folder, day(400)) == ""
    view = season_view(folder, day(400))
    assert "begins with its first round; the lifetime limit pays for 4 of them" in descriptions.season(
        view, now=day(400)
    )


def test_a_season_that_began_by_a_wrong_clock_is_told_with_the_way_back(folder: FleetFolder) -> None:
    assert begin_season(folder, day(400)) == "small-5"
    begin(folder, day(400))
    assert begin_season(folder, day(2)) == ""
    (problem,) = descriptions.season_problems(season_view(folder, day(2)))
    assert problem.urgent
    way_back = Path(problem.what.split()[-2])
    set_task(folder, way_back)
    assert not descriptions.season_problems(season_view(folder, day(2)))
    assert begin_season(folder, day(91)) == "small-2", "and the next season begins in its time"


def test_a_season_that_is_left_out_costs_nothing(folder: FleetFolder) -> None:
    calendar = SeasonCalendar(BEGAN, timedelta(days=90), "Europe/Berlin")
    for at, season in ((1, 5), (89, 5), (200, 6), (500, 9)):
        assert season_view(folder, day(at)).learns_until == calendar.begins(season)


def test_a_task_without_seasons_is_left_alone(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "fleet")
    begin(folder)
    assert begin_season(folder, day(400)) == ""
    assert season_view(folder, day(400)) is None
    folder.task.write_text("name = ")  # somebody writes it by hand
    assert season_view(folder, day(400)) is None


def test_an_unfinished_run_is_left_and_its_model_carried_on(folder: FleetFolder) -> None:
    assert begin_season(folder, day(91)) == "small-2"
    assert read_file(folder.task)["model"]["start"] == "runs/small"
    assert (folder.path / "runs/small/task.toml").exists(), "so that it can go on"
    begin(folder, day(91), model=False)  # no round of the second season is closed
    assert begin_season(folder, day(181)) == "small-3"
    assert read_file(folder.task)["model"]["start"] == "runs/small"
    assert load_task(folder.task).season.number == 3


def test_a_season_waits_for_an_open_round_for_a_day_at_most(folder: FleetFolder) -> None:
    EventLog(folder.run / "events.jsonl").write("round_open", round=2)
    assert begin_season(folder, day(90.5)) == ""
    assert begin_season(folder, day(91.1)) == "small-2"


def test_a_season_begins_when_the_open_round_has_closed(folder: FleetFolder) -> None:
    log = EventLog(folder.run / "events.jsonl")
    log.write("round_open", round=2)
    assert begin_season(folder, day(90.5)) == ""
    log.write("round_close", round=2, participants=2)
    assert begin_season(folder, day(90.6)) == "small-2"


def test_a_season_may_begin_with_a_new_model(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "fleet", task=season_text(SEASON.replace("lifetime", 'start = "anew"\nlifetime')))
    begin(folder)
    assert begin_season(folder, day(91)) == "small-2"
    assert "start" not in read_file(folder.task)["model"]


def test_killed_between_any_two_writes_it_begins_the_same_season(folder: FleetFolder, tmp_path: Path) -> None:
    whole, kept = tmp_path / "whole", atomic_file.write_whole
    shutil.copytree(folder.path, whole)
    begin_season(FleetFolder(whole), day(91))
    for survived in range(3):
        path = tmp_path / f"killed-{survived}"
        shutil.copytree(folder.path, path)
        writes = [0]

        def write(*args: Any, writes: list[int] = writes, survived: int = survived, **options: Any) -> None:
            if writes[0] == survived:
                raise KeyboardInterrupt
            writes[0] += 1
            kept(*args, **options)

        with patch.object(atomic_file, "write_whole", write):
            if survived < 2:
                with pytest.raises(KeyboardInterrupt):
                    begin_season(FleetFolder(path), day(91))
            else:
                begin_season(FleetFolder(path), day(91))
        begin_season(FleetFolder(path), day(92))
        for file in ("task.toml", "runs/small/task.toml"):
            assert (path / file).read_bytes() == (whole / file).read_bytes()


def test_a_season_that_was_left_for_another_task_goes_on(folder: FleetFolder, tmp_path: Path) -> None:
    begin_season(folder, day(91))
    begin(folder, day(91))
    changed = folder.task.read_text().replace("rounds = 2", "rounds = 2\ndeadline_s = 100.0")
    folder.task.write_text(changed)  # the operator changes the season
    first = folder.path / "runs/small/task.toml"
    assert set_task(folder, first)
    assert begin_season(folder, day(100)) == "small-2"
    assert folder.task.read_text() == changed
    assert read_file(folder.task)["season"]["number"] == 2


def test_numbers_of_boards_that_the_operator_set_hold_in_later_seasons(folder: FleetFolder) -> None:
    change(folder, ["round.min_devices=2"])
    begin_season(folder, day(91))
    assert folder.run.name == "small-2"
    assert "round.min_devices = 2 (from fleet set)" in show(folder)[0]


def test_an_obstacle_is_told_urgently_and_the_season_begins_when_it_is_gone(
    folder: FleetFolder, caplog: pytest.LogCaptureFixture
) -> None:
    text = folder.task.read_text()
    folder.task.write_text(text.replace("min_devices = 2", "min_devices = 3").replace("devices = 2", "devices = 3", 1))
    watch, starter = FleetWatch(folder), SeasonStarter(folder, clock=lambda: day(91))
    for at in (0.0, AGAIN_S + 1):
        starter.advance(None, at)  # type: ignore[arg-type]
    assert folder.run.name == "small"
    (said,) = [message for message in caplog.messages if "does not begin" in message]
    assert "a round of small-2 opens with 3 boards, and the fleet has 2" in said
    (problem,) = [each for each in watch.view(day(91)).problems if "does not begin" in each.what]
    assert problem.urgent
    assert "opens with 3 boards" in problem.what
    folder.task.write_text(text)
    assert not [each for each in watch.view(day(91)).problems if "does not begin" in each.what]
    for at, name in ((2 * AGAIN_S, "small"), (2 * AGAIN_S + 2, "small-2")):
        starter.advance(None, at)  # type: ignore[arg-type]
        assert folder.run.name == name
    watch.close()


def test_a_fleet_sleeps_when_the_next_season_would_exceed_the_lifetime(folder: FleetFolder) -> None:
    """Four seasons of epsilon 2 compose to 4.5: a sum of epsilons would allow two."""
    for number in (2, 3, 4):
        assert begin_season(folder, day(90 * number - 89)) == f"small-{number}"
        begin(folder, day(90 * number - 89))
    assert begin_season(folder, day(400)) == ""
    spec = load_task(folder.task).privacy_spec()

    def after(seasons: int) -> float:
        charge = Charge("device", DEVICE_ADJACENCY, "gaussian", spec.noise_multiplier, steps=2 * seasons)
        return epsilon_server_of([charge], delta=1e-5)

    assert after(1) == pytest.approx(2.0, rel=1e-3)
    assert after(4) <= 5.0 < after(5)
    watch = FleetWatch(folder)
    EventLog(folder.run / "events.jsonl").write("finished")
    told = {at: descriptions.sentences(watch.view(day(at)))["season"] for at in (300, 400)}
    assert told[300] == (
        "season 4 until 27 December 2027; learns until 27 December 2027; then each board goes on alone"
    )
    assert told[400].endswith("has learned until 27 December 2027; each board goes on alone")
    view = watch.view(day(400))
    assert descriptions.progress(view.run, view.season).endswith("boards predict with their personalized heads")
    watch.close()


def test_the_limit_of_the_cards_ends_the_seasons_as_well(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "fleet", task=season_text(SEASON.replace("lifetime = 5.0\n", "")))
    assert folder.config.device["limits"] == {
        "epsilon_server": 2.0, "delta": 1e-5, "per": "90d", "epsilon_lifetime": 8.0
    }  # fmt: skip
    begin(folder)
    view = season_view(folder, day(1))
    assert view.further is not None
    file = folder.path / "fleet.toml"
    file.write_text(file.read_text().replace("epsilon_lifetime = 8.0", "epsilon_lifetime = inf"))
    folder = FleetFolder(folder.path)
    assert season_view(folder, day(1)).further is None
    assert descriptions.season(season_view(folder, day(1)), now=day(1)).endswith("no limit over everything ends it")


@pytest.mark.parametrize(
    ("limits", "noted", "refused"),
    [
        ('epsilon_server = 2.0\nper = "90d"\nepsilon_lifetime = 5.0', False, False),
        ('epsilon_server = 3.0\nper = "90d"\nepsilon_lifetime = 8.0', False, False),
        ("epsilon_server = 8.0", True, False),
        ('epsilon_server = 2.0\nper = "180d"\nepsilon_lifetime = 5.0', True, False),
        ('epsilon_server = 2.0\nper = "90d"\nepsilon_lifetime = 4.0', True, False),
        ('epsilon_server = 1.9\nper = "90d"\nepsilon_lifetime = 5.0', True, True),
    ],
)
def test_limits_that_do_not_fit_are_told_with_the_line_to_write(
    tmp_path: Path, limits: str, noted: bool, refused: bool
) -> None:
    folder = make_folder(tmp_path / "fleet")
    file, following = folder.path / "fleet.toml", tmp_path / "next.toml"
    file.write_text(file.read_text().replace("epsilon_server = 8.0", limits))
    following.write_text(season_text().replace('"small"', '"next"'))
    outcome = CliRunner().invoke(build_app(), ["fleet", "task", str(folder.path), str(following)])
    note = season_note(load_task(following), FleetFolder(folder.path).config)
    assert (note is not None) is noted
    told = str(outcome.exception) if refused else outcome.output
    assert (outcome.exception is not None) is refused
    assert ("Write into fleet.toml" in told) is noted
    if noted:
        line = told[told.index("[device.limits] with ") + len("[device.limits] with ") :].splitlines()[0]
        budget = Budget.of(read_limits(line))
        assert (budget.in_period, budget.lifetime, budget.period_s) == (2.0, 5.0, 90 * DAY_S)


def read_limits(line: str) -> dict[str, Any]:
    return tomllib.loads(line.replace(", ", "\n"))


def test_new_classes_come_from_the_operators_file(tmp_path: Path) -> None:
    names, pictures = tmp_path / "classes.txt", '[data]\nname = "folder"\ninput_shape = [1, 8, 8]'
    names.write_text("fox\nhare\n")
    text = season_text(SEASON.replace("lifetime", 'classes = "classes.txt"\nlifetime'))
    text = text.replace('[data]\nname = "digits"', f'{pictures}\nclass_names = ["hare", "fox"]')
    folder = make_folder(tmp_path / "fleet", task=text)
    begin(folder)
    assert (folder.path / "classes.txt").read_text() == "fox\nhare\n", "it was copied with the task"
    (folder.path / "classes.txt").write_text("\ufefffox\n\nowl \nhare\nowl\n")
    assert begin_season(folder, day(91)) == "small-2"
    assert load_task(folder.task).class_names == ("hare", "fox", "owl")
    begin(folder, day(91))
    for wrong, said in (("fox\nowl\n", "lacks hare, which the fleet has learned"), (None, "cannot be read")):
        (folder.path / "classes.txt").unlink()
        if wrong is not None:
            (folder.path / "classes.txt").write_text(wrong)
        with pytest.raises(BadInput, match=said):
            begin_season(folder, day(181))
        assert said in season_view(folder, day(181)).obstacle


@pytest.mark.parametrize(
    ("season", "said"),
    [
        ({"every": "quarter"}, "season.every"),
        ({"every": "90d", "lifetime": 0}, "season.lifetime"),
        ({"every": "90d", "start": "first"}, "season.start"),
        ({"every": "90d", "number": 2}, "the fleet service writes both"),
        ({"every": "90d", "number": 2, "first": 1.0}, "must end in -2"),
        ({"every": "90d", "epsilon": 3.0}, r"season.epsilon = 3: \[privacy\] says already"),
        ({"every": "90d", "until": True}, "would end each season on that day"),
    ],
)
def test_seasons_that_contradict_the_task_are_refused(season: dict[str, Any], said: str) -> None:
    plain = tomllib.loads(TASK)
    if season.pop("until", False):
        plain["schedule"] = {"until": date(2027, 1, 1)}
    with pytest.raises(BadInput, match=said):
        parse_task({**plain, "season": season})


def test_the_epsilon_of_a_season_is_the_tasks() -> None:
    task = parse_task(tomllib.loads(season_text()))
    assert task.privacy.epsilon == 2.0
    assert parse_task(task.to_plain()) == task
    assert task.privacy_spec().noise_multiplier > 0
