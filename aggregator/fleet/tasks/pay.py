"""Says whether a fleet pays, for the boards that it has and the images that they told."""

from __future__ import annotations

from contextlib import suppress

from hushfleet.aggregator.config.task import Task
from hushfleet.aggregator.fleet.trust.folder import FleetFolder
from hushfleet.aggregator.fleet.trust.registry import boards_of
from hushfleet.aggregator.planning.advice import ImagesBy
from hushfleet.aggregator.planning.pay import PayAnswer, pay
from hushfleet.aggregator.results.answers import EvaluationRow
from hushfleet.aggregator.results.result import Result
from hushfleet.errors import BadInput

_MOST_ERROR = 0.3  # of the number of images, with which a noised count is still better than a guess


def pay_of_fleet(
    task: Task,
    folder: FleetFolder,
    *,
    boards: int | None = None,
    evaluation: EvaluationRow | None = None,
    lasts_s: float | None = None,
) -> PayAnswer | None:
    """Answers for the fleet as it is; None if nothing like the task was measured. Raises `StoreError`.

    :param boards: number of boards that are enrolled; None: the registry is read. Without boards the task's are taken.
    :param evaluation: the newest one of the task's run.
    :param lasts_s: as for `pay`.
    """
    boards, images = enrolled(folder) if boards is None else boards, told_images(folder)
    by: ImagesBy = "assumed" if images is None else "told by noised counts"
    return pay(task, devices=boards or None, images=images, images_by=by, evaluation=evaluation, lasts_s=lasts_s)


def enrolled(folder: FleetFolder) -> int:
    """Counts the boards that are enrolled and not locked out. Raises `StoreError`."""
    return sum(board.standing == "enrolled" for board in boards_of(folder))


def told_images(folder: FleetFolder) -> int | None:
    """Returns how many images a board has on average, by the newest `fleet ask counts`; None if nobody asked, or the
    noise hides the number.
    """
    files = sorted(folder.path.glob("runs/ask-counts-*/result.json"), key=lambda file: file.stat().st_mtime)
    for file in files[-1:]:
        with suppress(BadInput):
            found = Result.load(file).statistic
            if found is None or found.kind != "counts":
                return None
            counts = found.values[:-1]  # the last one counts what could not be read
            images = sum(each.value for each in counts)
            error = sum(each.error**2 for each in counts) ** 0.5
            return round(images / found.devices) or None if error < _MOST_ERROR * images else None
    return None
