"""`benchmarks/on_gpu.sh` without a GPU: parts that fail or take too long, and a tiny rehearsal of each."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_profile, on_gpu
from benchmarks.frameworks.workload import WORKLOADS, Workload

ROOT = Path(__file__).resolve().parents[2]
TINY = Workload("W1", 4, 20, 3, 10, 1, "adam", 1e-3)


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[on_gpu.Machine]:
    options = argparse.Namespace(
        device="cpu", short=True, out=tmp_path, wheels=None, python=sys.executable, peers_python="none-such"
    )
    with (tmp_path / "log.txt").open("w") as log:
        yield on_gpu.Machine(options, tmp_path / "work", log)


def python_part(code: str) -> Callable[[on_gpu.Machine, float], str | None]:
    return lambda machine, limit_s: machine.run([machine.python, "-c", code], limit_s)


def test_a_part_that_fails_or_hangs_stops_no_other_and_is_named(
    machine: on_gpu.Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hangs = "import subprocess, sys; print('row', flush=True); subprocess.run(['sleep', '1000'])"
    parts = {
        "tests": python_part("print('out of paper'); raise SystemExit(3)"),
        "W3": python_part(hangs),
        "W2": lambda machine, limit_s: machine.run(["none-such"], limit_s),
        "W1": python_part("pass"),
    }
    monkeypatch.setattr(on_gpu, "PARTS", parts)
    monkeypatch.setattr(on_gpu, "SHARES_S", {"tests": 1.0, "W3": 1.0, "W2": 20.0, "W1": 20.0})
    found = on_gpu.run_parts(machine, list(parts), budget_s=42.0)["parts"]
    assert json.loads((tmp_path / "on_gpu.json").read_text())["parts"] == found
    assert found["tests"]["failure"] == "exit code 3; its last line: out of paper"
    assert "ended at its limit of" in found["W3"]["failure"]
    assert found["W3"]["failure"].endswith("its last line: row")
    assert "none-such" in found["W2"]["failure"]
    assert found["W1"]["failure"] is None
    assert "out of paper" in (tmp_path / "log.txt").read_text()


def test_the_limits_leave_each_later_part_its_share(machine: on_gpu.Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []

    def part(_: on_gpu.Machine, limit_s: float) -> None:
        limits.append(limit_s)

    names = list(on_gpu.PARTS)
    monkeypatch.setattr(on_gpu, "PARTS", dict.fromkeys(names, part))
    clock = iter(range(0, 10_000, 1))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))
    on_gpu.run_parts(machine, names)
    assert sum(on_gpu.SHARES_S.values()) <= on_gpu.BUDGET_S < 480 - 2 * on_gpu.END_WITHIN_S
    assert limits[0] == on_gpu.SHARES_S["environment"] - 1
    assert limits == sorted(limits), "what a part leaves goes to the next"
    assert limits[-1] < on_gpu.BUDGET_S


def test_it_names_the_peers_and_the_tests_of_the_project() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert list(on_gpu.PEERS) == extras["peers"]
    files = [path.name for path in sorted((ROOT / "tests").rglob("test_*.py")) if on_gpu._is_for_devices(path)]
    assert {"test_cuda.py", "test_exact_sum.py", "test_every_method.py"} <= set(files)
    assert len(files) < 20


def test_an_environment_that_cannot_be_made_is_told_package_by_package(machine: on_gpu.Machine, tmp_path: Path) -> None:
    (tmp_path / "wheels").mkdir()
    machine.options.wheels, machine.options.python, machine.options.peers_python = tmp_path / "wheels", None, None
    failure = on_gpu.PARTS["environment"](machine, 120.0)
    assert failure is not None
    assert "pfl[pytorch]==0.6.0: exit code 1" in failure
    assert f"{on_gpu.PEERS[0]}: exit code 1" in failure
    others = next((tmp_path / "work" / "own").glob("lib/python*/site-packages/others.pth")).read_text().splitlines()
    assert others == [path for path in sys.path if path.endswith("-packages")]


@pytest.mark.slow
def test_a_rehearsal_compares_and_counts_tests(machine: on_gpu.Machine, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(on_gpu, "_is_for_devices", lambda path: path.name == "test_exact_sum.py")
    found = on_gpu.run_parts(machine, ["tests", "W1"])["parts"]
    assert found["tests"]["failure"] is None, (tmp_path / "log.txt").read_text()
    assert found["tests"]["tests"] > 3
    assert found["tests"]["errors"] == found["tests"]["failures"] == 0
    assert found["W1"]["failure"] is None, (tmp_path / "log.txt").read_text()
    rows = {row["family"]: row for row in json.loads((tmp_path / "W1.json").read_text())["workloads"][0]["frameworks"]}
    assert rows["ours"]["rate"] > 0
    assert rows["plain"]["rate"] > 0
    assert rows["pfl"]["failure"]
    assert rows["flower"]["failure"]


def test_the_profile_of_a_tiny_cohort(monkeypatch: pytest.MonkeyPatch, figures_of: Callable[..., Any]) -> None:
    monkeypatch.setitem(WORKLOADS, "W1", TINY)
    monkeypatch.setattr(gpu_profile, "LEAST_S", 0.0)
    (found,) = figures_of(gpu_profile.main, "--device cpu --workloads W1")["workloads"]
    assert found["samples_per_s"] == pytest.approx(60 / found["round_s"])
    assert found["kernels_s"] > 0
    assert found["largest"][0]["seconds"] == max(each["seconds"] for each in found["largest"])
    assert any("conv" in each["kernel"] for each in found["largest"])


def test_the_command_is_one_line(tmp_path: Path) -> None:
    command = [str(ROOT / "benchmarks" / "on_gpu.sh"), "--device", "cpu", "--parts", "nothing"]
    done = subprocess.run(
        command, env={**os.environ, "PYTHON": sys.executable}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "choose among environment, tests, W3, W2, W1, networks, profile" in done.stderr
