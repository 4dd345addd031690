"""How much a task computes: what rates and estimates of time are made of."""

from __future__ import annotations

from hushfleet.aggregator.config.task import Task


def samples_a_round(task: Task, share: float) -> float:
    """Samples that a device trains on in a round, epochs counted.

    :param share: training samples of the device.
    """
    config = task.method.config()
    if not config.local_steps:
        return config.local_epochs * share
    drawn = task.privacy.sample_rate * share if task.privacy.sample_rate else config.batch_size
    return config.local_steps * min(drawn, share)


def work_of(task: Task, *, train: float, test: float, own: float, evaluate_last: int) -> tuple[float, float]:
    """Samples that are trained on, and images that models are tested on, in the whole run.

    :param train: training samples of a device; :param test: common test images; :param own: a device's own ones.
    """
    devices, rounds = task.data.devices, task.round.rounds
    cohort = min(task.round.cohort_size or devices, devices)
    tested = min(evaluate_last, rounds) * cohort * (test + own) + rounds * test
    return rounds * cohort * samples_a_round(task, train), tested
