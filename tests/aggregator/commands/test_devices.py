"""The list of known devices of a run without a fleet, and an aggregator that would know nobody."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hushfleet.aggregator.commands import field_run
from hushfleet.aggregator.commands.main import build_app
from hushfleet.aggregator.results.events import EventLog
from hushfleet.aggregator.storage.activity import RefusedBirth
from hushfleet.aggregator.storage.board import Board
from hushfleet.aggregator.storage.devices_file import read_devices
from hushfleet.aggregator.storage.register import DeviceRegister
from hushfleet.aggregator.storage.store import AggregatorStore
from hushfleet.errors import BadInput, StoreError
from hushfleet.wire.format.identity import Identity

KEY = Identity.from_bytes(bytes(range(32))).public_key
OTHER = Identity.from_bytes(bytes(range(1, 33))).public_key


def invoked(*words: object) -> Any:
    return CliRunner(env={"COLUMNS": "80"}).invoke(build_app(), [str(word) for word in words])


def refused(*words: object) -> str:
    outcome = invoked(*words)
    assert isinstance(outcome.exception, BadInput), outcome.output
    assert outcome.exception.exit_code == 2
    return str(outcome.exception)


def states(run: Path) -> dict[str, str]:
    with DeviceRegister(run) as register:
        return {row.device: row.standing for row in register.devices()}


def test_devices_are_added_blocked_and_forgotten(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert KEY.hex() in invoked("fleet", "add", run, "one", "--key", KEY.hex()).output
    assert "the first key" in invoked("fleet", "add", run, "two").output
    assert states(run) == {"one": "known", "two": "expected"}
    assert "to take back" in invoked("fleet", "block", run, "one", "--reason", "stolen").output
    assert "there is no board 'never-seen'" in refused("fleet", "block", run, "never-seen")
    assert states(run) == {"one": "blocked", "two": "expected"}
    shown = invoked("fleet", "status", run).output
    assert "blocked: stolen" in shown
    assert KEY.hex() in shown
    invoked("fleet", "unblock", run, "one")
    assert states(run)["one"] == "known"
    assert "forgotten" in invoked("fleet", "forget", run, "one").output
    assert states(run) == {"two": "expected"}


def test_a_new_device_has_no_dot_and_a_known_one_keeps_it(tmp_path: Path) -> None:
    assert "take 'old-1'" in refused("fleet", "add", tmp_path, "old.1")
    with DeviceRegister(tmp_path) as register:
        register.add([Board("old.1", public_key=KEY)])
    invoked("fleet", "block", tmp_path, "old.1")
    invoked("fleet", "add", tmp_path, "old.1")
    assert states(tmp_path) == {"old.1": "known"}


def test_the_list_shows_who_was_refused_and_who_was_seen(tmp_path: Path) -> None:
    with DeviceRegister(tmp_path) as register:
        register.add([Board("one", public_key=KEY)])
        refused = [RefusedBirth("stranger", OTHER, 7, 0.0), RefusedBirth("one", KEY, 1, 0.0)]
        register.put_refused_births(refused)
    with EventLog(tmp_path / "events.jsonl") as log:
        log.write("presence", device="one", state="ready", board="[/pi-4]")
        log.write("update", device="one", code="accepted", round=1)
        log.write("update", device="one", code="late", round=2)
    rows = [line.split() for line in invoked("fleet", "status", tmp_path).output.splitlines()]
    (known,) = [row for row in rows if row[:1] == ["one"]]
    assert (known[:4], known[-1]) == (["one", "known", "[/pi-4]", "1"], KEY.hex())
    (birth,) = [row for row in rows if row[:1] == ["stranger"]]
    assert (birth[1], birth[-1]) == ("7", OTHER.hex())
    invoked("fleet", "add", tmp_path, "stranger", "--key", OTHER.hex())
    assert "not accepted" not in invoked("fleet", "status", tmp_path).output


@pytest.mark.parametrize("words", [["status"], ["forget", "one"], ["block", "one"]])
def test_a_folder_that_is_no_runs_is_named(tmp_path: Path, words: list[str]) -> None:
    assert "not a run's folder" in refused("fleet", words[0], tmp_path, *words[1:])
    assert not DeviceRegister.exists(tmp_path)


def test_what_cannot_be_meant_is_refused(tmp_path: Path) -> None:
    assert "64 hex digits" in refused("fleet", "add", tmp_path, "one", "--key", "abc")
    assert "which no board can own" in refused("fleet", "add", tmp_path, "one", "--key", "01" + "00" * 31)
    assert "Not An Id" in refused("fleet", "add", tmp_path, "Not An Id")
    invoked("fleet", "add", tmp_path, "one", "--key", KEY.hex())
    assert "there is no board 'two'" in refused("fleet", "forget", tmp_path, "two")
    assert "a key of its own" in refused("fleet", "add", tmp_path, "two", "--key", KEY.hex())
    assert "fleet forget" in refused("fleet", "add", tmp_path, "one", "--key", OTHER.hex())


def test_a_list_may_be_given_again(tmp_path: Path) -> None:
    file = tmp_path / "devices.toml"
    file.write_text(f'[devices]\none = "{KEY.hex()}"\ntwo = "certificate"\n"pi.3" = "certificate"\n')
    listed = read_devices(file)
    with DeviceRegister(tmp_path) as register:
        register.add(listed)
        register.pin({"two": OTHER}, may_add=False)
        register.block("one", "stolen")
        before = register.devices()
        register.add(listed)
        assert register.devices() == before
    assert states(tmp_path) == {"one": "blocked", "pi.3": "expected", "two": "pinned"}
    assert read_devices(tmp_path) == before, "an earlier run's folder is a list, too"
    (tmp_path / "next").mkdir()
    with DeviceRegister(tmp_path / "next") as register:
        register.add(read_devices(tmp_path))
        assert register.devices() == before


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "section [devices]"),
        ("[devices", "is not valid TOML"),
        ("[devices]\none = 7\n", "in quotes"),
        ('[devices]\none = "key"\n', "the key of one"),
        ('[devices]\n"A B" = "certificate"\n', "A B"),
    ],
)
def test_a_list_that_cannot_be_used_is_refused_in_words(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "devices.toml"
    file.write_text(text)
    with pytest.raises(BadInput) as refusal:
        read_devices(file)
    assert said in str(refusal.value)
    with pytest.raises(BadInput, match="no devices"):
        read_devices(tmp_path)


def test_a_damaged_register_is_an_error(tmp_path: Path) -> None:
    DeviceRegister.file_of(tmp_path).write_bytes(b"no database" * 100)
    with pytest.raises(StoreError, match="cannot be used"):
        DeviceRegister(tmp_path)


@pytest.fixture
def start(tmp_path: Path) -> list[object]:
    task = tmp_path / "task.toml"
    task.write_text('name = "small"\nmodel.name = "digits-cnn"\nmethod.name = "dp-fedavg"\n'
                    'data = { name = "digits", devices = 3 }\n')  # fmt: skip
    return ["aggregator", task, "--broker", "mqtt://localhost", "--out", tmp_path / "run"]


def test_an_aggregator_that_would_know_nobody_says_how_to_add_devices(start: list[object], tmp_path: Path) -> None:
    run = tmp_path / "run"
    text = refused(*start)
    assert f"hushfleet fleet add {run} ID --key KEY" in text
    assert "--enrolment open" in text
    assert not run.exists()
    AggregatorStore(run).close()
    assert "fleet add" in refused(*start, "--resume"), "a run in which nobody was enrolled yet"
    invoked("fleet", "add", run, "one")
    invoked("fleet", "block", run, "one")
    assert refused(*start, "--resume").startswith("all 1 known devices are blocked")


def test_who_may_take_part_is_said_at_the_start(
    start: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Reached(Exception):
        pass

    def prepared(*_: object, **__: object) -> None:
        raise Reached

    monkeypatch.setattr(field_run, "prepared_under_its_id", prepared)
    opened = invoked(*start, "--enrolment", "open")
    assert isinstance(opened.exception, Reached)
    assert "whoever reaches the broker takes part" in opened.output
    file = tmp_path / "devices.toml"
    file.write_text(f'[devices]\none = "{KEY.hex()}"\n')
    closed = invoked(*start, "--devices", file, "--resume")
    assert isinstance(closed.exception, Reached)
    assert "1 devices may take part" in closed.output
    assert isinstance(invoked(*start, "--resume").exception, Reached), "the run has kept its list"
