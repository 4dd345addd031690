"""The model that listens: loaded once, and again when the client has made a newer one, or own samples have changed."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from hushfleet.data.form import SAMPLE_RATE, SEGMENT_S, SampleForm
from hushfleet.data.sound import Pcm
from hushfleet.edge_client.board.config import DeviceConfig
from hushfleet.edge_client.board.process import return_idle_code, return_small_blocks
from hushfleet.edge_client.labelling.class_folders import opened_store
from hushfleet.edge_client.worker.personalized_model import PersonalizedModel, personalized_model
from hushfleet.edge_client.worker.predict import LoadedGraphs, graphs_of, ordered, outputs_of, samples_of
from hushfleet.errors import BadInput, GraphRefused, HushfleetError

if TYPE_CHECKING:
    from hushfleet.edge_client.worker.unusual import Judge

LOOK_S = 10.0
_NO_TASK = SampleForm(sample_rate=SAMPLE_RATE, segment_s=SEGMENT_S)

_log = logging.getLogger("hushfleet.edge")


class ModelInUse:
    """The personalized model of a board beside its client.

    Before the first task there is none, and sound has the form of a task that says nothing about it.

    :param clock: monotonic seconds.
    """

    def __init__(self, config: DeviceConfig, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._config, self._clock, self._look_at = config, clock, -float("inf")
        self._stamp: object = None
        self._said = set[str]()
        self._loaded: tuple[PersonalizedModel, LoadedGraphs] | None = None
        self._judge: Judge | None = None
        self.look()

    @property
    def form(self) -> SampleForm:
        """How this board's sound is cut."""
        return self._loaded[0].spec.model.form if self._loaded else _NO_TASK

    @property
    def about(self) -> dict[str, str]:
        """The names of the task and of the model, for other programs."""
        return {"task": self._loaded[0].spec.task, "model": self._loaded[0].kind} if self._loaded else {}

    def look(self) -> None:
        """Loads the model if the store has changed since, or the samples that it judges by, at most every `LOOK_S`
        seconds.

        If there is none that can be used, this is logged once, the one before stays, and it is tried again.
        """
        if (now := self._clock()) < self._look_at:
            return
        self._look_at = now + LOOK_S
        store = self._config.store_path
        files = (os.stat(each) for each in (store, store.with_name(f"{store.name}-wal")) if each.exists())
        stamp = [(each.st_ino, each.st_mtime_ns, each.st_size) for each in files]
        if stamp == self._stamp and (not self._judge or not self._loaded or self._judge.is_of(self._loaded[0])):
            return
        try:
            self._load()
            self._stamp = stamp
        except HushfleetError as error:
            self._warn(error)

    def predict(self, segment: Pcm) -> tuple[tuple[str, float], ...]:
        """Returns classes and probabilities as `Prediction.classes`; none before the first model, or if it fails."""
        if self._loaded is None or self._judge is not None:
            return ()
        (own, graphs), values = self._loaded, segment[None, None, None]
        try:
            [found] = outputs_of(own, graphs, samples_of(own.spec.model, values))
        except GraphRefused as error:  # of this segment; the next may be another
            self._warn(error)
            return ()
        return ordered(own.spec.model, found) if np.isfinite(found).all() else ()

    def score(self, segment: Pcm) -> float | None:
        """Returns the segment's error divided by this board's threshold; None if the task predicts classes, before the
        first model, or if it fails."""
        if self._loaded is None or self._judge is None:
            return None
        try:
            [found] = self._judge.scores(samples_of(self._loaded[0].spec.model, segment[None, None, None])).tolist()
        except GraphRefused as error:
            self._warn(error)
            return None
        return float(found) if np.isfinite(found) else None

    def _warn(self, news: object) -> None:
        if str(news) not in self._said:
            _log.warning("%s", news)
        self._said.add(str(news))

    def _load(self) -> None:
        with opened_store(self._config) as store:
            if store is None:
                raise BadInput("the client has not run yet, so there is no model: it has to take part in one round")
            own = personalized_model(store)
            targets = own.spec.model.targets
            if not (own.spec.model.form.sample_rate and (targets.are_classes or targets.are_inputs)):
                raise BadInput(f"the task {own.spec.task} has neither classes of sound nor normal sound")
            same = self._loaded if self._loaded and self._loaded[0].spec.digest == own.spec.digest else None
            graphs = same[1] if same else graphs_of(store, own.spec, stay=True)
            judge = self._judge if same and self._judge and self._judge.is_of(own) else None
            if targets.are_inputs and judge is None:
                from hushfleet.edge_client.worker.unusual import Judge

                judge = Judge(own, self._config.data, graphs)
            self._loaded, self._judge = (own, graphs), judge
        if targets.are_classes and (no_alarm := self._config.listen.no_alarm) not in own.spec.model.class_names:
            self._warn(
                f"the task {own.spec.task} has no class {no_alarm!r}, so any sound may be an alarm: name the task's "
                "class of other sounds in listen.no_alarm, or ask for a task that has one"
            )
        self.predict(np.zeros(own.spec.model.image_shape[2], np.int16))  # loads all that listening needs
        return_small_blocks()
        return_idle_code()
