"""Writes the task file of a plan, from `task.toml.j2`."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hushfleet.aggregator.config.sections import PlanSection
from hushfleet.aggregator.planning.advice import Question
from hushfleet.aggregator.planning.gain_table import GainTable
from hushfleet.aggregator.planning.year import Year
from hushfleet.data.form import SAMPLE_RATE
from hushfleet.privacy.terms import MIN_DEVICES
from hushfleet.schema import to_plain
from hushfleet.simulator.studies.plan.needs import Needs
from hushfleet.simulator.studies.templates import filled
from hushfleet.toml_text import to_toml, toml_value


def task_text(
    asked: Question,
    needed: Needs,
    table: GainTable | None = None,
    *,
    class_names: Sequence[str] = (),
    stand_in: str = "",
    year: Year | None = None,
) -> str:
    """Returns a task for boards with class folders.

    :param table: the fleet's own simulation, which the task keeps.
    :param class_names: empty: the user fills them in.
    :param stand_in: the folder of public samples that was measured, if it has the class folders; empty: another one.
    :param year: repeats the task in each of its periods; None: once.
    """
    return filled(
        __name__,
        "task.toml.j2",
        {"toml": toml_value},
        asked=asked,
        needed=needed,
        class_names=[*class_names] or [f"class-{index}" for index in range(1, asked.classes + 1)],
        min_devices=MIN_DEVICES,
        stand_in=stand_in,
        year=year,
        infinity=math.inf,
        is_sound=asked.input_shape[:2] == (1, 1),
        sample_rate=SAMPLE_RATE,
        plan=to_toml({"plan": {key: value for key, value in to_plain(_kept(asked, table)).items() if value}}),
    )


def _kept(asked: Question, table: GainTable | None) -> PlanSection:
    if table is None:
        return PlanSection(images=asked.images, alpha=asked.alpha)
    (fleet,) = table.fleets
    return PlanSection(
        images=asked.images,
        alpha=asked.alpha,
        measured_on=table.measured_on,
        devices=fleet["devices"],
        alone=(fleet["alone"]["own"], fleet["alone"]["common"]),
        points=tuple(
            (point["epsilon"], point["chosen"]["own"], point["shared"]["common"], point["gain_std"])
            for point in fleet["points"]
        ),
    )
