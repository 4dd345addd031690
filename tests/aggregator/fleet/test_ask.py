"""`hushfleet fleet ask`: the task that asks, its cost and its error, and the fleet's task before and after."""

from __future__ import annotations

import contextlib
import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hushfleet.aggregator.config.sections import StatisticSection
from hushfleet.aggregator.config.task import load_task
from hushfleet.aggregator.fleet.tasks import ask as asking
from hushfleet.aggregator.fleet.trust.folder import FleetFolder
from hushfleet.aggregator.payloads.prepare import prepare
from hushfleet.aggregator.results.events import EventLog
from hushfleet.errors import BadInput
from hushfleet.simulator.engines.fast.engine import run_rounds
from hushfleet.simulator.engines.fast.workers import Workers
from hushfleet.simulator.results import assemble
from hushfleet.simulator.run_folder import begin
from hushfleet.toml_text import to_toml
from support.command import hushfleet
from support.desk import TASK, make_folder

SMALL = TASK.replace("\ndevices = 2", "\ndevices = 2\nlimit = 200")


fleet_ask = partial(hushfleet, "fleet", "ask")


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """While `ask` waits, its boards answer, as a simulation; gives the names of the tasks that were asked."""
    asked = []

    def wait(task: FleetFolder, *arguments: Any, **more: Any) -> Any:
        return real(task, *arguments, **{**more, "sleep": lambda _: play(task)})

    def play(folder: FleetFolder) -> None:
        asked.append(folder.run.name)
        simulation = begin(load_task(folder.task), folder.path.parent / f"played-{len(asked)}", data_dir=None)
        with Workers(1) as workers, EventLog(simulation.folder.events) as events:
            run_rounds(simulation, workers, events)
        folder.run.mkdir(parents=True)
        assemble(simulation, engine="fast").save(folder.run / "result.json")

    real = asking.ask
    monkeypatch.setattr(asking, "ask", wait)
    return asked


def test_counts_are_answered_and_the_former_task_comes_back(tmp_path: Path, answered: list[str]) -> None:
    folder = make_folder(tmp_path / "fleet", task=SMALL)
    before, log = folder.task.read_text(), EventLog(folder.run / "events.jsonl")
    log.write("run", task="small-1", method="m", unit="device", delta=1e-3, rounds=2, devices=2)
    with pytest.raises(BadInput, match=r"0 of 2 rounds are done.*--now"):
        fleet_ask("counts", folder.path)
    said = fleet_ask("counts", folder.path, "--epsilon", 3, "--most", 100, "--now")
    assert "costs it epsilon 3 at delta 1e-05; with 2 boards each value will have an error of ±" in said
    assert "2 boards answered, each for epsilon 3" in said
    counts = {line.split()[0]: line for line in said.splitlines() if " ± " in line and "each" not in line}
    assert set(counts) == {*"0123456789", "left"}
    assert "the fleet's task is small again" in said
    assert answered == ["ask-counts-1"]
    assert folder.task.read_text() == before
    fleet_ask("counts", folder.path, "--epsilon", 3, "--now")
    assert answered == ["ask-counts-1", "ask-counts-2"]
    kept = json.loads((folder.path / "runs/ask-counts-1/result.json").read_text())["statistic"]
    assert len(kept["values"]) == 11
    assert "boards that have become worse" in fleet_ask("drift", folder.path, "--epsilon", 1, "--now")


def test_before_any_training_it_asks_and_leaves_the_beginning_to_a_person(tmp_path: Path, answered: list[str]) -> None:
    folder = make_folder(tmp_path / "fleet", task=SMALL)
    said = fleet_ask("histogram", folder.path, 20, "--low", 0, "--high", 255, "--bins", 2, "--epsilon", 8)
    assert f"to begin training: hushfleet fleet task {folder.path} {folder.path}/kept-small.toml" in said
    assert "127.5 to 255" in said
    assert folder.run.name == "ask-histogram-1", "training has not begun by itself"
    assert load_task(folder.path / "kept-small.toml").name == "small"


def test_nothing_is_asked_where_another_file_would_be_lost(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "fleet", task=SMALL)
    (folder.path / "kept-small.toml").write_text("mine")
    with pytest.raises(BadInput, match=r"kept-small.toml is another task, and the present one would be kept there"):
        fleet_ask("counts", folder.path)
    assert folder.task.read_text() == SMALL
    assert (folder.path / "kept-small.toml").read_text() == "mine"


@pytest.mark.parametrize("name", ["task", "fleet"])
def test_a_task_with_the_name_of_a_file_of_the_fleet_is_kept(tmp_path: Path, name: str) -> None:
    """The former one was kept as task.toml, over which the question was written next."""
    mine, said = SMALL.replace('"small"', f'"{name}"'), list[str]()
    folder = make_folder(tmp_path / "fleet", task=mine)
    task = asking.statistic_task(folder, StatisticSection("counts"), 0.5)

    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        asking.ask(folder, task, sleep=interrupt, say=said.append)
    kept = folder.path / f"kept-{name}.toml"
    assert kept.read_text() == mine
    assert f"the way back is: hushfleet fleet task {folder.path} {kept} --now" in said[0]


@pytest.mark.parametrize(
    ("task", "network"),
    [("tasks/series-anomaly.toml", "second-moments"), ("examples/machines/sound.toml", "autoencoder")],
)
def test_a_fleet_that_looks_for_anomalies_can_be_asked(tmp_path: Path, task: str, network: str) -> None:
    """Its samples have no labels, so its question has its own network: a linear one was refused."""
    folder = make_folder(tmp_path / "fleet", task=SMALL)
    text = (Path(__file__).parents[3] / task).read_text()
    folder.task.write_text(text.replace('path = "sound"', "").replace('partition = "given"', ""))
    made = tmp_path / "question.toml"
    made.write_text(to_toml(asking.statistic_task(folder, StatisticSection("counts"), 1.0).to_plain()))
    spec = prepare(load_task(made), run_id="test").spec
    assert (spec.model.name, spec.model.targets.loss) == (network, "reconstruction")
    assert spec.question is not None
    assert spec.question.kind == "counts"


def test_nobody_waits_for_a_fleet_that_is_paused(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "fleet", task=SMALL)
    folder.paused.touch()
    with pytest.raises(BadInput, match=r"training is paused.*hushfleet fleet resume"):
        fleet_ask("counts", folder.path)
    assert folder.task.read_text() == SMALL


def test_a_fleet_that_is_given_another_task_is_waited_for_no_more(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "fleet", task=SMALL)
    task = asking.statistic_task(folder, StatisticSection("counts"), 0.5)
    other = SMALL.replace('name = "small"', 'name = "other"')
    with pytest.raises(BadInput, match="the fleet was given another task, other, before its boards had answered"):
        asking.ask(folder, task, sleep=lambda _: folder.task.write_text(other) and None, say=lambda _: None)
    assert folder.task.read_text() == other


def test_whoever_stops_waiting_finds_the_former_task_and_cannot_ask_on_top_of_a_question(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "fleet", task=SMALL)
    task = asking.statistic_task(folder, StatisticSection("counts"), 0.5)

    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        asking.ask(folder, task, sleep=interrupt, say=lambda _: None)
    assert (folder.path / "kept-small.toml").read_text() == SMALL
    with pytest.raises(BadInput, match=r"ask-counts-1 was not asked yet.*TASK.toml"):
        fleet_ask("counts", folder.path)


def test_a_kill_while_it_asks_loses_no_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The former task is kept before another one takes its place."""
    folder = make_folder(tmp_path / "fleet", task=SMALL)
    task, real = asking.statistic_task(folder, StatisticSection("counts"), 0.5), asking.set_task

    def killed(folder: FleetFolder, file: Path) -> bool:
        real(folder, file)
        raise KeyboardInterrupt

    monkeypatch.setattr(asking, "set_task", killed)
    with pytest.raises(KeyboardInterrupt):
        asking.ask(folder, task)
    assert (folder.path / "kept-small.toml").read_text() == SMALL


def test_a_task_that_is_given_while_the_answer_comes_stays(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "fleet", task=SMALL)
    folder.run.mkdir(parents=True)
    task, other = asking.statistic_task(folder, StatisticSection("counts"), 0.5), SMALL.replace('"small"', '"other"')

    def answer(_: float) -> None:
        folder.run.mkdir()
        (folder.run / "result.json").write_text("{}")
        folder.task.write_text(other)

    with contextlib.suppress(BadInput):  # the result is empty
        asking.ask(folder, task, sleep=answer, say=lambda _: None)
    assert folder.task.read_text() == other


@pytest.mark.parametrize(
    ("column", "said"),
    [("64", "a sample has 64 values, numbered from 0"), ("temperature", "must be the number of a value, from 0")],
)
def test_a_column_that_no_sample_has_is_not_asked_for(tmp_path: Path, column: str, said: str) -> None:
    """Boards would answer with the middle of the limits, as those without samples do."""
    shape = SMALL.replace("\nlimit = 200", "\nlimit = 200\ninput_shape = [1, 8, 8]")
    folder = make_folder(tmp_path / "fleet", task=shape)
    with pytest.raises(BadInput, match=re.escape(f"column = {column!r}: {said}")):
        fleet_ask("mean", folder.path, column, "--low", 0, "--high", 10, "--dry-run")
    fleet_ask("mean", folder.path, "63", "--low", 0, "--high", 10, "--dry-run")


def test_the_cost_and_the_error_are_known_before_anybody_is_asked(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "fleet", task=SMALL.replace("[data]", 'accounting = "secure"\n[data]'))
    before = folder.task.read_text()
    said = fleet_ask("mean", folder.path, "3", "--low", 0, "--high", 10, "--dry-run")
    assert "epsilon 0.5" in said
    task = asking.statistic_task(folder, StatisticSection("mean", column="3", low=0.0, high=10.0), 0.5)
    assert task.privacy.accounting == "secure"
    twice = asking.statistic_task(folder, StatisticSection("mean", column="3", low=0.0, high=20.0), 0.5)
    assert asking.expected_error(twice) == pytest.approx(2 * asking.expected_error(task))
    assert folder.task.read_text() == before


def test_what_the_boards_limits_do_not_allow_is_not_asked(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "fleet", task=SMALL)
    toml = folder.path / "fleet.toml"
    toml.write_text(re.sub("epsilon_server = .*", "epsilon_server = 2.0", toml.read_text()))
    with pytest.raises(BadInput, match="can pay for a round of ask-counts-1"):
        fleet_ask("counts", folder.path, "--epsilon", 5)
    with pytest.raises(BadInput, match="low must be below high"):
        fleet_ask("mean", folder.path, "3", "--low", 1, "--high", 1)
    with pytest.raises(BadInput, match="their difference must be finite"):
        fleet_ask("mean", folder.path, "3", "--low", "-1e308", "--high", "1e308")
    assert folder.run.name == "small"
