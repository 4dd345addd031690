"""Names that command a terminal, through commands of the aggregator's machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from support.hostile import HOSTILE_FILE, SHOWN, SHOWN_FILE, assert_harmless

GONE = f"{HOSTILE_FILE}.toml"


def typed(*words: str | Path) -> str:
    command = [sys.executable, "-m", "hushfleet.aggregator.commands", *map(str, words)]
    done = subprocess.run(
        list(map(os.fsencode, command)), capture_output=True, check=False, env=os.environ | {"COLUMNS": "400"}
    )
    assert done.returncode == 2
    return (done.stdout + done.stderr).decode()  # not UTF-8 would be an error here


@pytest.mark.parametrize(
    "words",
    [
        ["report", GONE], ["compare", GONE, GONE], ["log", GONE],
        ["boards", GONE], ["fleet", "status", GONE], ["fleet", "add", GONE, "--count", "1"],
        ["fleet", "task", GONE, GONE],
        ["simulate", "tasks/digits-hush.toml", "--out", HOSTILE_FILE],
    ],
    ids=lambda words: " ".join(words[: 2 if words[0] == "fleet" else 1]),
)  # fmt: skip
def test_what_is_not_there_is_told_harmlessly(words: list[str]) -> None:
    said = typed(*words)
    assert SHOWN in said
    assert "Traceback" not in said
    assert_harmless(said)


@pytest.mark.slow
def test_files_and_classes_that_are_read(tmp_path: Path) -> None:
    for number, name in enumerate((f"cat{HOSTILE_FILE}", "dog")):
        (tmp_path / name).mkdir()
        Image.fromarray(np.full((8, 8), number, np.uint8)).save(tmp_path / name / "1.png")
        (tmp_path / name / f"{HOSTILE_FILE}.png").write_bytes(b"no image")
    said = typed("plan", "--data", tmp_path, "--shape", "1,8,8", "--epsilon", "2", "--devices", "8", "--images", "2")
    assert f"cat{SHOWN_FILE}/{SHOWN_FILE}.png: it is no whole image" in said
    assert_harmless(said)
