"""Who takes part: the command line and environment of each contender, or why it cannot."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from benchmarks.contenders.ours import AUTO
from benchmarks.machine import cores
from hushfleet.simulator.engines.fast.runtimes import unavailable

ROOT = Path(__file__).parents[2]
FAMILIES = ("ours", "plain", "pfl", "flower")
PLAIN = "plain loop, 1 process"
PEER_PACKAGES = {"pfl": ("pfl", "torch"), "flower": ("flwr", "ray", "torch")}

KEEP_FREED_MEMORY = {
    # The largest threshold that every glibc accepts; older ones ignore a larger one.
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(4 << 30),
    "MALLOC_TOP_PAD_": str(64 << 20),
}
"""glibc gives large blocks back to the system at once by default, and every step pays for them in page faults."""


@dataclass(frozen=True)
class Contender:
    """:param arguments: after the interpreter; `{job}` and `{folder}` (its own, new) are filled in.
    :param missing: why it does not take part.
    """

    label: str
    family: Literal["ours", "plain", "pfl", "flower", "ceiling"]
    python: str = sys.executable
    arguments: tuple[str, ...] = ()
    missing: str | None = None
    environment: dict[str, str] = field(default_factory=dict, hash=False)

    def command(self, job: Path, folder: Path) -> list[str]:
        places = {"{job}": str(job), "{folder}": str(folder)}
        return [self.python, *(places.get(part, part) for part in self.arguments)]


@dataclass(frozen=True)
class Field:
    """What was asked for on the command line.

    :param ours: runtimes of our engine; :param plain_malloc: leave the allocator as it is.
    """

    families: tuple[str, ...]
    ours: tuple[str, ...]
    peers_python: str
    data_dir: Path
    device: Literal["cpu", "cuda"]
    plain_malloc: bool

    def contenders(self, network: str) -> list[Contender]:
        """All families that were asked for, and the ceiling. What cannot run is there with its reason."""
        processes = sorted({1, cores()}) if self.device == "cpu" else [1]
        found: list[Contender] = []
        if "ours" in self.families:
            # On a GPU as well: one process trains there, and those of the other cores noise and encode.
            found += [self._ours(runtime, cores(), network) for runtime in self.ours]
        if "plain" in self.families:
            found += [self._plain(count) for count in processes]
        if "pfl" in self.families:
            found += [self._pfl(count) for count in processes]
        if "flower" in self.families:
            found += [self._flower(count) for count in (processes if self.device == "cpu" else [1, 2])]
        return [*found, self._contender("matrix products", "ceiling", "product", str(cores()))]

    def _ours(self, runtime: str, processes: int, network: str) -> Contender:
        words = (runtime, str(processes), "{folder}", str(self.data_dir))
        contender = self._contender(f"ours, {runtime}, {counted(processes)}", "ours", "ours", *words)
        return contender if runtime == AUTO else replace(contender, missing=unavailable(runtime, network))

    def _plain(self, processes: int) -> Contender:
        return self._contender(f"plain loop, {counted(processes)}", "plain", "plain", str(processes))

    def _pfl(self, processes: int) -> Contender:
        launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}")
        before = launcher if processes > 1 else ()
        return self._contender(f"pfl, {counted(processes)}", "pfl", "pfl_peer", before=before)

    def _flower(self, actors: int) -> Contender:
        return self._contender(f"Flower, {counted(actors, 'actor')}", "flower", "flower_peer", str(actors))

    def _contender(self, label: str, family: str, module: str, *words: str, before: Sequence[str] = ()) -> Contender:
        peer = PEER_PACKAGES.get(family)
        return Contender(
            label=label,
            family=family,  # type: ignore[arg-type]
            python=self.peers_python if peer else sys.executable,
            arguments=(*before, "-m", f"benchmarks.contenders.{module}", "{job}", *words),
            missing=_not_installed(self.peers_python, peer) if peer else None,
            environment=self._environment(),
        )

    def _environment(self) -> dict[str, str]:
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        own = {
            "PYTHONPATH": path,
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "PFL_PYTORCH_DEVICE": self.device,
            "FLWR_TELEMETRY_ENABLED": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        if self.device == "cpu":
            own["CUDA_VISIBLE_DEVICES"] = ""
        return own | ({} if self.plain_malloc else KEEP_FREED_MEMORY)


def counted(count: int, what: str = "process") -> str:
    if count == 1:
        return f"1 {what}"
    return f"{count} {what}{'es' if what.endswith('s') else 's'}"


_CHECK = """
import importlib.metadata as m, json, sys
def version(name):
    try: return m.version(name)
    except m.PackageNotFoundError: return None
print(json.dumps({name: version(name) for name in sys.argv[1:]}))
"""


@functools.cache
def _not_installed(python: str, packages: tuple[str, ...]) -> str | None:
    try:
        done = subprocess.run([python, "-c", _CHECK, *packages], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"not installed: {python} does not run ({type(error).__name__})"
    absent = [name for name, version in json.loads(done.stdout).items() if version is None]
    return f"not installed: no {', '.join(absent)} for {python}" if absent else None
