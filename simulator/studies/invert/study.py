"""Runs the attack on a task: with its network, its devices' data, and the noise that it adds to an update."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hushfleet.aggregator.config.task import Task
from hushfleet.atomic_file import write_whole
from hushfleet.data.form import PUBLIC_DATA
from hushfleet.data.sets import load
from hushfleet.errors import BadInput
from hushfleet.models import get_model
from hushfleet.progress import doing
from hushfleet.simulator.fleet import make_fleet
from hushfleet.simulator.studies.invert.options import FIGURES, PICTURE, InvertOptions
from hushfleet.simulator.studies.invert.show import draw, to_json
from hushfleet.simulator.studies.invert.views import ImageView, Terms, look


@dataclass(frozen=True, eq=False)
class AttackTarget:
    """The attack on the first device of a task.

    :param title: text with network, data, and the rounds and delta of the epsilons.
    :param classmates: mean number of images of a class, among which one must be recognised.
    :param originals: float32 `[n, C, H, W]`, 0..1.
    """

    task: Task
    title: str
    classmates: float
    originals: np.ndarray
    views: list[ImageView]

    @property
    def json(self) -> str:
        return to_json(self.task.name, self.classmates, self.views)

    @property
    def files(self) -> dict[str, bytes]:
        """The figures and the picture, by name."""
        return {FIGURES: f"{self.json}\n".encode(), PICTURE: draw(self.originals, self.views)}

    def save(self, folder: Path) -> None:
        """Writes the files."""
        for name, data in self.files.items():
            write_whole(folder / name, data, durable=True)


def invert(task: Task, options: InvertOptions) -> AttackTarget:
    """Searches training images in updates of the task's first round. Raises `BadInput` for a task that cannot be
    attacked."""
    if task.data.name not in PUBLIC_DATA:
        raise BadInput(f"data.name = {task.data.name!r}: the attack seeks images of the public data sets only")
    if task.model.features or task.model.share != "all":
        raise BadInput("with features the server never sees a gradient by pixels; give a task without features")
    if task.model.own_loss:
        raise BadInput(f"model.loss = {task.model.loss!r}: the attack knows the cross-entropy's gradient alone")
    clip_norm = task.privacy.clip_norm
    if clip_norm is None or not math.isfinite(clip_norm):
        raise BadInput("privacy.clip_norm must be a number, since the noise is scaled to it: --set privacy.clip_norm=1")
    with doing(f"reading the data set {task.data.name}"):
        data = load(task.data.name, data_dir=options.data_dir)
    model = get_model(task.model.name, classes=data.classes, input_shape=data.input_shape)
    if model.input_shape != data.input_shape:
        raise BadInput(
            f"model.name = {model.name!r} takes {model.input_shape}; {task.data.name} has {data.input_shape}"
        )
    fleet = make_fleet(task, data)
    first = fleet.devices[0].train
    own, others = len(first), len(first.source) - len(first)
    if own < options.images or others < options.devices - 1:
        raise BadInput(f"the first device has {own} images, the others {others}; --images and --devices ask for more")
    terms = Terms(clip_norm, task.round.rounds, task.delta, options.devices, _of_a_device(task, len(first.source)))
    originals, views = look(model, model.init(task.seed), fleet, terms, options)
    title = f"{model.name} on {task.data.name}, {task.round.rounds} rounds, delta {task.delta:g}"
    return AttackTarget(task, title, len(first.source) / data.classes, originals, views)


def _of_a_device(task: Task, samples: int) -> float | None:
    """Returns the noise multiplier of one device's update; None if it is not noised, or hidden in a sum."""
    if not task.noises_updates or task.privacy.accounting == "secure":
        return None
    privacy = task.privacy_spec(train_samples=samples)
    return privacy.noise_multiplier / math.sqrt(privacy.noise_split)
