"""Writes the notes of a run's start: the task's epsilon is not what boards are promised, or a key has no effect."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from hushfleet.aggregator.config.task import Task
from hushfleet.data.form import OWN_DATA
from hushfleet.methods.stages import ClipLayers, ClipWhole
from hushfleet.privacy.terms import AS_PUBLISHED
from hushfleet.wire.format.codecs import codec_of


def notes_of(task: Task) -> list[str]:
    """Returns the lines for this task; none if its epsilon is what boards are promised and each key has an effect."""
    published = [AS_PUBLISHED] if task.privacy.accounting == "as-published" else []
    epsilon, idle = task.privacy.epsilon, [*_clip_without_noise(task), *_idle_keys(task)]
    if epsilon is None or not task.parts().server.lowers_noise:
        return [*published, *idle]
    return [
        *published,
        *idle,
        f"privacy.epsilon = {epsilon:g} is what all rounds cost at the first noise. method.name = "
        f"{task.method.name!r} lowers it as training goes on, so more may be spent, up to the limits of the boards "
        "(in a simulation privacy.budget)",
    ]


def _clip_without_noise(task: Task) -> Iterator[str]:
    """Yields a line if updates are clipped to the default, and no noise is added."""
    privacy = task.privacy
    if privacy.noise_multiplier or privacy.epsilon or privacy.accounting == "secure" or task.statistic is not None:
        return
    clips = any(isinstance(stage, ClipWhole | ClipLayers) for stage in task.parts().stages)
    if clips and privacy.clip_norm == _default(privacy, "clip_norm"):
        yield (
            f"updates are clipped to clip_norm = {privacy.clip_norm:g}, and nothing is noised: for the published "
            "method without privacy set privacy.clip_norm = inf"
        )


def _idle_keys(task: Task) -> Iterator[str]:
    """Yields a line for each key that is not at its default and has no effect with the values of other keys."""
    data, privacy, wire, asked = task.data, task.privacy, task.wire, task.statistic
    kind = None if asked is None else asked.kind
    idle = (
        ("data", data, "alpha", "partition", not data.partition.startswith("dirichlet")),
        ("data", data, "classes_per_device", "partition", data.partition != "pathological"),
        ("data", data, "class_names", "name", data.name not in OWN_DATA),
        ("data", data, "input_shape", "name", data.name not in OWN_DATA),
        ("privacy", privacy, "honest_fraction", "accounting", privacy.accounting != "secure"),
        ("wire", wire, "step", "codec", not codec_of(wire.codec).uses_wire_step),
        ("wire", wire, "downlink_step", "downlink", wire.downlink == "full"),
        *(("statistic", asked, key, "kind", kind in ("counts", "drift")) for key in ("column", "low", "high")),
        ("statistic", asked, "bins", "kind", kind not in (None, "histogram")),
        ("statistic", asked, "most", "kind", kind not in (None, "counts")),
    )
    for name, section, key, other, is_idle in idle:
        if is_idle and (value := getattr(section, key)) != _default(section, key):
            written, beside = list(value) if isinstance(value, tuple) else value, getattr(section, other)
            yield f"{name}.{key} = {written!r} has no effect with {name}.{other} = {beside!r}; leave it out"


def _default(section: Any, key: str) -> Any:
    return next(each.default for each in fields(section) if each.name == key)
