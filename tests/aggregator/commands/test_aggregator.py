"""The command: what is wrong is said before any work, and Ctrl-C leaves a run that can go on."""

from __future__ import annotations

import os
import shlex
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from rich.console import Console
from typer.testing import CliRunner

from hushfleet.aggregator.commands import field_run
from hushfleet.aggregator.commands.main import build_app, load_command
from hushfleet.aggregator.config.task import load_task
from hushfleet.aggregator.storage.activity import FILES
from hushfleet.aggregator.storage.board import Board
from hushfleet.aggregator.storage.enrolment import Enrolment
from hushfleet.aggregator.storage.register import DeviceRegister
from hushfleet.aggregator.storage.store import AggregatorStore
from hushfleet.errors import BadInput
from hushfleet.simulator.world.hub import LocalHub
from hushfleet.wire.format.identity import Identity

MakeFleet = Callable[..., Any]

TASK = """
name = "small"
model.name = "digits-cnn"
method.name = "dp-fedavg"
data = { name = "digits", devices = 3 }
"""


@pytest.fixture
def task_file(tmp_path: Path) -> Path:
    path = tmp_path / "task.toml"
    path.write_text(TASK)
    return path


AT_THE_ROUNDS = 77


def invoked(*arguments: object) -> Any:
    """Ends where the rounds would begin, for ever without a broker: what should be refused before would hang there."""

    def begin(*_: object, **__: object) -> None:
        raise typer.Exit(AT_THE_ROUNDS)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(field_run, "run_rounds", begin)
        return CliRunner().invoke(build_app(), ["aggregator", *(str(argument) for argument in arguments)])


def test_a_used_folder_needs_resume(task_file: Path, tmp_path: Path) -> None:
    AggregatorStore(tmp_path / "run").close()
    outcome = invoked(task_file, "--broker", "mqtt://localhost", "--out", tmp_path / "run")
    assert isinstance(outcome.exception, BadInput)
    assert "--resume" in str(outcome.exception)


@pytest.mark.parametrize("options", [(), ("--resume",)])
def test_a_folder_with_other_files_is_refused_and_stays_as_it_is(
    task_file: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    folder = tmp_path / "run"
    with DeviceRegister(folder) as register:
        register.add([Board("dev-1")])
        assert set(FILES) == {each.name for each in folder.iterdir()}, "of `hushfleet fleet add`"
        (folder / "report.html").write_text("mine")
        words = (task_file, "--broker", "mqtt://localhost", "--out", folder, "--identity", tmp_path / "key")
        outcome = invoked(*words, *options)
    assert isinstance(outcome.exception, BadInput)
    assert "has other files: report.html. A run needs a folder of its own" in str(outcome.exception)
    assert not AggregatorStore.exists(folder)
    assert (folder / "report.html").read_text() == "mine"


def test_a_run_goes_on_beside_files_that_came_later(task_file: Path, tmp_path: Path) -> None:
    words = (task_file, "--broker", "mqtt://localhost", "--out", tmp_path / "run", "--resume")
    words = (*words, "--identity", tmp_path / "key")
    with DeviceRegister(tmp_path / "run") as register:
        register.add([Board("dev-1")])
    assert invoked(*words).exit_code == AT_THE_ROUNDS, "devices that were added before are no run"
    (tmp_path / "run" / "notes.txt").touch()
    assert invoked(*words).exit_code == AT_THE_ROUNDS


@pytest.mark.parametrize("words", [("--devices", "more.toml"), ("--enrolment", "open"), ("--out", "runs/a")])
def test_who_is_in_a_fleet_is_said_by_its_folder(words: tuple[str, str], tmp_path: Path) -> None:
    """The fleet would forget such devices at its next change."""
    (tmp_path / "fleet.toml").write_text('federation = "greenhouse"\n[broker]\nnames = ["broker"]\n')
    outcome = invoked("--fleet", tmp_path, *words)
    assert isinstance(outcome.exception, BadInput)
    assert str(outcome.exception).startswith(f"{words[0]} cannot be combined with --fleet")


def test_without_a_folder_nothing_can_be_resumed(
    task_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = invoked(task_file, "--broker", "mqtt://localhost", "--enrolment", "open", "--resume")
    assert isinstance(outcome.exception, BadInput)
    assert "give its folder" in str(outcome.exception)


@pytest.mark.parametrize(("blocked", "waits"), [(1, False), (2, True)])
def test_a_round_of_the_whole_fleet_does_without_blocked_devices(
    blocked: int, waits: bool, task_file: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    with DeviceRegister(folder) as register:
        register.add([Board(f"dev-{n}") for n in range(3)])
        for n in range(blocked):
            register.block(f"dev-{n}", "stolen")
    words = ("--broker", "mqtt://localhost", "--out", folder, "--identity", tmp_path / "key")
    outcome = invoked(task_file, *words, "--set", "round.min_updates=2")
    assert outcome.exit_code == AT_THE_ROUNDS, outcome.output
    assert ("a round opens with 2 devices, and 1 may take part" in outcome.output) == waits
    assert ("a round opens with" in outcome.output) == waits


@pytest.mark.parametrize(
    "arguments",
    [
        ("--broker", "http://localhost"),
        ("--broker", "mqtt://localhost", "--federation", "Not A Name"),
        ("--broker", "mqtt://localhost", "--set", "round.rounds=none"),
    ],
)
def test_bad_values_are_refused_before_anything_is_made(
    task_file: Path, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    outcome = invoked(task_file, "--out", tmp_path / "run", *arguments)
    assert isinstance(outcome.exception, BadInput)
    assert not (tmp_path / "run").exists()


def test_files_that_are_not_there_are_named(task_file: Path, tmp_path: Path) -> None:
    outcome = invoked(task_file, "--broker", "mqtts://b", "--ca-file", tmp_path / "no-such.pem")
    assert outcome.exit_code == 2
    assert "no-such.pem" in outcome.output.replace("\n", "").replace("│", "").replace(" ", "")


def test_the_device_of_the_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert field_run.torch_device("auto") == "cpu"
    with pytest.raises(BadInput, match="no CUDA"):
        field_run.torch_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert field_run.torch_device("auto") == field_run.torch_device("cuda") == "cuda"
    assert field_run.torch_device("cpu") == "cpu"


def test_the_resume_command_repeats_what_matters(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").touch()
    given = [
        "a task.toml", "--broker", "mqtt://b", "--device", "cpu", "--set", "round.rounds=5", "--set", "seed=1",
        "--ca-file", str(tmp_path / "ca.pem"), "--enrolment", "open", "--rounds-only",
    ]  # fmt: skip
    context = load_command("aggregator").make_context("aggregator", list(given))
    words = shlex.split(field_run.resume_command(context, Path("runs/a")))
    assert words[:3] == ["hushfleet", "aggregator", "a task.toml"]
    assert words[-3:] == ["--out", "runs/a", "--resume"]
    assert sorted(words[3:-3]) == sorted(given[1:])
    again = load_command("aggregator").make_context("aggregator", words[2:]).params
    assert again | {"out": Path(again["out"])} == context.params | {"out": Path("runs/a"), "resume": True}


def test_the_resume_command_shows_no_password() -> None:
    """It goes to logs as well."""
    given = ["task.toml", "--broker", "mqtts://me:se@cr%2Fet@[::1]:8883"]
    context = load_command("aggregator").make_context("aggregator", list(given))
    words = shlex.split(field_run.resume_command(context, Path("runs/a")))
    assert words == ["hushfleet", "aggregator", "task.toml", "--broker", "mqtts://me:PASSWORD@[::1]:8883",
                     "--out", "runs/a", "--resume"]  # fmt: skip


def test_a_run_keeps_its_id(task_file: Path, tmp_path: Path) -> None:
    with AggregatorStore(tmp_path / "run", durable=False) as store:
        store.put("run_id", b"abcd")
        with pytest.raises(BadInput, match="'abcd'"):
            field_run.prepared_under_its_id(load_task(task_file), store, data_dir=None, run_id="other")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_between_two_steps(make_fleet: MakeFleet, number: signal.Signals) -> None:
    fleet, hub = make_fleet(), LocalHub()
    before, log = signal.getsignal(number), fleet.folder / "events.jsonl"

    def interrupt() -> None:
        while not (log.exists() and '"run"' in log.read_text()):  # the handler is there before the run begins
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    sender = threading.Thread(target=interrupt)
    sender.start()
    with DeviceRegister(fleet.folder, durable=False) as register:
        finished = field_run.run_rounds(
            fleet.engine,
            lambda will: hub.link("aggregator", will),
            identity=Identity.generate(),
            enrolment=Enrolment(fleet.store, register),
            epoch=1,
            federation="default",
            console=Console(quiet=True),
        )
    sender.join()
    assert not finished
    assert signal.getsignal(number) is before
    assert log.read_text().count('"run"') == 1
    fleet.restart().open_round(fleet.names)
