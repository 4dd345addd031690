"""The games that fit a task, each as a finding."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from hushfleet.aggregator.publish.prepare import PreparedTask
from hushfleet.simulator.studies.audit import device, record
from hushfleet.simulator.studies.audit.claims import Claim
from hushfleet.simulator.studies.audit.finding import Finding, two_worlds
from hushfleet.simulator.studies.audit.subject import KeepGoing, Subject

_LEAST_TRIALS = 60


@dataclass(frozen=True)
class Effort:
    """How much is played.

    :param trials: in each world.
    :param seconds: after which a game ends with the trials that it has; what is measured is then less, not wrong.
    """

    trials: int
    seconds: float = float("inf")


def subject_of(prepared: PreparedTask, *, seed: int, field_noise: bool = False) -> Subject:
    task = prepared.task
    cohort = min(task.round.cohort_size or task.data.devices, task.data.devices)
    return Subject(prepared.spec, prepared.initial, cohort, seed, field_noise)


def findings(subject: Subject, effort: Effort, shown: KeepGoing = lambda done: True) -> Iterator[Finding]:
    """Of the game of two worlds for the task's unit of privacy, one for each adversary."""
    ends = time.monotonic() + effort.seconds

    def keep_going(done: int) -> bool:
        return shown(done) and (time.monotonic() < ends or done < _LEAST_TRIALS)

    spec, claim = subject.spec, Claim(subject.charge, accountant=subject.spec.privacy.accountant)
    of_device = spec.privacy.unit == "device"
    scores = (device if of_device else record).play(subject, effort.trials, keep_going)
    for adversary, those in scores.items():
        of = claim.of_noised_values if adversary == device.VALUES else claim
        if adversary != device.VALUES or of != claim:
            game = f"two worlds, canary {'update' if of_device else 'records'}"
            yield two_worlds(those, of, rounds=spec.rounds, delta=spec.privacy.delta, adversary=adversary, game=game)
