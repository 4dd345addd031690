"""kill -9 at chosen points: a child plays something under a hook that counts every call, and kills itself at one.

Points are spread over the whole play, and each named one is among them, before and after it. Code that moves keeps its
points, since whole packages are watched; code that no longer does what a name says makes the test fail.
"""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from hushfleet.data.samples import Samples

ROOT = Path(__file__).resolve().parents[2]
CALL = "call"


def gradient(params: np.ndarray, x: np.ndarray, y: np.ndarray, dropout: Any = (), out: Any = None, **_: Any) -> Any:
    out[...] = params - 1
    return 0.5, out


NETWORK: Mapping[str, Any] = {
    "gradient": gradient,
    "logits_of": lambda params, x: np.zeros((len(x), 2), np.float32),
    "samples": lambda: Samples(np.zeros((8, 1, 2, 2), np.uint8), np.zeros(8, np.int64), (0.0,), (1.0,)),
}
"""What a `Trainer` takes of a network with two classes and of eight images."""

Label = Sequence[Any]
"""Event, what is called, and the functions that the call is inside of, the innermost first."""


def forked(work: Callable[[], Any], result: Path) -> int:
    """Runs `work` in a child and leaves what it returns in a file; the child's exit status."""
    result.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        gc.freeze()  # what earlier tests left must not be collected here: sessions wait for threads that a fork has not
        status = 1
        try:
            result.write_text(json.dumps(work()))
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


class KillPoints:
    """:param packages: folders, and files, whose calls are counted.
    :param named: what is called (a function in C, or `CALL` for the innermost function itself), and inside of which
        functions, the innermost first; others may be between them.
    """

    def __init__(self, packages: Sequence[str], named: Mapping[str, tuple[str, tuple[str, ...]]]) -> None:
        self._watched = tuple(f"{ROOT / each}" + os.sep * (not each.endswith(".py")) for each in packages)
        self._named = named
        self._shown = {what for what, _ in named.values()}

    def labels(self, play: Callable[[], Any], result: Path) -> list[Label]:
        """Of all points, in a child that is not killed."""
        assert forked(lambda: self._counted(play, -1), result) == 0
        labels: list[Label] = json.loads(result.read_text())
        return labels

    def kill(self, play: Callable[[], Any], point: int, result: Path) -> None:
        """Plays in a child until the point."""
        assert forked(lambda: self._counted(play, point), result) == -signal.SIGKILL

    def chosen(self, labels: Sequence[Label], *, spread: int, start: int = 0) -> dict[int, str]:
        """Points to kill at, and what they are: of each name one of its places before and one after."""
        rng = random.Random("kill")
        points = {start + i * (len(labels) - start) // spread: "" for i in range(spread)}
        for name, (what, functions) in self._named.items():
            for events in (("call", "c_call"), ("return", "c_return")):
                found = [
                    place
                    for place, (event, called, chain) in enumerate(labels[start:], start)
                    if event in events and called == what and _is_inside(chain, functions)
                ]
                assert found, f"{name}: no such point is left; where has the code moved?"
                points[rng.choice(found)] = f"{events[0]} {name}"
        return dict(sorted(points.items()))

    def _counted(self, play: Callable[[], Any], kill_at: int) -> list[Label]:
        labels: list[Label] = []

        def hook(frame: FrameType, event: str, argument: Any) -> None:
            if not frame.f_code.co_filename.startswith(self._watched):
                return
            name = getattr(argument, "__name__", "") if event.startswith("c_") else CALL
            labels.append((event, name, _chain(frame) if name in self._shown else ()))
            if len(labels) - 1 == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.setprofile(hook)
        play()
        sys.setprofile(None)
        return labels


def _chain(frame: FrameType | None) -> list[str]:
    functions = []
    while frame is not None and frame.f_code.co_name != "_counted":
        functions.append(frame.f_code.co_qualname)
        frame = frame.f_back
    return functions


def _is_inside(chain: Sequence[str], functions: Sequence[str]) -> bool:
    at = iter(chain)
    return _is_called(chain[0], functions[0]) and all(
        any(_is_called(found, function) for found in at) for function in functions
    )


def _is_called(qualified: str, function: str) -> bool:
    return qualified == function or qualified.endswith("." + function)
