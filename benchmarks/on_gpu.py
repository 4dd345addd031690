"""Runs all tests and benchmarks that need a GPU, in parts, within eight minutes: `benchmarks/on_gpu.sh`.

    python3 -m benchmarks.on_gpu [--device cuda|cpu] [--short] [--out DIR] [--wheels DIR] [--python PYTHON]
                               [--budget SECONDS]

    environment   one for this project and one for pfl and Flower, in a temporary folder
    tests         every test that runs on the device
    W3, W2, W1    the fast engine against a plain PyTorch loop, pfl and Flower (benchmarks/simulation.py)
    networks      loss and gradient of many clients, in the ways of the runtime `vmap` (benchmarks/gpu_networks.py)
    profile       where the time of local training goes, and how busy the GPU is (benchmarks/gpu_profile.py)

Both environments see the packages of the Python that runs this script: an installed PyTorch with CUDA is kept. Missing
packages come from the wheels in --wheels, else from the package index; versions are not pinned by constraints.txt.

Each part has a share of the time, and its unused time goes to the next parts. A part that fails or takes too long does
not stop the others. DIR (by default $OUT, else runs/on-gpu) contains `on_gpu.json`, which states after each part what
failed and why, `log.txt`, and a file for each part, to which each row is written when it is ready. Standard library
only.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TextIO

from benchmarks.processes import ROOT

BUDGET_S = 460.0
"""The rest of the eight minutes is for starting and ending processes."""
END_WITHIN_S = 5.0
TEST_PACKAGES = ("hypothesis", "pytest", "pytest-timeout", "pytest-xdist")
PEERS = ("flwr[simulation]==1.42.0", "pfl[pytorch]==0.6.0")  # as the extra `peers` of pyproject.toml
TEST_WORDS = ("TORCH_DEVICES", "SUM_DEVICES", "torch.cuda")
"""A test file with one of these words, or with it in the conftest.py beside it, has CUDA tests; others are skipped."""
SHARES_S = {"environment": 85.0, "tests": 70.0, "W3": 65.0, "W2": 60.0, "W1": 90.0, "networks": 45.0, "profile": 45.0}


@dataclass(frozen=True)
class Machine:
    """The environment in which the parts run.

    :param work: the folder of the environments, which is removed at the end.
    """

    options: argparse.Namespace
    work: Path
    log: TextIO

    @property
    def out(self) -> Path:
        return Path(self.options.out)

    @property
    def python(self) -> str:
        return self.options.python or str(self.work / "own" / "bin" / "python")

    @property
    def peers_python(self) -> str:
        return self.options.peers_python or str(self.work / "peers" / "bin" / "python")

    def run(self, command: Sequence[str], limit_s: float) -> str | None:
        """Shows and logs a command's output; returns why it failed, or None. Its whole process group ends with it."""
        last = [""]

        def copy() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                last[0] = line.strip() or last[0]
                self.log.write(line)
                self.log.flush()
                print(line, end="", flush=True)

        environment = {**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", "PIP_NO_INPUT": "1"}
        self.log.write(f"$ {' '.join(command)}\n")
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        reader = threading.Thread(target=copy, daemon=True)
        reader.start()
        failure = None
        try:
            if code := process.wait(max(1.0, limit_s)):
                failure = f"exit code {code}"
        except subprocess.TimeoutExpired:
            failure = f"ended at its limit of {limit_s:.0f} s"
            process.terminate()  # benchmarks then end what they started
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_WITHIN_S)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        reader.join(END_WITHIN_S)
        return f"{failure}; its last line: {last[0]}" if failure else None


def make_environments(machine: Machine, limit_s: float) -> str | None:
    """Installs each step separately: this project without all its needs, or one of the peers, can still be measured."""
    ends = time.monotonic() + limit_s
    wheels = machine.options.wheels
    source = ["--no-index", "--find-links", str(wheels.absolute())] if wheels else []
    here: list[str] = []
    with suppress(PackageNotFoundError):  # building this project needs setuptools 77, and an index may not be reachable
        here = ["--no-build-isolation"] if int(version("setuptools").partition(".")[0]) >= 77 else []
    others = "\n".join(path for path in sys.path if path.endswith("-packages"))
    failures = []
    own = [[*here, "--no-deps", "-e", str(ROOT)], [*here, *TEST_PACKAGES, "-e", f"{ROOT}[benchmarks]"]]
    for name, steps in (("own", own), ("peers", [[peer] for peer in PEERS])):
        home = machine.work / name
        failure = machine.run([sys.executable, "-m", "venv", str(home)], ends - time.monotonic())
        for site in home.glob("lib/python*/site-packages"):
            (site / "others.pth").write_text(others)
        pip = [str(home / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *source]
        for step in steps if failure is None else ():
            if (wrong := machine.run([*pip, *step], ends - time.monotonic())) is not None:
                failures.append(f"{step[-1]}: {wrong}")
        failures += [f"{name}: {failure}"] if failure else []
    return "; ".join(failures) or None


def run_tests(machine: Machine, limit_s: float) -> str | None:
    files = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if _is_for_devices(path)]
    names = [str(path.relative_to(ROOT)) for path in files]
    options = ["-p", "no:cacheprovider", "-k", machine.options.device, f"--junit-xml={machine.out / 'tests.xml'}"]
    options += ["-n", "4"] if machine.options.device == "cuda" else ["-m", "not slow"]
    return machine.run([machine.python, "-m", "pytest", *options, "--timeout", "60", *names], limit_s)


def _is_for_devices(path: Path) -> bool:
    texts = [each.read_text("utf-8") for each in (path, path.with_name("conftest.py")) if each.exists()]
    return any(word in text for word in TEST_WORDS for text in texts)


def compare(name: str) -> Callable[[Machine, float], str | None]:
    def part(machine: Machine, limit_s: float) -> str | None:
        runtime = "vmap" if machine.options.device == "cuda" else "native"
        words = ["--workloads", name, "--device", machine.options.device, "--runtimes", runtime, "--turns", "3"]
        if machine.options.short:
            words += ["--shrink", "100", "--turns", "1", "--frameworks", "ours,plain,pfl,flower"]
        words += ["--peers-python", machine.peers_python, "--json", str(machine.out / f"{name}.json")]
        return machine.run([machine.python, "-m", "benchmarks.simulation", *words], limit_s)

    return part


def take_profile(machine: Machine, limit_s: float) -> str | None:
    words = ["--device", machine.options.device, "--json", str(machine.out / "profile.json")]
    if machine.options.short:
        words += ["--workloads", "W1", "--shrink", "300"]
    return machine.run([machine.python, "-m", "benchmarks.gpu_profile", *words], limit_s)


def time_networks(machine: Machine, limit_s: float) -> str | None:
    if machine.options.device == "cpu":
        return None  # only CUDA graphs and streams are measured
    words = ["--json", str(machine.out / "networks.json")]
    return machine.run([machine.python, "-m", "benchmarks.gpu_networks", *words], limit_s)


PARTS: dict[str, Callable[[Machine, float], str | None]] = {
    "environment": make_environments,
    "tests": run_tests,
    **{name: compare(name) for name in ("W3", "W2", "W1")},
    "networks": time_networks,
    "profile": take_profile,
}


def count_tests(file: Path) -> dict[str, int]:
    suites = list(ElementTree.parse(file).getroot().iter("testsuite"))
    return {
        kind: sum(int(suite.get(kind, 0)) for suite in suites) for kind in ("tests", "failures", "errors", "skipped")
    }


def run_parts(machine: Machine, parts: Sequence[str], budget_s: float = BUDGET_S) -> dict[str, Any]:
    """Returns the result of each part, and writes it to `on_gpu.json` after each one."""
    ends = time.monotonic() + budget_s
    settings = {"device": machine.options.device, "short": machine.options.short, "budget_s": budget_s}
    report: dict[str, Any] = {**settings, "gpu": gpu(), "parts": {}}
    all_shares_s = sum(SHARES_S[each] for each in parts)
    for number, name in enumerate(parts):
        later = sum(SHARES_S[each] for each in parts[number + 1 :]) / all_shares_s
        began = time.monotonic()
        limit_s = ends - began - later * budget_s
        try:
            failure = PARTS[name](machine, limit_s)
        except Exception as error:  # after any error, the other parts still run
            failure = f"{type(error).__name__}: {error}"
        found: dict[str, Any] = {"seconds": round(time.monotonic() - began, 1), "failure": failure}
        with suppress(OSError, ElementTree.ParseError):
            if name == "tests":
                found |= count_tests(machine.out / "tests.xml")
        report["parts"][name] = found
        print(f"{name}: {found['seconds']:.0f} s{f', FAILED: {failure}' if failure else ''}", flush=True)
        (machine.out / "on_gpu.json").write_text(json.dumps(report, indent=1) + "\n")
    return report


def gpu() -> str | None:
    """Returns name, driver, memory and power limit from `nvidia-smi`."""
    query = "--query-gpu=name,driver_version,memory.total,power.limit"
    with suppress(OSError, subprocess.SubprocessError):
        command = ["nvidia-smi", query, "--format=csv,noheader"]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    out = Path(os.environ.get("OUT", ROOT / "runs" / "on-gpu"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--short", action="store_true", help="tiny workloads: a rehearsal, whose figures say nothing")
    parser.add_argument("--out", type=Path, default=out, metavar="DIR")
    parser.add_argument("--wheels", type=Path, metavar="DIR", help="install from here alone; without it from the index")
    parser.add_argument("--python", metavar="PYTHON", help="interpreter of an environment that is there already")
    parser.add_argument("--peers-python", metavar="PYTHON", help="the same for pfl and Flower")
    parser.add_argument("--parts", type=lambda text: text.split(","), default=list(PARTS), metavar="NAME,...")
    parser.add_argument("--budget", type=float, default=BUDGET_S, metavar="SECONDS", help="for all parts together")
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.parts) - set(PARTS)):
        parser.error(f"--parts: {', '.join(unknown)}: choose among {', '.join(PARTS)}")
    if options.python:
        options.parts = [name for name in options.parts if name != "environment"]
    options.out = options.out.absolute()
    options.out.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="on-gpu-"))
    try:
        with (options.out / "log.txt").open("w") as log:
            report = run_parts(Machine(options, work, log), options.parts, options.budget)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return int(any(part["failure"] for part in report["parts"].values()))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # its child processes end with it
    sys.exit(main())
