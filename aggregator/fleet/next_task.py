"""Sets a fleet's next task: its run has a folder of its own, and boards keep their ledgers.

The name of the task in `task.toml` determines which run the aggregator continues. So to change from one run to another,
and to change back, one file is replaced as a whole. `aggregator/devices.sqlite` has what boards have spent, for all
runs.
"""

from __future__ import annotations

from pathlib import Path

from hushfleet import atomic_file
from hushfleet.aggregator.config.task import Task, files_beside, load_task
from hushfleet.aggregator.fleet.folder import FleetFolder, SecureSumsPart
from hushfleet.aggregator.fleet.task_check import obstacles
from hushfleet.aggregator.publish.prepare import prepare
from hushfleet.errors import BadInput


def task_text(task: Path) -> str:
    """Reads a task file. Raises `BadInput` for a run's JSON, although `load_task` accepts it."""
    if task.suffix == ".json":
        raise BadInput(
            f"{task} is JSON, and a fleet keeps its task as TOML: give the file that the run was started with"
        )
    return task.read_text("utf-8-sig")  # editors on Windows begin a file with a byte order mark


def set_task(folder: FleetFolder, task: Path) -> bool:
    """Sets the task that the aggregator runs from its next start on. Returns whether its run had begun before.

    Raises `BadInput` if the file is no task, its secure sums assume more than the fleet's limits allow, the fleet has
    too few boards for it or too few that can pay for it, a run of another task has its name, or files that it names
    beside itself are not in the fleet's folder as well, or the aggregator cannot prepare it, as with a start that is
    another network; and `StoreFull`.
    """
    checked, data, current = load_task(task, folder=folder.path), task_text(task).encode(), folder.run
    check_sums(checked, folder.config.secure_sums)
    if why := obstacles(checked, folder):
        raise BadInput(why[0])
    for file in files_beside(task):
        if not (folder.path / file).exists():
            raise BadInput(f"{task} names {file}, which the fleet will look for in {folder.path}: copy it there first")
    prepare(checked)  # what the aggregator would refuse later is refused now
    if current.exists():
        atomic_file.write_whole(current / "task.toml", folder.task.read_bytes(), durable=True)
    run = folder.path / "runs" / checked.name
    kept = run / "task.toml"
    if run.exists() and (not kept.exists() or task_text(kept).encode() != data):
        raise BadInput(
            f"{run} has the run of another task: give the next one another name, or go on with that one: {kept}"
        )
    atomic_file.write_whole(folder.task, data, durable=True)
    return run.exists()


def check_sums(task: Task, sums: SecureSumsPart) -> None:
    """Raises `BadInput` for secure sums that exceed the fleet's limits, because every board would decline them."""
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
