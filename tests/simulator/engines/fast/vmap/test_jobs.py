"""The runtime that trains a cohort as arrays, where one device of it must refuse."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hushfleet.edge_client.worker.randomness import SeededRandomness
from hushfleet.errors import PrivacyError
from hushfleet.simulator.engines.fast.loaded_run import loaded_run
from hushfleet.simulator.engines.fast.vmap.training import CohortTrainer
from hushfleet.simulator.run_folder import begin


def test_one_device_whose_training_fails_does_not_take_the_cohort_with_it(
    runs: Any, short_task: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = short_task(data={"devices": 3, "limit": 120}, round={"rounds": 1, "min_updates": 2})
    simulation = begin(task, tmp_path / "run", data_dir=None)
    diverging, groups, sizes = SeededRandomness(7, 1).order(1).bit_generator.state, CohortTrainer.groups, []

    def checked(self: CohortTrainer, method: Any, members: Any, *arguments: Any, **named: Any) -> Any:
        sizes.append(len(members))
        if any(member.rng.bit_generator.state == diverging for member in members):
            raise PrivacyError("a noised gradient is not finite")
        return groups(self, method, members, *arguments, **named)

    monkeypatch.setattr(CohortTrainer, "groups", checked)
    runs.fast(simulation, runtime="vmap")
    events = [json.loads(line) for line in simulation.folder.events.read_text().splitlines()]
    declined = [each for each in events if each["event"] == "decline"]
    assert [each["device"] for each in declined] == [simulation.fleet.devices[1].name]
    assert declined[0]["reason"] == "a noised gradient is not finite"
    assert sum(each["event"] == "update" for each in events) == 2
    assert sizes == [3, 1, 1, 1]


def test_a_folder_that_held_another_run_is_trained_by_its_own_loss(
    runs: Any, short_task: Callable[..., Any], tmp_path: Path
) -> None:
    data, rounds = {"devices": 3, "limit": 120}, {"rounds": 2, "min_updates": 2}
    for method in ("dp-fedavg", "pfedsd"):  # the second distils from the second round on
        loaded_run.cache_clear()  # as `simulate` does
        task = short_task(method={"name": method}, data=data, round=rounds)
        simulation = runs.fast(begin(task, tmp_path / "run", data_dir=None), runtime="vmap")
        shutil.rmtree(simulation.folder.path)
