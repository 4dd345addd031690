"""Judges how unusual the samples of a file are, with the own autoencoder and threshold (`hushfleet.learning.anomaly`).

Everything is computed on demand, and stays on the board.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from hushfleet.data.samples import Samples
from hushfleet.edge_client.board.config import OwnDataSection
from hushfleet.edge_client.board.sample_files import Reading, load_file
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.edge_client.worker.personalized_model import PersonalizedModel
from hushfleet.edge_client.worker.predict import graphs_of
from hushfleet.learning.anomaly import Threshold, errors_of, own_reconstruction, threshold
from hushfleet.learning.evaluation import LogitsOf
from hushfleet.losses import normal
from hushfleet.wire.format.spec import TaskSpec

_LEAST = 1e-30  # smallest divisor, because the threshold of constant samples is 0


class Unusual(NamedTuple):
    """The samples of a file, compared with the threshold.

    :param model: `personalised` or `global`.
    :param scores: the error of each sample divided by the threshold, in the file's order; unusual if above 1.
    """

    task: str
    model: str
    threshold: Threshold
    scores: tuple[float, ...]

    @property
    def places(self) -> list[int]:
        """The indices of the unusual samples, from 0, the most unusual first."""
        order = np.argsort(-np.array(self.scores), kind="stable").tolist()
        return [place for place in order if self.scores[place] > 1]

    def to_json(self) -> dict[str, object]:
        """Returns the form that other programs read."""
        samples = [{"sample": n, "score": score, "unusual": score > 1} for n, score in enumerate(self.scores)]
        chosen = self.threshold._asdict()
        return {"task": self.task, "model": self.model, "threshold": chosen, "samples": samples}

    def words(self, top: int) -> list[str]:
        """Returns lines for a person, with at most `top` of the samples."""
        chosen, places = self.threshold, self.places
        lines = [f"{len(places) or 'none'} of {len(self.scores)} samples {'is' if len(places) == 1 else 'are'} unusual"]
        lines += [f"  sample {place}: {self.scores[place]:.3g} times the threshold" for place in places[:top]]
        if not places and self.scores:
            lines.append(f"  the largest error is {max(self.scores):.3g} times the threshold")
        lines.append(
            f"  the threshold is a mean squared error of {chosen.error:.3g}, by {chosen.held_out} samples of this "
            f"board; of normal ones at most {100 * chosen.false_alarms:.2g} % lie above it while they vary as these do"
        )
        return lines


def judge(store: DeviceStore, own: PersonalizedModel, data: OwnDataSection, file: Path) -> Unusual:
    """Judges a file. Raises `BadInput` if the file or the board's own data cannot be read, or give no threshold."""
    spec = own.spec
    network, samples = _own(store, own, data)
    chosen = _threshold(network, own.params, spec, samples)
    errors = errors_of(network, own.params, load_file(file, data.here(spec.model)))
    return Unusual(spec.task, own.kind, chosen, tuple((errors / max(chosen.error, _LEAST)).tolist()))


def alarms_right(
    store: DeviceStore, own: PersonalizedModel, data: OwnDataSection
) -> tuple[int | None, int, str, int | None]:
    """Counts the samples of `data.held_out` that the personalized model judges right: unusual exactly if the label says
    fault.

    Returns that number, the number of samples, their kind in words, and how many the fleet's model judges right. Raises
    `BadInput` in the same cases as `judge`.
    """
    assert data.held_out is not None
    network, samples = _own(store, own, data)
    test = load_file(Path(data.held_out), data.here(own.spec.model), kind=data.kind)

    def right(params: np.ndarray) -> int:
        chosen = _threshold(network, params, own.spec, samples)
        return int(((errors_of(network, params, test) > chosen.error) != normal(test.labels)).sum())

    return right(own.params), len(test), "held-out samples", None if own.shared is None else right(own.shared)


def _threshold(network: LogitsOf, params: np.ndarray, spec: TaskSpec, samples: Samples) -> Threshold:
    return threshold(network, params, spec.model.layout, samples, by_content=spec.by_content)


def _own(store: DeviceStore, own: PersonalizedModel, data: OwnDataSection) -> tuple[LogitsOf, Samples]:
    """Returns the network as this board uses it, and the board's samples."""
    spec = own.spec
    reading = Reading(skipped=[], by_content=spec.by_content)
    samples = load_file(Path(data.path), data.here(spec.model), kind=data.kind, reading=reading)
    return own_reconstruction(graphs_of(store, spec)[0], spec.model.layout, lambda: samples), samples
