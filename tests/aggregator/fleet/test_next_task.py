"""A fleet's tasks, each in a folder of its own, and certificates of the fleet that near their end."""

from __future__ import annotations

import datetime
import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from hushfleet.aggregator.config.task import load_task
from hushfleet.aggregator.fleet import descriptions
from hushfleet.aggregator.fleet.tasks.next_task import set_task
from hushfleet.aggregator.fleet.trust.folder import FleetFolder
from hushfleet.aggregator.fleet.trust.own_certificates import AUTHORITY, ends
from hushfleet.aggregator.fleet.watching.watch import FleetWatch
from hushfleet.aggregator.payloads.prepare import prepare
from hushfleet.aggregator.results.events import EventLog
from hushfleet.errors import BadInput
from support.command import hushfleet
from support.desk import TASK, make_folder

DAY_S = 86400.0


def begin(folder: FleetFolder, *, rounds: int = 2, finished: bool = False) -> None:
    log = EventLog(folder.run / "events.jsonl")
    log.write("run", task=f"{folder.run.name}-1", method="m", unit="device", delta=1e-5, rounds=rounds, devices=2)
    if finished:
        log.write("finished")


def fleet_task(folder: FleetFolder, file: Path, *words: str) -> str:
    return hushfleet("fleet", "task", folder.path, file, *words)


def task_file(path: Path, name: str, **changes: Any) -> Path:
    text = TASK.replace('name = "small"', f'name = "{name}"')
    for old, new in changes.items():
        text = text.replace(f"{old} = 2", f"{old} = {new}")
    path.write_text(text)
    return path


def test_each_task_has_its_own_run_and_none_is_taken_for_another(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "fleet")
    watch = FleetWatch(folder)
    following = task_file(tmp_path / "next.toml", "next")
    begin(folder)
    assert watch.view().run.task == "small-1"
    with pytest.raises(BadInput, match=r"0 of 2 rounds are done.*--now"):
        fleet_task(folder, following)
    assert folder.run.name == "small"
    assert "begins" in fleet_task(folder, following, "--now")
    assert (folder.run.name, watch.view().run) == ("next", None)
    begin(folder, finished=True)
    assert watch.view().run.task == "next-1"
    with pytest.raises(BadInput, match="the run of another task"):
        fleet_task(folder, task_file(tmp_path / "other.toml", "small", rounds=5))
    with pytest.raises(BadInput, match="the run of another task"):
        fleet_task(folder, task_file(tmp_path / "other.toml", "next", rounds=5))
    assert "goes on" in fleet_task(folder, folder.path / "runs/small/task.toml")
    assert watch.view().run.task == "small-1"
    folder.task.write_text("name = ")  # somebody writes it by hand
    assert watch.view().run.task == "small-1"
    watch.close()


def test_files_that_a_task_names_must_be_in_the_fleets_folder(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "fleet")
    following = task_file(tmp_path / "next.toml", "next")
    following.write_text(following.read_text().replace("[model]", '[model]\nshare = "head"\nweights = "start.npz"'))
    with pytest.raises(BadInput, match=r"names start.npz, but .*start.npz does not exist"):
        fleet_task(folder, following)
    assert folder.run.name == "small"
    weights = folder.path / "start.npz"
    (tmp_path / "start.npz").write_bytes(b"no weights")
    with pytest.raises(BadInput, match=r"start\.npz"):  # as the aggregator would, which then ends
        fleet_task(folder, following)
    assert (folder.run.name, weights.exists()) == ("small", False)
    (tmp_path / "start.npz").unlink()
    weights.write_bytes(b"read when the run begins")
    assert not set_task(folder, following, prepares=False)
    weights.unlink()
    (tmp_path / "start.npz").write_bytes(b"one")
    following.write_text(following.read_text().replace('"next"', '"third"'))
    assert not set_task(folder, following, prepares=False)
    assert weights.read_bytes() == b"one", "it is copied"
    (tmp_path / "start.npz").write_bytes(b"two")
    following.write_text(following.read_text().replace('"third"', '"fourth"'))
    with pytest.raises(BadInput, match=r"the fleet has another file .*: rename one of them"):
        set_task(folder, following, prepares=False)
    assert weights.read_bytes() == b"one", "the run before may still need it"


HUSH = """
name = "autumn"
[model]
name = "linear"
features = "filters"
directions = 16
[method]
name = "hush"
[privacy]
accounting = "as-published"
noise_multiplier = 4.0
clip_norm = 1.0
delta = 1e-3
[data]
name = "folder"
class_names = ["leaf", "stem"]
input_shape = [1, 8, 8]
devices = 2
[round]
rounds = 2
min_devices = 2
"""


def test_a_next_task_with_one_more_class_continues_a_model_of_hush(tmp_path: Path) -> None:
    """`fleet task` prepares it as the aggregator will, with the paths of the fleet's folder."""
    folder = make_folder(tmp_path / "fleet", task=HUSH)
    first = prepare(load_task(folder.task), run_id="1")
    about = {
        "task": first.spec.task,
        "classes": ["leaf", "stem"],
        "features": first.spec.model.features.graph.digest.hex(),
    }
    tensors = {name: view + 1 for name, view in first.spec.model.layout.unflatten(first.initial).items()}
    (folder.run).mkdir(parents=True)
    save_file(tensors, folder.run / "global-00002.safetensors", {"hushfleet": json.dumps(about)})
    following = tmp_path / "next.toml"
    text = HUSH.replace('"stem"', '"stem", "root"').replace("[method]", 'start = "runs/autumn"\n[method]')
    following.write_text(text.replace('name = "autumn"', 'name = "winter"'))
    assert "begins" in fleet_task(folder, following)
    second = prepare(load_task(folder.task), run_id="2")
    assert second.spec.model.layout.shapes == ((3, 17), (3,))
    np.testing.assert_array_equal(second.initial, np.ones(3 * 17 + 3))
    following.write_text(
        text.replace('name = "autumn"', 'name = "spring"').replace("directions = 16", "directions = 8")
    )
    with pytest.raises(BadInput, match="has other features"):
        fleet_task(folder, following)
    assert folder.run.name == "winter"


def test_status_says_why_the_aggregator_has_ended(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "fleet")
    folder.task.write_text(TASK.replace("[model]", '[model]\nstart = "runs/gone"'))
    with pytest.raises(BadInput, match="runs/gone"):
        hushfleet("aggregator", "--fleet", folder.path)
    watch = FleetWatch(folder)
    [told] = [problem.what for problem in watch.view().problems if "aggregator" in problem.what]
    assert told.startswith("the aggregator has ended: model.start = ")
    folder.task.write_text(TASK.replace('name = "small"', 'name = "next"'))
    assert not [problem for problem in watch.view().problems if "has ended" in problem.what], "it is of another run"
    watch.close()


def test_a_task_is_kept_as_toml_that_all_commands_can_read(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "fleet")
    as_json = tmp_path / "task.json"
    as_json.write_text(json.dumps(tomllib.loads(TASK) | {"name": "next"}))
    with pytest.raises(BadInput, match=r"task\.json is JSON, and a fleet keeps its task as TOML"):
        fleet_task(folder, as_json)
    with pytest.raises(BadInput, match="keeps its task as TOML"):
        make_folder(tmp_path / "other", task_file=as_json)
    following = task_file(tmp_path / "next.toml", "next")
    following.write_text("\ufeff" + following.read_text())  # as an editor on Windows writes it
    fleet_task(folder, following, "--now")
    assert tomllib.loads(folder.task.read_text("utf-8"))["name"] == "next"
    (folder.run).mkdir(parents=True)
    fleet_task(folder, task_file(tmp_path / "third.toml", "third"), "--now")
    assert "goes on" in fleet_task(folder, following, "--now")
    assert make_folder(tmp_path / "marked", task_file=following).run.name == "next"


def test_a_run_from_before_runs_had_folders_is_not_begun_anew(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "fleet")
    (folder.path / "run").mkdir()
    with pytest.raises(BadInput, match=r"mv .*/run .*/runs/NAME"):
        FleetFolder(folder.path)


def test_certificates_that_near_their_end_are_told_in_time(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "fleet")
    watch, end = FleetWatch(folder), ends(folder)

    def told(before: float) -> list[str]:
        return [problem.what for problem in watch.view(before).problems if "end" in problem.what]

    first = min(end[stem] for stem in end if stem != AUTHORITY)
    assert told(first - 31 * DAY_S) == []
    assert len(told(first - 29 * DAY_S)) == 4
    assert "the certificate broker/broker.pem has ended" in told(first + 1)
    assert told(end[AUTHORITY] - 364 * DAY_S)[-1] == "the fleet's authority ends in 364 days"
    view = watch.view(first)
    assert (view.certificates_end, view.authority_end) == (first, end[AUTHORITY])
    assert f"its authority {datetime.date.fromtimestamp(end[AUTHORITY])}" in descriptions.certificates(view)
    assert datetime.timedelta(seconds=end[AUTHORITY] - first) > datetime.timedelta(days=3000)
    watch.close()
