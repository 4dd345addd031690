"""Sets a fleet's next task: its run has a folder of its own, and boards keep their ledgers.

The name of the task in `task.toml` determines which run the aggregator continues. So to change from one run to another,
and to change back, one file is replaced as a whole. `aggregator/devices.sqlite` has what boards have spent, for all
runs.
"""

from __future__ import annotations

import filecmp
import os
import shutil
from pathlib import Path

from hushfleet import atomic_file
from hushfleet.aggregator.config.task import Task, files_beside, load_task
from hushfleet.aggregator.fleet.tasks.task_check import obstacles
from hushfleet.aggregator.fleet.trust.folder import FILE_NAME, FleetFolder, SecureAggregationPart
from hushfleet.errors import BadInput, StoreFull


def task_text(task: Path) -> str:
    """Reads a task file. Raises `BadInput` for a run's JSON, although `load_task` accepts it."""
    if task.suffix == ".json":
        raise BadInput(
            f"{task} is JSON, and a fleet keeps its task as TOML: give the file that the run was started with"
        )
    return task.read_text("utf-8-sig")  # editors on Windows begin a file with a byte order mark


def set_task(folder: FleetFolder, task: Path, *, prepares: bool = True) -> bool:
    """Sets the task that the aggregator runs from its next start on. Returns whether its run had begun before.

    Copies the files that it names beside itself, and the fleet's folder lacks. Raises `BadInput` as `check_next`, also
    if the aggregator could not prepare the task, as with a start that is another network; and `StoreFull`.

    :param prepares: whether it is prepared here, as the aggregator will, so that what it refuses is refused now.
    """
    run, current = folder.path / "runs" / check_next(folder, task).name, folder.run
    data, copied = task_text(task).encode(), list[Path]()
    try:
        for file in files_to_copy(task, folder.path):
            copied.append(folder.path / file)
            copy(task.parent / file, folder.path / file)
        if prepares:
            from hushfleet.aggregator.payloads.prepare import prepare  # with ONNX Runtime

            prepare(load_task(task, folder=folder.path))
    except (OSError, BadInput) as error:
        for made in copied:
            shutil.rmtree(made, ignore_errors=True) if made.is_dir() else made.unlink(missing_ok=True)
        if isinstance(error, BadInput):
            raise
        raise StoreFull(f"what {task} names cannot be copied to {folder.path}: {error.strerror or error}") from error
    if current.exists():
        atomic_file.write_whole(current / "task.toml", folder.task.read_bytes(), durable=True)
    atomic_file.write_whole(folder.task, data, durable=True)
    return run.exists()


def check_next(folder: FleetFolder, task: Path) -> Task:
    """Returns the task of a file, if the fleet can do it.

    Raises `BadInput` if the file is no task, its secure aggregation assumes more than the fleet's limits allow, the
    fleet has too few boards for it or too few that can pay for it, a run of another task has its name, or files that it
    names are neither beside it nor in the fleet's folder.
    """
    checked = load_task(task)
    check_sums(checked, folder.config.secure_sums)
    if why := obstacles(checked, folder):
        raise BadInput(why[0])
    files_to_copy(task, folder.path)
    run = folder.path / "runs" / checked.name
    kept = folder.task if run == folder.run else run / "task.toml"
    if run.exists() and (not kept.exists() or task_text(kept) != task_text(task)):
        raise BadInput(
            f"{run} has the run of another task: give the next one another name, or go on with that one: {kept}"
        )
    return checked


def files_to_copy(task: Path, into: Path) -> list[Path]:
    """Returns the files and folders that a task names beside itself and the fleet's folder lacks, as relative paths.

    :param into: the fleet's folder, also before it is made.

    Raises `BadInput` for one that exists nowhere, cannot be copied, or differs from the fleet's own of this name.
    """
    beside, found = dict.fromkeys(map(Path, files_beside(task))), []
    for file in beside:
        source, target = task.parent / file, into / file
        if (into / FILE_NAME).exists() and target.exists():
            if source.is_file() and target.is_file() and not filecmp.cmp(source, target, shallow=False):
                raise BadInput(f"{task} names {file}, and the fleet has another file {target}: rename one of them")
            continue
        if ".." in file.parts:
            raise BadInput(f"{task} names {file}, which cannot be copied into {into}: put it beside the task file")
        if not source.exists():
            raise BadInput(f"{task} names {file}, but {source} does not exist")
        if file == Path() or into.resolve().is_relative_to(source.resolve()):
            raise BadInput(
                f"{task} names the folder {source.resolve()}, which is copied into the fleet's folder: it must not be "
                "the folder of the task, nor contain the fleet's; put the data into a folder of their own beside the "
                "task file"
            )
        if beside.keys().isdisjoint(file.parents):  # otherwise it is copied with its folder
            found.append(file)
    return found


def copy(source: Path, target: Path) -> None:
    """Copies a file, or a folder of data: whole, or not at all.

    Raises `OSError`, and `BadInput` if the fleet has a file of this name already.
    """
    if target.exists():
        raise BadInput(f"the fleet has a file {target.name} already: rename {source}, which the task names")
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + atomic_file.PART_SUFFIX)
    shutil.rmtree(part, ignore_errors=True)
    (shutil.copytree if source.is_dir() else shutil.copyfile)(source, part)
    os.replace(part, target)


def check_sums(task: Task, sums: SecureAggregationPart) -> None:
    """Raises `BadInput` for sums that exceed the fleet's limits, because every board would decline them."""
    secure = task.secure_spec()
    if secure is None:
        return
    if secure.honest_fraction > sums.honest_fraction:
        raise BadInput(
            f"the task counts on privacy.honest_fraction = {secure.honest_fraction:g} of the boards, and this fleet on "
            f"{sums.honest_fraction:g}: lower it in the task, or make the fleet with "
            f"--honest-fraction {secure.honest_fraction:g}"
        )
    if secure.min_devices < sums.min_devices:
        raise BadInput(
            f"the task opens sums of {secure.min_devices} boards, and this fleet's boards take part in sums of "
            f"{sums.min_devices} or more only: raise round.min_updates in the task, or make the fleet with "
            f"--min-devices {secure.min_devices}"
        )
