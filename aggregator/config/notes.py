"""Lines that a run says at its start, where a task's epsilon is not what boards are promised."""

from __future__ import annotations

from hushfleet.aggregator.config.task import Task
from hushfleet.privacy.terms import AS_PUBLISHED


def notes_of(task: Task) -> list[str]:
    """Returns the lines for this task; none where its epsilon is the promise."""
    published = [AS_PUBLISHED] if task.privacy.accounting == "as-published" else []
    epsilon = task.privacy.epsilon
    if epsilon is None or not task.parts().server.lowers_noise:
        return published
    return [
        *published,
        f"privacy.epsilon = {epsilon:g} is what all rounds cost at the first noise. method.name = "
        f"{task.method.name!r} lowers it as training goes on, so more may be spent, up to the limits of the boards "
        "(in a simulation privacy.budget)",
    ]
