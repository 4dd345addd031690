"""Judges how unusual the samples of a file are, with the own autoencoder and threshold (`hushfleet.learning.anomaly`).

Everything is computed on demand, and stays on the board.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from hushfleet.data.folder import scan_folder
from hushfleet.data.form import FOLDERS
from hushfleet.data.samples import LabelledSamples, Samples, inputs_of
from hushfleet.edge_client.board.config import OwnDataSection
from hushfleet.edge_client.board.local_data import SETTLED_S, file_form, look_at
from hushfleet.edge_client.board.sample_files import STRICT, Reading, load_file
from hushfleet.edge_client.worker.personalized_model import PersonalizedModel
from hushfleet.edge_client.worker.predict import LoadedGraphs, read_sample
from hushfleet.learning.anomaly import Threshold, errors_of, judging, own_reconstruction, threshold
from hushfleet.losses import normal
from hushfleet.wire.format.spec import TaskSpec

_LEAST = 1e-30  # smallest divisor, because the threshold of constant samples is 0


class Unusual(NamedTuple):
    """The samples of a file, compared with the threshold.

    :param model: `personalised` or `global`.
    :param scores: the error of each sample divided by the threshold, in the file's order; unusual if above 1.
    :param hop_s: seconds from one sample to the next in a clip of sound, whose samples are segments; 0: no sound.
    """

    task: str
    model: str
    threshold: Threshold
    scores: tuple[float, ...]
    hop_s: float = 0.0

    @property
    def places(self) -> list[int]:
        """The indices of the unusual samples, from 0, the most unusual first."""
        order = np.argsort(-np.array(self.scores), kind="stable").tolist()
        return [place for place in order if self.scores[place] > 1]

    def to_json(self) -> dict[str, object]:
        """Returns the form that other programs read."""
        chosen, samples = self.threshold._asdict(), list[dict[str, object]]()
        for n, score in enumerate(self.scores):
            place: dict[str, object] = {"from_s": n * self.hop_s} if self.hop_s else {"sample": n}
            samples.append({**place, "score": score, "unusual": score > 1})
        whole = {"task": self.task, "model": self.model, "threshold": chosen}
        return whole | {"segments" if self.hop_s else "samples": samples}

    def words(self, top: int) -> list[str]:
        """Returns lines for a person, with at most `top` of the samples."""
        chosen, places = self.threshold, self.places
        what = "segments" if self.hop_s else "samples"
        lines = [f"{len(places) or 'none'} of {len(self.scores)} {what} {'is' if len(places) == 1 else 'are'} unusual"]
        for place in places[:top]:
            where = f"from {place * self.hop_s:.2f} s" if self.hop_s else f"sample {place}"
            lines.append(f"  {where}: {self.scores[place]:.3g} times the threshold")
        if not places and self.scores:
            lines.append(f"  the largest error is {max(self.scores):.3g} times the threshold")
        lines.append(
            f"  the threshold is an error of {chosen.error:.3g}, by {chosen.held_out} {what} of this "
            f"board; of normal ones at most {100 * chosen.false_alarms:.2g} % lie above it while they vary as these do"
        )
        return lines


class Judge:
    """A board's own model and threshold, computed once from its own samples.

    Raises `BadInput` if these cannot be read, or give no threshold.
    """

    def __init__(self, own: PersonalizedModel, data: OwnDataSection, graphs: LoadedGraphs) -> None:
        self._own, self._data, self._model = own, data, data.here(own.spec.model)
        graph, self._features = graphs
        layout, by_content = own.spec.model.layout, own.spec.by_content
        self._look, unfinished = look_at(Path(data.path), SETTLED_S)
        reading = Reading([], by_content, unfinished if data.kind in FOLDERS else ())
        samples = _read(Path(data.path), data, own.spec, reading)
        self._judged_by = self._inputs(judging(samples, layout, by_content=by_content))
        self._network = own_reconstruction(graph, layout, lambda: self._judged_by)
        self.threshold = self._threshold(own.params)

    def is_of(self, own: PersonalizedModel) -> bool:
        """Returns whether model and own samples are those that the threshold was computed from."""
        same = own.spec.digest == self._own.spec.digest and np.array_equal(own.params, self._own.params)
        return same and look_at(Path(self._data.path), SETTLED_S)[0] == self._look

    def file(self, file: Path) -> Unusual:
        """Judges the samples of a file, or the segments of a clip. Raises `BadInput` if it cannot be read."""
        form, spec = self._model.form, self._own.spec
        samples = read_sample(file, self._model) if form.sample_rate else load_file(file, self._model)
        hop_s = form.hop / form.sample_rate if form.sample_rate else 0.0
        return Unusual(spec.task, self._own.kind, self.threshold, tuple(self.scores(samples).tolist()), hop_s)

    def scores(self, samples: Samples) -> np.ndarray:
        """Returns the error of each sample divided by the threshold, float64 `[n]`."""
        errors = errors_of(self._network, self._own.params, self._inputs(samples))
        return errors / max(self.threshold.error, _LEAST)

    def alarms_right(self) -> tuple[int | None, int, str, int | None]:
        """Counts the samples of `data.held_out` that the personalized model judges right: unusual exactly if the label
        says fault.

        Returns that number, the number of samples, their kind in words, and how many the fleet's model judges right.
        """
        own, data = self._own, self._data
        assert data.held_out is not None
        test = self._inputs(_read(Path(data.held_out), data, own.spec))

        def right(params: np.ndarray) -> int:
            alarms = errors_of(self._network, params, test) > self._threshold(params).error
            return int((alarms != normal(test.labels)).sum())

        return right(own.params), len(test), "held-out samples", None if own.shared is None else right(own.shared)

    def _threshold(self, params: np.ndarray) -> Threshold:
        return threshold(self._network, params, self._own.spec.model.layout, self._judged_by)

    def _inputs(self, samples: Samples) -> LabelledSamples:
        return inputs_of(samples, self._features)


def _read(path: Path, data: OwnDataSection, spec: TaskSpec, reading: Reading = STRICT) -> Samples:
    """Reads all labelled samples of a board's file or folder. Raises `BadInput`."""
    model = data.here(spec.model)
    if data.kind in FOLDERS:
        by_record, in_files = spec.privacy.unit == "record", model.features is not None
        data.check_kind(model)
        form = file_form(model, one_a_clip=by_record, in_files=in_files)
        return scan_folder(path, lenient=True, unfinished=reading.unfinished, **form)[0]
    return load_file(path, model, kind=data.kind, reading=reading)
