"""The games that fit a task, each as a finding."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from hushfleet.aggregator.config.task import Task
from hushfleet.aggregator.publish.prepare import PreparedTask
from hushfleet.graphs.session import GradientGraph
from hushfleet.simulator.fleet import make_fleet
from hushfleet.simulator.studies.audit import device, record
from hushfleet.simulator.studies.audit.claims import Claim
from hushfleet.simulator.studies.audit.device import KeepGoing, Subject
from hushfleet.simulator.studies.audit.finding import Finding, one_run, two_worlds

SERVER = "server: update, header, report"
VALUES = "server: noised values alone"
GRADIENTS = "sees every noised gradient"
UPDATE = "server: update"
TWO_WORLDS = "two worlds, {}"
ONE_RUN = "one run, {} of {} rounds"

_LEAST_TRIALS = 60
_CANARIES = 256
_LEAST_WIDTH = 4
_GRADIENT_S = 5e-4  # of one record, about; a guess is enough to choose how many rounds one run has
_ONE_RUN_SHARE = 0.5  # of the time


@dataclass(frozen=True)
class Effort:
    """How much is played.

    :param trials: in each world.
    :param seconds: after which a game ends with the trials that it has; what is measured is then less, not wrong.
    """

    trials: int
    seconds: float = float("inf")


def subject_of(prepared: PreparedTask, *, seed: int, field_noise: bool = False) -> Subject:
    task: Task = prepared.task
    cohort = min(task.round.cohort_size or task.data.devices, task.data.devices)
    return Subject(prepared.spec, prepared.initial, cohort, seed, field_noise)


def device_findings(subject: Subject, effort: Effort, shown: KeepGoing = lambda done: True) -> Iterator[Finding]:
    """Of a task whose unit of privacy is the device: of all that is sent, and where raw values are, without them."""
    scores = device.play(subject, effort.trials, _until(effort, shown))
    claim, spec = Claim(scores.charge, 1, subject.spec.privacy.accountant), subject.spec
    common = {"rounds": spec.rounds, "delta": spec.privacy.delta, "unit": "device"}
    game = TWO_WORLDS.format("canary update")
    yield two_worlds(scores.everything, claim, adversary=SERVER, game=game, **common)
    if claim.of_noised_values != claim:
        yield two_worlds(scores.values, claim.of_noised_values, adversary=VALUES, game=game, **common)


def record_findings(subject: Subject, effort: Effort, shown: KeepGoing = lambda done: True) -> Iterator[Finding]:
    """Of a task whose unit is the record, by gradients and by updates."""
    scores = record.play(subject, effort.trials, _until(effort, shown))
    claim, spec = Claim(scores.charge, 1, subject.spec.privacy.accountant), subject.spec
    common = {"rounds": spec.rounds, "delta": spec.privacy.delta, "unit": "record"}
    game = TWO_WORLDS.format("canary records")
    yield two_worlds(scores.gradients, claim, adversary=GRADIENTS, game=game, **common)
    yield two_worlds(scores.update, claim, adversary=UPDATE, game=game, **common)


def one_run_finding(prepared: PreparedTask, subject: Subject, effort: Effort) -> Finding | None:
    """None without data in a simulation, and for a method that clips batches, where canaries would hide each other."""
    spec = subject.spec
    if prepared.dataset is None:
        return None
    samples = make_fleet(prepared.task, prepared.dataset).devices[0].train.samples
    canaries = min(_CANARIES, spec.model.layout.size // _LEAST_WIDTH)
    blobs, model = prepared.blobs, spec.model
    a_round_s = _GRADIENT_S * spec.privacy.batches * spec.privacy.sample_rate * (len(samples) + canaries / 2)
    rounds = max(1, min(spec.rounds, int(_ONE_RUN_SHARE * min(effort.seconds, 1e6) / a_round_s)))
    run = record.play_one_run(
        subject,
        samples,
        GradientGraph(blobs[model.gradient.digest], model.layout),
        prepared.inference,
        canaries=canaries,
        rounds=rounds,
    )
    if run is None:
        return None
    game = ONE_RUN.format(rounds, spec.rounds)
    claim = Claim(run.charge, 1, spec.privacy.accountant)
    return one_run(run, claim, delta=spec.privacy.delta, adversary=GRADIENTS, game=game)


def _until(effort: Effort, shown: KeepGoing) -> KeepGoing:
    ends = time.monotonic() + effort.seconds
    return lambda done: shown(done) and (time.monotonic() < ends or done < _LEAST_TRIALS)
