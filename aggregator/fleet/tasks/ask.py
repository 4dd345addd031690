"""Asks a fleet's boards about their data by a task of one round that trains nothing; then sets the former task again.

The statistic is handled like every task: boards receive it, their owners' limits decide, and its charge is in each
ledger. So at any time the fleet either asks or trains.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from hushfleet import atomic_file
from hushfleet.aggregator.config.question import question_of
from hushfleet.aggregator.config.round_section import RULES_OF_OTHER_MODE
from hushfleet.aggregator.config.schedule import ScheduleSection
from hushfleet.aggregator.config.sections import (
    MethodSection,
    ModelSection,
    PrivacySection,
    StatisticSection,
    WireSection,
)
from hushfleet.aggregator.config.task import Task, load_task
from hushfleet.aggregator.fleet.tasks.next_task import set_task
from hushfleet.aggregator.fleet.tasks.spending import Spending
from hushfleet.aggregator.fleet.trust.folder import FleetFolder
from hushfleet.aggregator.results.answers import statistic_of
from hushfleet.aggregator.results.result import Result
from hushfleet.errors import BadInput
from hushfleet.losses import find_loss
from hushfleet.toml_text import to_toml

POLL_S = 1.0


def statistic_task(folder: FleetFolder, asked: StatisticSection, epsilon: float) -> Task:
    """Makes the task that asks, with the data, the boards and the trust model of the fleet's present task.

    :param epsilon: at the delta of the boards' limits, because their owners know epsilon at this delta.
    """
    present = load_task(folder.task)
    number = 1
    while (folder.path / "runs" / f"ask-{asked.kind}-{number}").exists():
        number += 1
    trust: Literal["secure", "strict"] = "secure" if present.privacy.accounting == "secure" else "strict"
    delta, honest_fraction = Spending(folder.config.device.get("limits", {})).delta, present.privacy.honest_fraction
    model = replace(present.model, start=None)
    if not find_loss(model.standard_loss).of_inputs:
        model = ModelSection("linear", loss=model.standard_loss, tolerance=model.tolerance)
    elif model.features:  # a question is about the samples themselves; this network takes them at any length
        model = replace(model, name="autoencoder", features=None)
    try:
        return replace(
            present,
            name=f"ask-{asked.kind}-{number}",
            model=model,
            method=MethodSection("dp-fedavg"),
            privacy=PrivacySection(
                accounting=trust, clip_norm=1.0, epsilon=epsilon, delta=delta, honest_fraction=honest_fraction
            ),
            data=replace(present.data, augment="none", unlabelled=0, window=None),
            schedule=ScheduleSection(),  # the person who asks waits for the answer
            season=None,
            round=replace(
                present.round,
                rounds=1,
                patience=0,
                aggregation="mean",
                trim=None,
                mode="synchronous",
                **RULES_OF_OTHER_MODE["synchronous"],
            ),
            wire=WireSection(codec="masked" if trust == "secure" else "quantized"),
            evaluation=None,
            statistic=asked,
        )
    except ValueError as error:
        raise BadInput(f"the fleet cannot ask that: {error}") from error


def expected_error(task: Task) -> float:
    """Returns the error of each value of the answer if all boards answer; it is known before any board is asked."""
    names, devices = task.data.class_names or ("a", "b"), task.cohort_size
    question = question_of(task, noise_multiplier=task.privacy_spec().noise_multiplier, classes=len(names))
    assert question is not None
    secure = task.secure_spec()
    std = question.noise_multiplier / math.sqrt(devices * (1 if secure is None else secure.honest_devices))
    size = question.size(len(names))
    return statistic_of(question, [0.0] * size, [std] * size, devices=devices, class_names=names).values[0].error


def ask(
    folder: FleetFolder, task: Task, *, sleep: Callable[[float], None] = time.sleep, say: Callable[[str], None] = print
) -> Result:
    """Sets the fleet's task, waits for the result, and sets the former task again if its run had begun.

    Raises `BadInput` if the fleet is paused, the boards' limits do not allow the task, there are too few boards, or
    the fleet gets another task meanwhile.
    """
    if folder.paused.exists():
        raise BadInput(
            f"training is paused, so no board would be asked; let it go on first: hushfleet fleet resume {folder.path}"
        )
    former, begun = folder.task.read_bytes(), folder.run
    goes_on = begun.exists()
    back = begun / "task.toml" if goes_on else folder.path / f"kept-{begun.name}.toml"  # a task may be named "task"
    if not goes_on:  # no other file has the text of a task whose run has not begun
        _check_kept(folder, back, former)
        atomic_file.write_whole(back, former, durable=True)
    with TemporaryDirectory() as made:
        file = Path(made) / f"{task.name}.toml"
        file.write_text(to_toml(task.to_plain()), "utf-8")
        set_task(folder, file)
    asked = folder.task.read_bytes()
    say(
        f"the fleet is asked: {task.name}. An aggregator that runs does it at once; one that has ended: sudo systemctl "
        f"restart hushfleet-aggregator.\nCtrl-C leaves it to the fleet: its answer will be in {folder.run}/result.json"
        f"; the way back is: hushfleet fleet task {folder.path} {back} --now"
    )
    path = folder.run / "result.json"
    while not path.exists():
        sleep(POLL_S)
        if folder.task.read_bytes() != asked and not path.exists():
            raise BadInput(f"the fleet was given another task, {folder.run.name}, before its boards had answered")
    if not goes_on:
        say(f"to begin training: hushfleet fleet task {folder.path} {back}")
    elif folder.task.read_bytes() == asked:
        atomic_file.write_whole(folder.task, former, durable=True)
        say(
            f"the fleet's task is {begun.name} again. `hushfleet fleet up` goes on with it at once; with systemd: sudo "
            "systemctl restart hushfleet-aggregator"
        )
    return Result.load(path)


def _check_kept(folder: FleetFolder, back: Path, former: bytes) -> None:
    """Raises `BadInput` if the fleet's task is a question already, or if another file would be overwritten.

    :param back: the file that will keep the present task, whose text is `former`.
    """
    if load_task(folder.task).statistic is not None:
        raise BadInput(
            f"{folder.run.name} was not asked yet: start the aggregator, or give the fleet its own task back: "
            f"hushfleet fleet task {folder.path} TASK.toml"
        )
    if back.exists() and back.read_bytes() != former:
        raise BadInput(f"{back} is another task, and the present one would be kept there: move it elsewhere")
