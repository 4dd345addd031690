"""`benchmarks/on_gpu.sh` without a GPU: no part stops another one, and it names what the project names."""

from __future__ import annotations

import json
import os
import subprocess
import tomllib
from pathlib import Path

import pytest

from benchmarks import gpu_stages
from hushfleet.simulator.engines.fast.vmap import jobs

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "on_gpu.sh"


def test_a_part_that_fails_stops_no_other_and_is_named(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$@"\ncase "$*" in *W2*) exit 0 ;; *) exit 3 ;; esac\n')
    python.chmod(0o755)
    variables = {"DEVICE": "cpu", "OWN": str(python), "PEERS": "none-such"}
    done = subprocess.run(
        [SCRIPT, str(tmp_path / "out")], env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    failed = [line.split()[0] for line in done.stdout.splitlines() if "FAILED: exit code 3" in line]
    assert failed == ["W3", "stages", "ResNet-18", "W1", "tests"], "and W2, which did not fail, ran between them"
    assert "no GPU: sizes are tiny, figures mean nothing" in done.stdout
    assert "--workloads W2 --device cpu" in done.stdout
    (tests,) = (line for line in done.stdout.splitlines() if line.startswith("-m pytest"))
    assert "tests/simulator/engines/fast/vmap " in f"{tests} ", "by the words in its conftest.py"
    assert "tests/aggregator/payloads/test_exact_sum.py" in tests


@pytest.mark.slow
def test_the_stages_of_a_round_are_shown_without_a_gpu_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for owner, attribute in gpu_stages.STAGES.values():
        monkeypatch.setattr(owner, attribute, getattr(owner, attribute))  # so that they are put back
    monkeypatch.setattr(jobs, "RELEASED_ON", jobs.RELEASED_ON)
    file = tmp_path / "stages.json"
    gpu_stages.main(["--clients", "3", "--samples", "4", "--rounds", "1", "--json", str(file)])
    found = {row["stage"]: row["host"] for row in json.loads(file.read_text())["stages"]}
    assert list(found) == [*gpu_stages.STAGES, "rest", "round"]
    assert all(found[name] > 0 for name in gpu_stages.STAGES), "each stage has the name of what does it"
    assert "release" in capsys.readouterr().out


def test_it_names_the_peers_of_the_project() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for peer in extras["peers"]:
        assert f'"{peer}"' in SCRIPT.read_text()
