"""`model.start`: a task that continues from the global model of an earlier run."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import safetensors
import safetensors.numpy

from hushfleet.errors import BadInput
from hushfleet.learning.carry_over import carry_over, output_names, with_outputs
from hushfleet.wire.format.spec import EarlierTask, ModelSpec

_log = logging.getLogger(__name__)
_ROUND = re.compile(r"global-(\d+)\.safetensors\Z")


@dataclass(frozen=True)
class EarlierModel:
    """The global model of an earlier run.

    :param task: the id of that run, by which devices find what they have kept of it; empty if the file has none.
    :param class_names: empty if the file has none.
    :param features: SHA-256 of the graph of its features, in hex; None without features.
    :param normalisation: mean and std of the values that it was trained on; None in files of 0.3.0 and before.
    :param columns: the columns that its network takes, in this order; empty if the file, or the task, names none.
    :param period: the place of its task in a chain of tasks that continue each other, from 1 on.
    """

    path: Path
    tensors: dict[str, np.ndarray]
    task: str
    class_names: tuple[str, ...]
    features: str | None
    normalisation: tuple[tuple[float, ...], tuple[float, ...]] | None = None
    columns: tuple[str, ...] = ()
    period: int = 1

    @classmethod
    def read(cls, start: Path) -> EarlierModel:
        """Reads a run's `global-ROUND.safetensors`, or the newest one of a run's folder. Raises `BadInput`."""
        path = start
        try:
            path = newest_model(start) if start.is_dir() else start
            with safetensors.safe_open(path, "numpy") as file:
                about = json.loads((file.metadata() or {}).get("hushfleet", "{}"))
                tensors = {name: file.get_tensor(name) for name in file.keys() if "/" not in name}  # noqa: SIM118
        except (OSError, safetensors.SafetensorError, ValueError) as error:
            raise BadInput(f"model.start = {str(path)!r} cannot be read: {error}") from error
        for name, each in tensors.items():
            if each.dtype != np.float32 or not np.isfinite(each).all():
                raise BadInput(f"model.start = {str(path)!r}: {name} is not finite float32")
        mean, std = map(tuple, about.get("normalisation", ((), ())))
        normalisation = (mean, std) if mean else None
        classes, columns = (tuple(about.get(key, ())) for key in ("classes", "columns"))
        about = {"task": "", "features": None, "period": 1, **about}
        return cls(path, tensors, about["task"], classes, about["features"], normalisation, columns, about["period"])

    def vector(self, model: ModelSpec) -> np.ndarray:
        """Returns the first model float32 `[d]` of a task with the network and the classes of `model`.

        Raises `BadInput` if the two differ in more than their classes.
        """
        features = None if model.features is None else model.features.graph.digest.hex()
        if self.task and features != self.features:
            raise BadInput(
                f"model.start = {str(self.path)!r} has other features; a task with new features begins anew: "
                "leave model.start out"
            )
        if self.normalisation is None and model.features is None:
            _log.warning(
                "model.start = %r does not say which numbers its network was given. Up to version 0.3.0 data.mean and "
                "data.std were 0.5 and 0.25 for folders of images, and those of the training part for tables, where "
                "the task left them out: give this task the same numbers",
                str(self.path),
            )
        elif self.normalisation not in (None, (model.mean, model.std)):
            mean, std = (", ".join(f"{value:g}" for value in each[:8]) for each in self.normalisation)
            raise BadInput(
                f"model.start = {str(self.path)!r} was trained with data.mean = [{mean}] and data.std = [{std}]; "
                "give this task the same numbers"
            )
        if self.columns and model.form.columns not in ((), self.columns):
            raise BadInput(
                f"model.start = {str(self.path)!r} takes the columns {', '.join(self.columns)}, and this task "
                f"{', '.join(model.form.columns)}; give it the same data.columns, in this order"
            )
        names, to_names = (
            output_names(each, model.layout, are_inputs=model.targets.are_inputs)
            for each in (self.class_names or model.class_names, model.class_names)
        )
        layout = with_outputs(model.layout, len(names))
        shapes = dict(zip(layout.names, layout.shapes, strict=True))
        if shapes != {name: each.shape for name, each in self.tensors.items()}:
            raise BadInput(
                f"model.start = {str(self.path)!r} is not a {model.name} with {len(names)} outputs: it has "
                + ", ".join(f"{name} {list(each.shape)}" for name, each in self.tensors.items())
            )
        flat = np.concatenate([self.tensors[name].ravel() for name in layout.names])
        softmax = model.targets.loss == "cross-entropy"
        return carry_over(flat, names, layout=model.layout, to_names=to_names, softmax=softmax)

    def next_period(self, class_names: tuple[str, ...]) -> int:
        """Returns the period of a task that continues from here: 1 with other classes, which are still to learn."""
        return self.period + 1 if self.class_names in ((), class_names) else 1

    @property
    def continued(self) -> EarlierTask | None:
        """The run by the id that devices know, which keep their own parts of its model; None if the file has no id."""
        return EarlierTask(self.task, self.class_names) if self.task else None


def newest_model(folder: Path) -> Path:
    """Returns the global model after the last closed round of a run's folder. Raises `BadInput` if there is none."""
    found = {
        int(match[1]): path
        for place in (folder, folder / "aggregator")
        for path in place.glob("global-*.safetensors")
        if (match := _ROUND.search(path.name))
    }
    if not found or not (newest := max(found)):
        raise BadInput(
            f"model.start = {str(folder)!r}: no round of that run is closed, so it has no model to go on from"
        )
    return found[newest]
