"""`hushfleet plan`: what it says, what it writes, and whether its formulas are the product's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from hushfleet.aggregator.config.task import load_task
from hushfleet.aggregator.planning.advice import Question
from hushfleet.firmware_profiles import load_board
from hushfleet.privacy.accounting.epsilon import Step, epsilon
from hushfleet.secure.committee import committee_rule
from hushfleet.secure.field import PRIMES
from hushfleet.secure.masking import mask
from hushfleet.simulator.studies.plan.cli import register
from hushfleet.simulator.studies.plan.needs import HEADER_BYTES, BoardTimes, needs
from hushfleet.simulator.studies.plan.task_file import task_text

ASKED = Question(devices=60, images=40, classes=10, epsilon=4)
OPTIONS = ["--devices", "60", "--images", "40", "--classes", "10", "--epsilon", "4"]


@pytest.fixture
def app() -> typer.Typer:
    app = typer.Typer()
    register(app)
    return app


def test_it_answers_in_words_and_in_json(app: typer.Typer) -> None:
    words = CliRunner().invoke(app, OPTIONS)
    assert words.exit_code == 0
    assert "It pays" in words.output
    found = json.loads(CliRunner().invoke(app, [*OPTIONS, "--json"]).output)
    assert found["answer"] == "yes"
    assert found["least_devices"] <= 60
    assert found["least_epsilon"] <= 4


def test_a_no_is_an_answer_and_not_an_error(app: typer.Typer) -> None:
    done = CliRunner().invoke(app, ["--devices", "10", "--images", "40", "--classes", "10", "--epsilon", "1"])
    assert done.exit_code == 0
    assert "does not pay" in done.output


def test_the_file_that_it_writes_is_a_task_with_the_same_numbers(app: typer.Typer, tmp_path: Path) -> None:
    path = tmp_path / "task.toml"
    assert CliRunner().invoke(app, [*OPTIONS, "--out", str(path)]).exit_code == 0
    task, needed = load_task(path), needs(ASKED)
    assert (task.round.rounds, task.privacy.clip_norm) == (needed.rounds, needed.clip_norm)
    assert 10 * (task.model.directions + 1) == needed.values < 5130
    spec = task.privacy_spec(size=needed.values)
    assert spec.noise_multiplier == pytest.approx(needed.noise_multiplier)
    assert spec.secure is not None
    assert (spec.secure.bits, spec.secure.honest_devices) == (needed.bits, ASKED.honest_devices)
    again = CliRunner().invoke(app, [*OPTIONS, "--out", str(path)])  # nothing is overwritten, nor computed
    assert (again.exit_code, again.output) == (1, "")
    assert "is there already" in str(again.exception)


@pytest.mark.parametrize("changes", [{"local": True}, {"features": "filters"}, {"classes": 3, "honest_fraction": 0.7}])
def test_other_plans_are_tasks_too(changes: dict[str, object], tmp_path: Path) -> None:
    asked = Question(**{"devices": 200, "images": 20, "classes": 10, "epsilon": 2.0, **changes})  # type: ignore[arg-type]
    path = tmp_path / "task.toml"
    path.write_text(task_text(asked, needs(asked)))
    task, needed = load_task(path), needs(asked)
    spent = epsilon([Step(task.privacy_spec(size=needed.values).noise_multiplier, 1.0, needed.rounds)], delta=1e-5)
    assert spent == pytest.approx(2.0, rel=1e-6)


def test_bytes_are_those_of_a_masked_update() -> None:
    needed, rule = needs(ASKED), committee_rule(60, honest_fraction=0.9)
    keys = [bytes([member]) * 32 for member in range(rule.members)]
    made = mask(np.zeros(needed.values, np.uint32), keys, rule, PRIMES[16])
    assert needed.up == (made.values.size + made.corrections.size) * 2 + HEADER_BYTES


def test_a_slow_board_takes_longer() -> None:
    zero, five = (
        BoardTimes.of(load_board(name), ASKED, needs(ASKED)) for name in ("raspberry-pi-zero-2-w", "raspberry-pi-5-8gb")
    )
    assert zero.round_s > five.round_s > 0
    assert zero.features_s > five.features_s > 0


def test_it_needs_no_torch() -> None:
    code = "import sys; import hushfleet.simulator.studies.plan.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
