"""Connects a measured process with its benchmark: requests and answers are one line of JSON each.

Standard library only, because other frameworks run in separate environments.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).parents[1]
ANSWER_WITHIN_S = 900.0
END_WITHIN_S = 30.0
LOG_LINES = 12

Reply = dict[str, Any]


class ChildFailed(Exception):
    """A measured process ended, or did not answer in time; the text has the end of its log."""


def environment(root: Path = ROOT, **more: str) -> dict[str, str]:
    """Returns the environment of a measured process: one thread, and this or another checkout on the path."""
    path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    return {**os.environ, **one_thread, "PYTHONPATH": path, **more}


class ReadyProcess:
    """A process that has reported that it is ready; it and its children end with the context.

    `ready` is its report, and `start_s` the time until then. Raises `ChildFailed` if the process ends or is too slow.

    :param command: arguments of the interpreter.
    :param root: the checkout whose code it runs.
    """

    def __init__(
        self,
        *command: str,
        python: str = sys.executable,
        root: Path = ROOT,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  # closed with the context
        began = time.perf_counter()
        self._process = subprocess.Popen(
            [python, *command],
            env=environment(root, **(variables or {})),
            cwd=root,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,
        )
        try:
            self.ready = self._answer()
        except BaseException:
            self._end()
            raise
        self.start_s = time.perf_counter() - began

    def ask(self, *words: Any) -> Reply:
        with suppress(OSError):  # the process has ended; reading the answer then fails
            print(json.dumps(words), file=self._process.stdin, flush=True)
        return self._answer()

    def processor_s(self) -> float:
        """Returns the processor time that the process and all below it have used so far."""
        import psutil  # ours alone have it

        used_s, process = 0.0, psutil.Process(self._process.pid)
        for each in (process, *process.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                used_s += sum(each.cpu_times()[:4])  # user and system, its own and those of children that have ended
        return used_s

    def _answer(self) -> Reply:
        timer = threading.Timer(ANSWER_WITHIN_S, self._process.kill)
        timer.start()
        assert self._process.stdout is not None
        try:
            line = self._process.stdout.readline()
        finally:
            timer.cancel()  # otherwise an interrupted benchmark would wait for it
        if line:
            answer: Reply = json.loads(line)
            return answer
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_WITHIN_S)
        self._log.seek(0)
        lines = "\n  ".join(self._log.read().splitlines()[-LOG_LINES:])
        raise ChildFailed(f"exit code {self._process.poll()}; the end of its log:\n  {lines}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with suppress(subprocess.TimeoutExpired, OSError):
            self._process.communicate(timeout=END_WITHIN_S if kind is None else 0)  # without more requests, it ends
        with suppress(subprocess.TimeoutExpired):
            self._process.terminate()  # a launcher ends its child processes
            self._process.wait(END_WITHIN_S)
        self._end()

    def _end(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with suppress(OSError), self._process:  # closes its pipes, and waits for it
            pass
        self._log.close()


class Parent:
    """The child's side. Output of frameworks goes to the log; the process's stdout is for answers."""

    def __init__(self, ready: Reply) -> None:
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self.answer(ready)

    def next(self) -> list[Any] | None:
        """Returns the next request; None if there are no more."""
        line = sys.stdin.readline()
        return json.loads(line) if line else None

    def answer(self, answer: Reply) -> None:
        print(json.dumps(answer), file=self._answers, flush=True)

    def serve(self, handlers: Mapping[str, Callable[..., Reply]]) -> None:
        """Answers until there are no more requests."""
        while (words := self.next()) is not None:
            self.answer(handlers[words[0]](*words[1:]))


def versions(packages: Sequence[str]) -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for package in packages:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def memory_mib(what: str, pid: int | str = "self") -> float:
    """Returns `VmRSS`, a process's resident memory, or `VmHWM`, its peak; 0 for a process that has ended."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(f"{what}:"):
                return int(line.split()[1]) / 1024
    return 0.0
