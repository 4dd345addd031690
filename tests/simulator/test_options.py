"""Options of a simulation that were given by a program, and what a sweep refuses before a run begins."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hushfleet.aggregator.config.task import Task, parse_task
from hushfleet.aggregator.results.result import Details
from hushfleet.errors import BadInput
from hushfleet.simulator.options import RunOptions, tasks_at
from hushfleet.simulator.run import _not_played
from hushfleet.simulator.sweep import noise_point, seed_point
from support.report_samples import sample


def task(**sections: dict[str, Any]) -> Task:
    plain: dict[str, Any] = {
        "name": "try",
        "model": {"name": "digits-cnn"},
        "method": {"name": "dp-fedavg"},
        "privacy": {"clip_norm": 1.0, "epsilon": 8.0},
        "data": {"name": "digits", "devices": 4},
    }
    return parse_task({**plain, **sections})


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"engine": "slow"}, "--engine = 'slow': must be one of 'fast', 'live', 'ray'"),
        ({"runtime": "cuda"}, "--runtime = 'cuda': must be one of 'auto', 'onnx'"),
        ({"workers": -1}, "--workers = -1: expected an integer >= 0"),
        ({"workers": "4"}, "--workers = '4': expected an integer"),
        ({"evaluate_every": 0}, "--evaluate-every = 0: expected an integer >= 1"),
        ({"engine": "live", "own_processes": -2}, "--own-processes = -2"),
        ({"emulate": True, "engine": "live"}, "--emulate is gone: --boards without --engine live"),
        ({"sweep": [0, 1]}, "--sweep = .*: expected a text"),
    ],
)
def test_a_program_gets_no_option_that_a_command_would_refuse(options: dict[str, Any], told: str) -> None:
    with pytest.raises(BadInput, match=told):
        RunOptions(**options)
    RunOptions(workers=np.int64(2))  # type: ignore[arg-type]


def test_a_sweep_that_cannot_be_run_is_refused_before_the_run() -> None:
    found = tasks_at(task(), (4.0, 0.0, 4.0), clocked=False)
    assert [(multiplier, each.privacy.noise_multiplier) for multiplier, each in found.items()] == [(0, 0), (4, 4)]
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(BadInput, match=r"--sweep (-1|nan|inf): noise_multiplier"):
            tasks_at(task(), (1.0, wrong), clocked=False)
    buffered = task(round={"mode": "buffered", "buffer_size": 2})
    with pytest.raises(BadInput, match="--sweep runs in the fast engine"):
        tasks_at(buffered, (1.0,), clocked=False)
    assert list(tasks_at(buffered, (1.0,), clocked=True)) == [1.0]
    assert tasks_at(buffered, (), clocked=False) == {}


def test_what_an_engine_leaves_out_is_told() -> None:
    timed = task(schedule={"every": "24h"}, scenario={"outage": [{"devices": 1, "at_s": 1, "for_s": 1}]})
    devices = [SimpleNamespace(name=f"device-{number}") for number in range(4)]
    simulation: Any = SimpleNamespace(task=timed, fleet=SimpleNamespace(devices=devices))
    told = {
        name: [words.split(" is not played")[0] for words in _not_played(simulation, options)]
        for name, options in {
            "fast": RunOptions(),
            "live": RunOptions(engine="live"),
            "clock": RunOptions(boards="generic-x86"),
        }.items()
    }
    assert told == {"fast": ["the schedule", "the scenario"], "live": ["the schedule", "the scenario"], "clock": []}


def test_a_point_has_what_was_measured_last_where_the_last_round_measured_nothing() -> None:
    """As after a round whose devices have spent their budgets, or with `patience` and `--evaluate-every`."""
    result = sample()
    last = result.rounds[-1]
    empty = last.but(round=4, accuracy_own_common=None, accuracy_own_local=None)
    longer = result.but(rounds=[*result.rounds, empty], details=Details())
    for point in (noise_point(longer), seed_point(longer)):
        assert (point.accuracy_own_common, point.accuracy_own_local) == (
            last.accuracy_own_common,
            last.accuracy_own_local,
        )
        assert point.gain_over_local_only == pytest.approx(0.05)
