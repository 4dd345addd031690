"""`result.json` of a simulation, against the run's own files read by hand."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import math
import shutil
import sqlite3
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from hushfleet.aggregator.config.task import parse_task
from hushfleet.aggregator.results.result import Result, SweepPoint
from hushfleet.simulator.answers import with_answers
from hushfleet.simulator.engines.fast.examples import choose_examples
from hushfleet.simulator.engines.fast.local_only import DeviceLocalOnly
from hushfleet.simulator.engines.fast.workers import Workers
from hushfleet.simulator.results import assemble, read_metrics
from hushfleet.simulator.run_folder import RunFolder, Simulation
from hushfleet.simulator.sweep import with_sweep

NAMES = [f"device-{number}" for number in range(5)]


@pytest.fixture(scope="module")
def result(calm: Simulation) -> Result:
    return assemble(calm, engine="fast")


@pytest.fixture
def copy(calm: Simulation, tmp_path: Path) -> Simulation:
    """The finished run, to be damaged."""
    shutil.copytree(calm.folder.path, tmp_path / "run")
    return replace(calm, folder=RunFolder(tmp_path / "run"))


def metrics_of(simulation: Simulation, device: str) -> list[dict[str, Any]]:
    return list(read_metrics(simulation, device).values())


def write_lines(simulation: Simulation, metrics: dict[str, list[dict[str, Any]]]) -> None:
    """Replaces the metrics of all devices, by lines of each."""
    simulation.folder.metrics.unlink()
    for name, lines in metrics.items():
        path = simulation.folder.device(name).metrics
        path.parent.mkdir()
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_it_names_the_run(result: Result, calm: Simulation) -> None:
    assert (result.method, result.dataset, result.engine) == ("fedglp-adp", "digits", "fast")
    assert (result.devices, result.seed, result.clip_norm, result.noise_multiplier) == (5, 7, 2.0, 0.3)
    assert result.details.devices == NAMES
    assert result.boards == dict.fromkeys(NAMES, "generic-x86")
    assert [row.round for row in result.rounds] == [1, 2, 3]
    assert set(result.versions) >= {"hushfleet", "python", "torch", "numpy"}


def test_accuracies_are_means_of_what_devices_measured(result: Result, calm: Simulation) -> None:
    for number, row in enumerate(result.rounds):
        for key in ("accuracy_own_common", "accuracy_own_local"):
            measured = [metrics_of(calm, name)[number][key] for name in NAMES]
            assert getattr(row, key) == pytest.approx(sum(measured) / 5)
            assert getattr(result.details, key)[number] == measured
        assert 0.0 <= row.accuracy_global <= 1.0


def test_layers_shares_and_clip_weights(result: Result, calm: Simulation) -> None:
    layers = len(result.model.layers)
    for number in range(3):
        for layer in range(layers):
            shares = [metrics_of(calm, name)[number]["personal_share"][layer] for name in NAMES]
            assert result.details.personal_share[number][layer] == pytest.approx(sum(shares) / 5)
        assert sum(result.details.clip_weights[number]) == pytest.approx(1.0), "parts of the squared clip norm"
    assert result.details.personal_share[0] == [0.0] * layers, "all is shared in the first round"
    assert max(result.details.personal_share[2]) > 0


def test_traffic_and_privacy_are_the_aggregators_record(result: Result, calm: Simulation) -> None:
    database = sqlite3.connect(f"file:{calm.folder.aggregator / 'aggregator.sqlite'}?mode=ro", uri=True)
    sizes = dict(database.execute("SELECT round, sum(bytes) FROM updates GROUP BY round"))
    database.close()
    assert {row.round: row.uplink_bytes for row in result.rounds} == sizes
    assert [row.device for row in result.privacy] == NAMES
    for row in result.privacy:
        assert row.rounds_charged == 3
        assert row.raw_values, "as published, its clip norms follow raw norms"
        assert row.epsilon_release == row.epsilon_server == math.inf
        assert 0 < row.noised_release < row.noised_server < math.inf
    spent = [row[0] for row in result.details.epsilon_server]
    assert spent == sorted(spent)
    assert spent[-1] == result.privacy[0].epsilon_server
    counts = [sum(row) for row in result.details.label_counts]
    assert counts == [len(d.train) + len(d.local_test) for d in calm.fleet.devices]


def test_outcomes_of_rounds_come_from_the_log_and_what_the_store_knows_from_the_store(copy: Simulation) -> None:
    calm = assemble(copy, engine="fast").details.timeline
    assert [(row.round, row.accepted, row.late, row.lost) for row in calm] == [(n, 5, 0, 0) for n in (1, 2, 3)]
    lines = copy.folder.events.read_text().splitlines(keepends=True)
    lost = next(n for n, line in enumerate(lines) if '"update"' in line)
    copy.folder.events.write_text("".join(lines[:lost] + lines[lost + 1 :]))
    assert assemble(copy, engine="fast").details.timeline == calm, "an update whose line is missing"
    copy.folder.events.unlink()
    assert [row.accepted for row in assemble(copy, engine="fast").details.timeline] == [None] * 3


def test_a_file_gives_the_same_result_back(result: Result, tmp_path: Path) -> None:
    result.save(tmp_path / "result.json")
    assert Result.load(tmp_path / "result.json") == result


def test_baseline_and_sweep_are_put_in(calm: Simulation) -> None:
    # In another order than the devices have: names count.
    alone = [DeviceLocalOnly(name, 0.1 * number, 0.05 * number) for number, name in reversed(list(enumerate(NAMES)))]
    point = SweepPoint(noise_multiplier=1.0, epsilon_server=2.0, epsilon_release=1.0)
    result = with_sweep(assemble(calm, engine="live", local_only_models=alone), [point])
    assert result.details.local_only_common == pytest.approx([0.1 * number for number in range(5)])
    assert result.local_only.accuracy_own_common == pytest.approx(0.2)
    assert result.local_only.accuracy_own_local == pytest.approx(0.1)
    assert [each.noise_multiplier for each in result.details.privacy_sweep] == [0.3, 1.0]
    assert result.details.privacy_sweep[1] == point
    own = result.details.privacy_sweep[0]
    assert own.gain_over_local_only == pytest.approx(result.rounds[-1].accuracy_own_common - 0.2)


def test_what_was_not_measured_is_none(copy: Simulation) -> None:
    """A device that is killed between its commit and its metrics has none of that round."""
    lines = {name: metrics_of(copy, name) for name in NAMES}
    write_lines(copy, {name: each[1:] if name == "device-2" else each[:2] for name, each in lines.items()})
    result = assemble(copy, engine="fast")
    table = result.details.accuracy_own_common
    assert [row[2] is None for row in table] == [True, False, False]
    assert [sum(value is not None for value in row) for row in table] == [4, 5, 1]
    assert result.rounds[2].accuracy_own_common == table[2][2]


def test_without_a_bound_there_are_no_clip_weights(copy: Simulation) -> None:
    lines = {name: metrics_of(copy, name) for name in NAMES}
    without = {name: [{**line, "clip_weights": [None] * 3} for line in each] for name, each in lines.items()}
    write_lines(copy, without)
    assert assemble(copy, engine="fast").details.clip_weights == []


def test_the_last_line_of_a_round_counts_and_a_torn_one_does_not(copy: Simulation) -> None:
    write_lines(copy, {"device-0": []})
    path = copy.folder.device("device-0").metrics
    path.write_text('{"round": 1, "loss": 3.0}\n{"round": 1, "loss": 2.0}\nnoise\n{"round": "x"}\n{"round": 2, "lo')
    assert read_metrics(copy, "device-0") == {1: {"round": 1, "loss": 2.0}}


def test_a_device_that_declined_every_round_has_its_row(copy: Simulation) -> None:
    last = NAMES[-1]
    database = sqlite3.connect(copy.folder.aggregator / "aggregator.sqlite")
    with contextlib.closing(database), database:
        for table in ("privacy", "updates", "devices"):
            column = "id" if table == "devices" else "device"
            database.execute(f"DELETE FROM {table} WHERE {column} = ?", (last,))
        database.executemany("INSERT INTO declines VALUES (?, ?, 'budget', '8.1 of 8')", [(n, last) for n in (1, 2, 3)])
    result = assemble(copy, engine="fast")
    assert result.details.devices == NAMES
    assert last not in {row.device for row in result.privacy}
    assert result.details.declines == {last: {"budget": 3}}
    assert result.details.decline_reasons == {"budget": "8.1 of 8"}
    assert [row[-1] for row in result.details.epsilon_server] == [0.0] * 3
    assert result.details.rounds_accepted[-1] == 0


def test_what_the_models_say_is_what_they_were_tested_to_say(calm: Simulation, result: Result) -> None:
    alone = [DeviceLocalOnly(name, 0.1, 0.1, said=tuple(range(12))) for name in NAMES]
    with Workers(1) as workers:
        details = with_answers(result, calm, workers, alone, runtime="onnx").details
    test = calm.fleet.common_test
    for counts, models, accuracy in (
        (details.confusion_global, 1, result.rounds[-1].accuracy_global),
        (details.confusion_own, 5, result.rounds[-1].accuracy_own_common),
    ):
        matrix = np.array(counts)
        assert matrix.sum(axis=1).tolist() == (models * np.bincount(test.labels, minlength=10)).tolist()
        assert matrix.trace() / matrix.sum() == pytest.approx(accuracy)
    chosen = choose_examples(test, seed=calm.seed)
    for place, (index, each) in enumerate(zip(chosen, details.examples, strict=True)):
        pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(each.png))))
        np.testing.assert_array_equal(pixels, test.images[index][0])
        assert (each.label, each.device, each.said_alone) == (test.labels[index], NAMES[place % 5], place)


def test_it_says_what_it_takes_to_run_it_again(result: Result, calm: Simulation) -> None:
    assert result.rerun is not None
    assert parse_task(tomllib.loads(result.rerun.task)) == calm.task
    assert result.rerun.digests.keys() == {"task package", "training images", "test images"}
