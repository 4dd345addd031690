"""Runs the trained models on the common test set: confusion matrices, and predictions for some images.

This uses only the simulation's own data. In the field, images, labels and predictions stay with their owners.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence

import numpy as np
from PIL import Image

from hushfleet.aggregator.results.result import Example, Result
from hushfleet.learning.personalized_head import inputs_of_own, own_logits
from hushfleet.progress import counted
from hushfleet.simulator.engines.fast.after_round import AfterRound, after_last_round
from hushfleet.simulator.engines.fast.device import store_of
from hushfleet.simulator.engines.fast.examples import answers, choose_examples
from hushfleet.simulator.engines.fast.local_only import DeviceLocalOnly
from hushfleet.simulator.engines.fast.workers import WorkerPool
from hushfleet.simulator.run_folder import MOST_SHOWN, Simulation

_MODES = {1: "L", 3: "RGB"}


def confusion(labels: np.ndarray, said: np.ndarray, classes: int) -> np.ndarray:
    """Returns counts int `[true class, predicted class]`."""
    return np.bincount(labels * classes + said, minlength=classes**2).reshape(classes, classes)


def with_answers(
    result: Result,
    simulation: Simulation,
    workers: WorkerPool,
    local_only_models: Sequence[DeviceLocalOnly],
    *,
    runtime: str,
) -> Result:
    """Adds the predictions of the models of the first devices that took part. Without classes, changes nothing."""
    if not simulation.prepared.spec.model.targets.are_classes:
        return result
    test = simulation.fleet.common_test
    jobs = after_last_round(simulation, ("", *simulation.took_part[:MOST_SHOWN]), runtime=runtime)
    found = counted(workers.map(_ask, jobs), "asking the models for the common test", total=len(jobs))
    asked = zip(jobs, found, strict=True)
    said = {job.device: each for job, each in asked if each is not None}
    by_global = said.pop("")
    classes = len(simulation.prepared.spec.model.class_names)
    own = sum((confusion(test.labels, each, classes) for each in said.values()), np.zeros((classes, classes), int))
    details = {
        "confusion_global": confusion(test.labels, by_global, classes).tolist(),
        "confusion_own": own.tolist() if said else [],
        "confusion_devices": len(said),
        "examples": _examples(simulation, by_global, said, {each.device: each.said for each in local_only_models}),
    }
    return result.with_details(**details)


def _ask(job: AfterRound) -> np.ndarray | None:
    """Returns the personalized model's predictions, None if it has no model; without a device's name, the global
    model's."""
    run = job.run
    if job.device:
        with store_of(run.folder, job.device) as store:
            params = store.own_params(run.spec.task)
        if params is not None and run.spec.model.chooses_head:
            return answers(own_logits, params, inputs_of_own(run.common_test))
    else:
        params = job.global_params()
    return None if params is None else answers(run.inference, params, run.common_test)


def _examples(
    simulation: Simulation,
    by_global: np.ndarray,
    own: dict[str, np.ndarray],
    local_only_models: dict[str, tuple[int, ...]],
) -> list[Example]:
    """Returns the examples; the devices whose models predict take turns."""
    test = simulation.fleet.common_test
    devices = [name for name in own if name in local_only_models] or list(own)
    if test.images.shape[1] not in _MODES or not test.are_images:
        return []
    shown = []
    for place, index in enumerate(choose_examples(test, seed=simulation.seed)):
        device = devices[place % len(devices)] if devices else ""
        shown.append(
            Example(
                png=_png(test.images[index]),
                label=int(test.labels[index]),
                device=device,
                said_global=int(by_global[index]),
                said_own=int(own[device][index]) if device else None,
                said_alone=local_only_models[device][place] if local_only_models.get(device) else None,
            )
        )
    return shown


def _png(image: np.ndarray) -> str:
    """Encodes an image uint8 `[C, H, W]` as a PNG in base64."""
    file = io.BytesIO()
    pixels = image[0] if len(image) == 1 else image.transpose(1, 2, 0)
    Image.fromarray(np.ascontiguousarray(pixels), _MODES[len(image)]).save(file, "PNG", optimize=True)
    return base64.b64encode(file.getvalue()).decode()
