"""Writes the task file of a plan."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hushfleet.aggregator.config.sections import PlanSection
from hushfleet.aggregator.planning.advice import Question
from hushfleet.aggregator.planning.gain_table import GainTable
from hushfleet.aggregator.planning.year import Year
from hushfleet.config.toml_text import to_toml, toml_value
from hushfleet.privacy.terms import MIN_DEVICES
from hushfleet.schema import to_plain
from hushfleet.simulator.studies.plan.needs import Needs


def task_text(
    asked: Question,
    needed: Needs,
    table: GainTable | None = None,
    *,
    class_names: Sequence[str] = (),
    year: Year | None = None,
) -> str:
    """Returns a task for boards with class folders.

    :param table: the fleet's own simulation, which the task keeps.
    :param class_names: empty: the user fills them in.
    :param year: repeats the task in each of its periods; None: once.
    """
    names = toml_value([*class_names] or [f"class-{index}" for index in range(1, asked.classes + 1)])
    accounting = "strict" if asked.local else "secure"
    honest = "" if asked.local else f"honest_fraction = {asked.honest_fraction:g}\n"
    directions = "" if needed.directions is None else f"directions = {needed.directions}\n"
    least = ""
    if not asked.local and asked.least_devices < MIN_DEVICES:
        option = f"hushfleet fleet init --min-devices {asked.least_devices}"
        least = f"\n# Boards take part in sums of fewer than {MIN_DEVICES} only in a fleet made by: {option}"
    return f"""# Made by `hushfleet plan` for {asked.devices} devices with {asked.images} images each.
name = "planned"

[model]
name = "linear"
features = {toml_value(asked.features)}
{directions}
[method]
name = "hush"

[privacy]
accounting = "{accounting}"
{honest}epsilon = {asked.epsilon:g}
delta = {asked.delta:g}
clip_norm = {needed.clip_norm:g}

[data]
name = "folder"
# The names of the boards' class folders.
class_names = {names}
# Channels (1 grey, 3 colour), height, width; images of any size are resized to it.
input_shape = {list(asked.input_shape)}
devices = {asked.devices}

[round]
rounds = {needed.rounds}{least}
deadline_s = 3600.0

# A round a day. For rounds only at night: between = "01:00-05:00". Without this section each follows at once.
[schedule]
every = "24h"
{"" if year is None else _season(year)}
# What was assumed; the sentence on whether the fleet pays is computed from it, for the boards that are enrolled.
{to_toml({"plan": {key: value for key, value in to_plain(_kept(asked, table)).items() if value}})}"""


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


def _season(year: Year) -> str:
    lifetime = year.budget.lifetime
    limit = f"lifetime = {lifetime:g}\n" if math.isfinite(lifetime) else ""
    return f"""
# The fleet begins the task again by itself in each such period. Without lifetime, the boards' own limit over everything
# ends the seasons; `hushfleet fleet init` writes limits for the boards that fit.
[season]
every = "{year.per}"
{limit}"""
