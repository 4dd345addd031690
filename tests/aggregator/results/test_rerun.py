"""What a result says of how it was made is enough to make it again."""

from __future__ import annotations

import shlex
import sys
import tomllib

import numpy as np
import pytest

from hushfleet.aggregator.config.task import parse_task
from hushfleet.aggregator.report.readable import repeating
from hushfleet.aggregator.results import rerun
from hushfleet.data.samples import Samples


def test_the_task_as_a_file_is_the_task() -> None:
    task = parse_task(
        {
            "name": "odd",
            "model": {"name": "digits-cnn"},
            "method": {"name": "fedglp-adp", "learning_rate": 1e-5},
            "privacy": {"clip_norm": 2.0, "noise_multiplier": 0.3, "delta": 1e-5},
            "data": {"name": "digits", "devices": 3},
            "scenario": {"crash": [{"process": "aggregator", "at_s": 5.0, "for_s": 1.0}]},
        }
    )
    text = rerun.toml_of(task.to_plain())
    assert "privacy.budget = inf" in text
    assert parse_task(tomllib.loads(text)) == task


@pytest.mark.parametrize("login", ["me:secret", "me:sec@ret", "me@home:@secret"])
def test_the_command_has_no_password_and_means_the_whole_run(login: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/x/hushfleet", "aggregator", f"mqtts://{login}@host:1", "--resume", "a b"])
    assert rerun.command_line() == "hushfleet aggregator mqtts://host:1 --resume 'a b'".replace(" --resume", "")


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        (["/x/lib/hushfleet/aggregator/commands/__main__.py", "demo"], "hushfleet demo"),
        (["studies/mine.py", "--rounds", "3"], "python studies/mine.py --rounds 3"),
        (["/x/ipykernel_launcher.py", "-f", "/run/kernel-1.json"], ""),
        (["-c"], ""),
        ([""], ""),
    ],
)
def test_the_command_can_be_typed(typed: list[str], told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", typed)
    assert rerun.command_line() == told


def test_to_repeat_a_run_takes_another_folder() -> None:
    """A run's folder takes no second run."""
    for out in (["--out", "runs/a b"], ["--out=runs/a"], []):
        words = ["hushfleet", "simulate", "t.toml", *out, "--set", "seed=2"]
        assert repeating(shlex.join(words)) == "hushfleet simulate t.toml --set seed=2"
    assert repeating("python mine.py --out x") == "python mine.py --out x"


def test_one_other_label_or_pixel_is_another_digest() -> None:
    def digest(images: np.ndarray, labels: list[int]) -> str:
        return rerun.samples_digest(Samples(images, np.array(labels, np.int64), (0.5,), (0.5,)))

    zeros = np.zeros((2, 1, 2, 2), np.uint8)
    other = zeros.copy()
    other[1, 0, 0, 0] = 1
    found = {
        digest(zeros, [0, 1]),
        digest(zeros, [1, 0]),
        digest(other, [0, 1]),
        digest(zeros.reshape(2, 1, 1, 4), [0, 1]),
    }
    assert len(found) == 4


def test_versions_name_what_rounds_sums() -> None:
    assert {"hushfleet", "numpy", "python", "processor"} <= rerun.versions().keys()
