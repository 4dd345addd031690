"""Plays the games that fit a task, and returns each as a finding."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hushfleet.aggregator.config.task import Task
from hushfleet.aggregator.payloads.prepare import PreparedTask
from hushfleet.aggregator.results.events import EventLog
from hushfleet.simulator.engines.fast.engine import run_rounds
from hushfleet.simulator.engines.fast.workers import Workers
from hushfleet.simulator.run_folder import begin
from hushfleet.simulator.studies.audit.finding import Finding, two_worlds
from hushfleet.simulator.studies.audit.game import KeepGoing
from hushfleet.simulator.studies.audit.record import RecordGame
from hushfleet.simulator.studies.audit.subject import Subject
from hushfleet.simulator.studies.audit.updates import VALUES, UpdateGame
from hushfleet.wire.format.messages import RoundPlan

_LEAST_TRIALS = 60


@dataclass(frozen=True)
class Effort:
    """Limits on the size of a game.

    :param trials: trials in each world.
    :param seconds: time after which a game ends with the trials that it has; the bound is then lower, but not wrong.
    """

    trials: int
    seconds: float = float("inf")


def subject_of(
    prepared: PreparedTask, *, seed: int, field_noise: bool = False, data_dir: Path | None = None
) -> Subject:
    """Returns the audited device. If the method lowers its noise as training goes on, the task is simulated first.

    :param data_dir: folder with the files of the data set.
    """
    task = prepared.task
    cohort = min(task.round.cohort_size or task.data.devices, task.data.devices)
    follows = prepared.method.server.lowers_noise and prepared.spec.training_rounds > 0
    return Subject(
        prepared.spec,
        prepared.initial,
        cohort,
        seed,
        field_noise,
        fleet=task.data.devices,
        simulated=simulated_controls(task, data_dir=data_dir) if follows else {},
    )


def simulated_controls(task: Task, *, data_dir: Path | None) -> dict[int, Mapping[str, float]]:
    """Simulates the task to its last round, for devices without a budget; returns the controls of each round's plan.

    Raises `BadInput` for a task without data.
    """
    task = replace(task, privacy=replace(task.privacy, budget=math.inf), round=replace(task.round, patience=0))
    controls: dict[int, Mapping[str, float]] = {}

    def note(plan: RoundPlan) -> None:
        controls[plan.round] = plan.controls

    with tempfile.TemporaryDirectory(prefix="audit-") as folder, Workers() as workers:
        simulation = begin(task, Path(folder) / "run", data_dir=data_dir)
        with EventLog(simulation.folder.events) as events:
            every = task.round.rounds + 1
            run_rounds(simulation, workers, events, evaluate_every=every, evaluate_last=0, on_opened=note)
    return controls


def findings(subject: Subject, effort: Effort, shown: KeepGoing = lambda done: True) -> Iterator[Finding]:
    """Plays the game of two worlds with the rounds that train, then with those that ask; yields a finding for each
    adversary.

    :param shown: called with the number of finished trials of both games.
    """
    for number, (rounds, asks) in enumerate(games_of(subject)):
        yield from _findings(subject, rounds, asks, effort, shown, before=number * effort.trials)


def games_of(subject: Subject) -> list[tuple[Sequence[int], bool]]:
    """Returns the rounds of each game, and whether they ask."""
    return [(rounds, asks) for rounds, asks in ((subject.training, False), (subject.asking, True)) if rounds]


def _findings(
    subject: Subject, rounds: Sequence[int], asks: bool, effort: Effort, shown: KeepGoing, *, before: int
) -> Iterator[Finding]:
    """:param before: trials of earlier games."""
    ends = time.monotonic() + effort.seconds

    def keep_going(done: int) -> bool:
        return shown(before + done) and (time.monotonic() < ends or done < _LEAST_TRIALS)

    privacy, claim = subject.rules(rounds[0]).spec.privacy, subject.claim(rounds)
    of_device, summed = privacy.unit == "device", privacy.secure is not None
    game = (UpdateGame if summed or of_device else RecordGame)(subject, rounds)
    canary = "answer" if asks else "update" if of_device else "record" if summed else "records"
    for adversary, scores in game.play(effort.trials, keep_going).items():
        of = claim.of_noised_values if adversary == VALUES else claim
        if adversary != VALUES or of != claim:
            how = f"two worlds, canary {canary}"
            yield two_worlds(scores, of, delta=privacy.delta, adversary=adversary, game=how, asks=asks)
