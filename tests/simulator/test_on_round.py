"""A program has each round's model in hand before the next round begins, and may end the run."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import hushfleet as hf
from hushfleet.errors import BadInput
from hushfleet.simulator.closed_round import Round
from hushfleet.simulator.engines.fast.loaded_run import LoadedRun

TASK: dict[str, Any] = {
    "name": "steps",
    "model": {"name": "linear", "features": "filters"},
    "method": {"name": "dp-fedavg", "optimizer": "sgd", "learning_rate": 0.5},
    "privacy": {"noise_multiplier": 0.1, "clip_norm": 1.0},
    "data": {"name": "digits", "devices": 3, "limit": 150},
    "round": {"rounds": 4},
}
IN_LOOP: dict[str, Any] = {"local_only": False, "workers": 1}
HOW = IN_LOOP | {"quiet": True}


@pytest.mark.parametrize(
    ("boards", "method"), [("", "dp-fedavg"), ("", "fedopt"), ("", "fedala"), ("raspberry-pi-4-4gb", "fedala")]
)
def test_each_round_is_given_with_its_model_before_the_next_begins(tmp_path: Path, boards: str, method: str) -> None:
    given: list[Round] = []

    def on_round(round: Round) -> bool:
        events = [event for event in hf.open_run(tmp_path / "a").events if event["event"].startswith("round_")]
        assert (events[-1]["event"], events[-1]["round"]) == ("round_close", round.number)
        given.append(round)
        return round.number < 3  # None, too, goes on

    task = {**TASK, "method": TASK["method"] | {"name": method}}
    run = hf.simulate(task, out=tmp_path / "a", on_round=on_round, boards=boards, **HOW)
    assert [round.number for round in given] == list(run.rounds.index) == [1, 2, 3]
    assert [round.accuracy for round in given] == run.rounds.accuracy_global.tolist()
    assert [round.participants for round in given] == run.rounds.participants.tolist()
    assert run.events[-1]["reason"] == "the program ended the run after this round (on_round)"
    model, loaded = run.model("global"), LoadedRun(run.folder, "onnx")
    assert model.keys() == given[-1].model.keys()
    assert all(np.array_equal(model[name], given[-1].model[name]) for name in model)
    logits = loaded.inference(given[0].params, loaded.common_test.x)
    assert (logits.argmax(1) == loaded.common_test.labels).mean() == pytest.approx(given[0].accuracy)
    whole = hf.simulate(task, out=tmp_path / "a", resume=True, boards=boards, **HOW)
    plain = hf.simulate(task, out=tmp_path / "b", boards=boards, **HOW)
    assert whole.rounds.accuracy_global.equals(plain.rounds.accuracy_global), "an end by a program changes no bit"


def test_an_error_of_the_program_leaves_the_run_as_it_is(tmp_path: Path) -> None:
    class Pruned(Exception):
        pass

    def on_round(round: Round) -> None:
        raise Pruned

    with pytest.raises(Pruned):
        hf.simulate(TASK, out=tmp_path / "a", on_round=on_round, **HOW)
    assert [each["event"] for each in hf.open_run(tmp_path / "a").events][-1] == "round_close"
    with pytest.raises(BadInput, match="on_round does nothing with engine='live'"):
        hf.simulate(TASK, out=tmp_path / "b", on_round=on_round, engine="live", quiet=True)


def test_events_step(tmp_path: Path) -> None:
    """While the loop looks at a round, nothing is written; the program's own function is called too."""
    log, seen, called = tmp_path / "a" / "aggregator" / "events.jsonl", [], []
    for event in hf.events(TASK, out=tmp_path / "a", on_round=lambda round: called.append(round.number), **IN_LOOP):
        if event["event"] == "round_close":
            size = log.stat().st_size
            time.sleep(0.3)
            assert log.stat().st_size == size
            seen.append((event["closed"].number, event["closed"].accuracy))
    run = hf.open_run(tmp_path / "a")
    assert seen == list(run.rounds.accuracy_global.items())
    assert called == [1, 2, 3, 4]


def test_leaving_the_loop_at_a_round_ends_the_run(tmp_path: Path) -> None:
    for event in hf.events(TASK, out=tmp_path / "a", **IN_LOOP):
        if event["event"] == "round_close":
            break
    assert not (tmp_path / "a" / "result.json").exists()
    rest = [
        event["closed"].number
        for event in hf.events(TASK, out=tmp_path / "a", resume=True, **IN_LOOP)
        if "closed" in event
    ]
    assert rest[-1] == 4


def test_a_run_that_is_still_going_on_is_read_while_another_process_writes(tmp_path: Path) -> None:
    code = f"""
import sys, hushfleet as hf
for event in hf.events({TASK!r}, out={str(tmp_path / "a")!r}, **{IN_LOOP!r}):
    if event["event"] == "round_close":
        print(event["round"], event["closed"].accuracy, flush=True)
        sys.stdin.readline()
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        for number in (1, 2, 3, 4):
            round, accuracy = other.stdout.readline().split()
            run = hf.open_run(tmp_path / "a")
            assert (run.finished, int(round)) == (False, number)
            assert run.rounds.index.tolist() == list(range(1, number + 1))
            assert run.rounds.accuracy_global[number] == float(accuracy)
            assert run.devices.rounds_accepted.tolist() == [number] * 3
            assert run.model("global").keys()
            assert run.summary == f"The run has not ended: {number} rounds have closed."
            assert "report" not in run._repr_html_()
            run.plot_accuracy()
            for asked in (run.report, lambda run=run: run.model("device-0")):
                with pytest.raises(BadInput, match=r"has no report|has not ended"):
                    asked()
            other.stdin.write("\n")
            other.stdin.flush()
        assert other.wait(60) == 0
    after = hf.open_run(tmp_path / "a")
    assert after.finished
    columns = ["participants", "accuracy_global", "loss", "accuracy_own_common", "uplink_bytes", "snr_db"]
    there, here = (each.rounds[columns].iloc[:3].astype(float) for each in (after, run))
    pd.testing.assert_frame_equal(there, here)
