"""How the benchmark speaks with a process that it measures: a line of JSON each way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ROOT = Path(__file__).parents[2]
Answer = dict[str, Any]


def one_thread() -> dict[str, str]:
    """The environment of every measured process."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": path}


class Child:
    """A fresh process, `python -m MODULE ARGUMENTS`, that has said that it is ready.

    :raises RuntimeError: it ended.
    """

    def __init__(self, module: str, arguments: Sequence[str]) -> None:
        self._module = module
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  # what the client says, shown if it ends
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            env=one_thread(),
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self.ready = self._answer()

    def ask(self, what: str, *words: Any) -> Answer:
        print(json.dumps([what, *words]), file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> Answer:
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            self._log.seek(0)
            raise RuntimeError(f"{self._module} ended with exit code {code}:\n{self._log.read()[-2000:]}")
        return json.loads(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        with suppress(OSError):
            self._process.stdin.close()
        if kind is not None:
            self._process.kill()
        self._process.wait()
        self._process.stdout.close()
        self._log.close()


def serve(ready: Answer, handlers: dict[str, Callable[..., Answer]]) -> None:
    """A child's side: says that it is ready, then answers until nothing more is asked."""
    print(json.dumps(ready), flush=True)
    for line in sys.stdin:
        what, *words = json.loads(line)
        print(json.dumps(handlers[what](*words)), flush=True)


def peak_mib() -> float:
    """The most memory that this process ever had resident (VmHWM), MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1024


def age_s() -> float:
    """Seconds since this process was started, to a hundredth."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
