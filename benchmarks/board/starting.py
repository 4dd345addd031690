"""How long a client's imports take, in fresh processes, and what they are made of."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass
from resource import RUSAGE_CHILDREN, getrusage
from typing import Any

from benchmarks.board.talk import ROOT, one_thread

# What `hushfleet.edge_client.__main__` imports before it runs a device.
_CLIENT = (
    "import hushfleet.edge_client.__main__, hushfleet.edge_client.agent, hushfleet.edge_client.board.pacing, "
    "hushfleet.edge_client.board.process, hushfleet.wire.link.mqtt"
)
IMPORTS = {"python alone": "pass", "the client": _CLIENT, "numpy": "import numpy", "torch": "import torch"}
_LINE = re.compile(r"import time:\s+(\d+) \|\s+\d+ \|\s+(\S+)")
_SHOWN = 8


@dataclass(frozen=True)
class Started:
    """The quickest of some fresh processes, seconds."""

    wall_s: float
    cpu_s: float


def measure_imports(*, turns: int) -> dict[str, Any]:
    """Each import in `turns` fresh processes, in turns; files are in the system's cache after the first."""
    runs: dict[str, list[Started]] = {name: [] for name in IMPORTS}
    for _ in range(turns):
        for name, code in IMPORTS.items():
            runs[name].append(_run(code))
    quickest = {
        name: Started(min(run.wall_s for run in each), min(run.cpu_s for run in each)) for name, each in runs.items()
    }
    return {"imports": {name: asdict(each) for name, each in quickest.items()}, "packages_ms": _packages()}


def _run(code: str) -> Started:
    before, began = getrusage(RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, "-c", code], env=one_thread(), cwd=ROOT, check=True)
    wall, after = time.perf_counter() - began, getrusage(RUSAGE_CHILDREN)
    return Started(wall, after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)


def _packages() -> dict[str, float]:
    """Milliseconds of each package's own modules in the client's imports, the largest first."""
    command = [sys.executable, "-X", "importtime", "-c", _CLIENT]
    done = subprocess.run(command, env=one_thread(), cwd=ROOT, check=True, stderr=subprocess.PIPE, text=True)
    own: Counter[str] = Counter()
    for line in done.stderr.splitlines():
        found = _LINE.match(line)
        if found:
            package = found[2].partition(".")[0]
            own["standard library" if package.lstrip("_") in _STANDARD else package] += int(found[1]) / 1000
    return dict(own.most_common(_SHOWN))


_STANDARD = {name.lstrip("_") for name in sys.stdlib_module_names}
