"""The contest: all contenders alive at the same time, one computing, turn after turn."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch

from benchmarks.contenders.job import Job
from benchmarks.contenders.network import first_model, set_vector
from benchmarks.versus.field import ROOT, Contender

ANSWER_WITHIN_S = 900.0
END_WITHIN_S = 30.0
LOG_LINES = 12


class ContenderFailed(Exception):
    """It ended, did not answer or did other work than was asked for; the text has the end of its log."""


@dataclass
class Record:
    """What was measured of a contender.

    :param rates: one for each turn: samples a second, or GFLOP/s of the ceiling.
    :param rounds: the answers, each with `round`, `seconds`, `samples`; the first is the warm-up.
    :param accuracy: of the global model in the check, in 0..1; None where there was none.
    """

    contender: Contender
    versions: dict[str, str] = field(default_factory=dict)
    rates: list[float] = field(default_factory=list)
    rounds: list[dict[str, Any]] = field(default_factory=list)
    accuracy: float | None = None
    failure: str | None = None

    @property
    def rate(self) -> float | None:
        """The median of the turns; of the ceiling the best, since a limit is what the machine can do at most."""
        if not self.rates or self.failure is not None:
            return None
        return max(self.rates) if self.contender.family == "ceiling" else statistics.median(self.rates)


class Child:
    """A contender's process; see `benchmarks.contenders.gate` for what is said.

    Ends the process and what it started when the context is left.
    """

    def __init__(self, contender: Contender, job: Job, folder: Path) -> None:
        self._name = contender.label
        self._expected = 0 if contender.family == "ceiling" else job.samples_per_round
        folder.mkdir(parents=True)
        self._log = folder / "log.txt"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                contender.command(Path(job.folder) / "job.json", folder / "run"),
                env=os.environ | contender.environment,
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )

    def versions(self) -> dict[str, str]:
        return self._answer()["ready"]

    def rounds(self, count: int) -> list[dict[str, Any]]:
        self._say({"rounds": count})
        answers = [self._answer() for _ in range(count)]
        for answer in answers:
            if answer["samples"] != self._expected:
                raise ContenderFailed(
                    f"{self._name} trained on {answer['samples']} samples in round {answer['round']}, not on "
                    f"{self._expected}{self._end_of_log()}"
                )
        return answers

    def global_model(self) -> np.ndarray:
        path = self._log.with_name("model.npy")
        self._say({"save": str(path)})
        self._answer()
        return np.load(path)

    def _say(self, command: dict[str, Any]) -> None:
        try:
            print(json.dumps(command), file=self._process.stdin, flush=True)
        except OSError as error:
            raise self._ended() from error

    def _answer(self) -> dict[str, Any]:
        timer = threading.Timer(ANSWER_WITHIN_S, self._process.kill)
        timer.start()
        try:
            line = self._process.stdout.readline()
        finally:
            timer.cancel()
        if not line:
            raise self._ended()
        return json.loads(line)

    def _ended(self) -> ContenderFailed:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_WITHIN_S)
        return ContenderFailed(f"{self._name} ended with exit code {self._process.poll()}{self._end_of_log()}")

    def _end_of_log(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()[-LOG_LINES:]
        return "; the end of its log:\n  " + "\n  ".join(lines)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        with suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(END_WITHIN_S if kind is None else 0)
        except subprocess.TimeoutExpired:
            self._process.terminate()  # a launcher ends what it launched
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(END_WITHIN_S)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process.stdout.close()


OnStep = Callable[[str, str], None]
"""Called with a contender's label and what it does, before it does it."""


def measure(
    job: Job, contenders: Sequence[Contender], *, turns: int, turn_rounds: int, on_step: OnStep
) -> list[Record]:
    """Each contender's warm-up round, then `turns` turns of `turn_rounds` rounds, in another order each time."""
    records = [Record(contender, failure=contender.missing) for contender in contenders]
    with ExitStack() as stack:
        children: list[tuple[Record, Child]] = []
        for record in records:
            if record.failure:
                continue
            on_step(record.contender.label, "starts")
            child = stack.enter_context(Child(record.contender, job, _folder_of(job, record)))
            children.append((record, child))
            with _Noting(record):
                record.versions = child.versions()
                record.rounds += child.rounds(1)
        for turn in range(turns):
            first = turn % len(children)
            for record, child in children[first:] + children[:first]:
                if record.failure is None:
                    on_step(record.contender.label, f"turn {turn + 1} of {turns}")
                    with _Noting(record):
                        answers = child.rounds(1 if record.contender.family == "ceiling" else turn_rounds)
                        record.rounds += answers
                        record.rates.append(_rate(answers))
    return records


def check(job: Job, records: Sequence[Record], *, rounds: int, on_step: OnStep) -> float:
    """Trains without noise, and notes each contender's accuracy on the job's test images.

    :return: the accuracy of the first global model.
    """
    for record in records:
        if record.failure or record.contender.family == "ceiling":
            continue
        on_step(record.contender.label, f"learns for {rounds} rounds")
        with _Noting(record), Child(record.contender, job, _folder_of(job, record)) as child:
            child.versions()
            child.rounds(rounds)
            record.accuracy = accuracy(job, child.global_model())
    return accuracy(job, job.array("initial"))


@torch.no_grad()
def accuracy(job: Job, params: np.ndarray) -> float:
    """Of the flat global model `params` on the test images, in 0..1."""
    module = first_model(job).cpu()
    set_vector(module, params)
    x, y = torch.from_numpy(job.array("test_x")), torch.from_numpy(job.array("test_y"))
    return (module(x).argmax(1) == y).float().mean().item()


def _rate(answers: Sequence[dict[str, Any]]) -> float:
    if "gflop_s" in answers[0]:
        return statistics.median(answer["gflop_s"] for answer in answers)
    return sum(answer["samples"] for answer in answers) / sum(answer["seconds"] for answer in answers)


def _folder_of(job: Job, record: Record) -> Path:
    return Path(job.folder) / "contenders" / "".join(c if c.isalnum() else "-" for c in record.contender.label)


class _Noting:
    """A contender that fails is written down and left out; the others go on."""

    def __init__(self, record: Record) -> None:
        self._record = record

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> bool:
        if isinstance(error, ContenderFailed):
            self._record.failure = str(error)
        return isinstance(error, ContenderFailed)
