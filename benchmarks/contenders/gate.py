"""How the benchmark and a contender talk: a command a line on stdin, an answer a line on stdout, all JSON.

The contenders of a run are all alive at the same time, and only one computes: the benchmark lets each run a few
rounds in turn, so that whatever else the machine does hits all alike. Standard library and NumPy only, since
contenders run under other interpreters too.

    benchmark: {"rounds": 3}         contender: {"round": 4, "seconds": 1.2, "samples": 60000}   three of these
    benchmark: {"save": "x.npy"}     contender: {"saved": "x.npy"}      the global model, float32 [d]
    benchmark: end of file           contender: ends
The contender's first line is {"ready": {"package": "version"}}.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np


class Gate:
    """Between two rounds: `open` waits until one may begin, `close` reports it.

    :param params: gives the global model as float32 `[d]`; called between rounds only.
    :param packages: whose versions the benchmark writes down; :param about: what else it should know.
    """

    def __init__(
        self, params: Callable[[], np.ndarray], packages: Sequence[str], about: Mapping[str, str] | None = None
    ) -> None:
        self._params = params
        # Frameworks print to stdout; what they say goes to the log, and stdout is for answers.
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self._about = _versions(packages) | dict(about or {})
        self._round, self._left, self._began = 0, 0, 0.0

    def open(self) -> bool:
        """Waits until a round may begin, and starts its clock; False when no more are wanted."""
        if self._round == 0:
            self._say({"ready": self._about})
        while self._left == 0:
            line = sys.stdin.readline()
            if not line:
                return False
            command = json.loads(line)
            if "save" in command:
                np.save(command["save"], self._params())
                self._say({"saved": command["save"]})
            else:
                self._left = int(command["rounds"])
        self._left -= 1
        self._round += 1
        self._began = time.perf_counter()
        return True

    def close(self, *, samples: int, **more: Any) -> None:
        """Reports the round. `samples` counts each sample once for every time that it was trained on."""
        seconds = time.perf_counter() - self._began
        self._say({"round": self._round, "seconds": seconds, "samples": samples, **more})

    def _say(self, answer: dict[str, Any]) -> None:
        print(json.dumps(answer), file=self._answers, flush=True)


def _versions(packages: Sequence[str]) -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found
