"""Which head a device predicts with: the shared one, one pulled to it, or its own. Its own images decide.

What stays on a board costs no privacy (Jain et al., Differentially Private Model Personalization, NeurIPS 2021), and
nothing that is computed here may leave it. Candidates are the shared head in three scales, since a noised one may be
too small or too sure, with or without the log of the own label prior; heads pulled to each of these (mean
regularisation, Liu et al., On Privacy and Personalization in Cross-Silo Federated Learning, NeurIPS 2022); heads
trained alone; and the mean of the shared head's and a lone head's log-probabilities. Each is one matrix and one bias.

A cross-validation on the own images chooses by errors and log loss together: errors alone are too coarse for twelve
images. The shared head stays unless another makes fewer errors by more than `MARGIN` of the images.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from hushfleet.config.schema import Checked, Count
from hushfleet.data.samples import LabelledSamples
from hushfleet.model.params import ParamLayout
from hushfleet.model.softmax import fit, log_softmax, rotated

FOLDS = 4
LEAST_IMAGES = 8
MARGIN = 0.02
SCALES = (1.0, 3.0, 0.5)
PENALTIES = (0.1, 0.01, 0.001)
"""On the distance from a scaled shared head."""
PENALTIES_ALONE = (0.01, 0.001, 0.0001)
"""On the length of a head that is trained alone."""

Kind = Literal["shared", "scaled", "pulled", "mean", "alone"]
"""`scaled`: the shared head in another scale or with the own prior; `mean`: of the shared and a lone head."""
SHARED = "the shared head"
_PLAIN: dict[Kind, str] = {
    "shared": "the fleet's model",
    "scaled": "the fleet's model, made more or less sure of itself by the board's own images",
    "pulled": "the fleet's model, trained on with the board's own images",
    "mean": "the mean of the fleet's model and one trained on this board alone",
    "alone": "a model trained on this board alone",
}
WEIGHT, PRIOR = "head.weight", "prior"


@dataclass(frozen=True)
class HeadChoice(Checked):
    """What a device chose and why. Private, as the images that chose it.

    :param name: which candidate it is, in words.
    :param images: how many there were to choose by.
    :param errors: how many of them it got wrong in the cross-validation; likewise `errors_shared` of the shared head as
        it is, and `errors_alone` of the best head that was trained alone. None where there were too few images.
    """

    kind: Kind
    name: str
    images: Count
    errors: Count | None = None
    errors_shared: Count | None = None
    errors_alone: Count | None = None

    @property
    def plain(self) -> str:
        """Which candidate it is, for who has not read this module."""
        return _PLAIN[self.kind]

    @property
    def words(self) -> str:
        """`the shared head (own images wrong: 3 of 36; trained alone 7)`."""
        if self.errors is None:
            return f"{self.name} ({self.images} own images are too few to choose by)"
        others = {"trained alone": self.errors_alone, "the shared head as it is": self.errors_shared}
        others.pop({"alone": "trained alone", "shared": "the shared head as it is"}.get(self.kind, ""), None)
        told = "".join(f"; {name} {errors}" for name, errors in others.items())
        return f"{self.name} (own images wrong, cross-validated: {self.errors} of {self.images}{told})"


@dataclass(frozen=True, eq=False)
class OwnHead:
    """The head that a device predicts with: logits = weight phi + prior.

    :param weight: float32 `[C, F]`.
    :param prior: float32 `[C]`.
    """

    choice: HeadChoice
    weight: np.ndarray
    prior: np.ndarray

    @property
    def params(self) -> np.ndarray:
        """float32 `[d]`, as a linear model's flat vector."""
        return np.concatenate([self.weight.ravel(), self.prior])


class _Head(NamedTuple):
    """weight = scale * shared + pull @ axes, with `pull [C, r]` on rotated features; logits = weight phi + prior."""

    kind: Kind
    name: str
    scale: float
    prior: np.ndarray
    pull: np.ndarray


class _Score(NamedTuple):
    """Of one candidate on images that it has not seen: counts and nats."""

    errors: int = 0
    loss: float = 0.0

    def plus(self, logits: np.ndarray, labels: np.ndarray) -> _Score:
        """:param logits: `[C, m]`."""
        errors = int((logits.argmax(0) != labels).sum())
        return _Score(
            self.errors + errors, self.loss - float(log_softmax(logits)[labels, np.arange(len(labels))].sum())
        )


def is_linear(layout: ParamLayout) -> bool:
    """Whether the model is one linear layer on features, `models/linear.py`: a device then chooses its own head."""
    (weight, *others), names = layout.shapes, layout.names
    return names == (WEIGHT, PRIOR) and len(weight) == 2 and others == [weight[:1]]


def own_head_of(params: np.ndarray, layout: ParamLayout, samples: LabelledSamples) -> OwnHead:
    """The head that a device keeps, by its samples.

    :param params: float32 `[d]`, the global model, of a linear layout.
    """
    shared = layout.unflatten(params)
    return choose_own_head(features_of(samples), samples.y, shared[WEIGHT], shared[PRIOR])


def features_of(samples: LabelledSamples) -> np.ndarray:
    """float32 `[m, F]`, what a linear layer takes of them."""
    x = samples.x
    return x.reshape(len(x), math.prod(x.shape[1:]))


def choose_own_head(features: np.ndarray, labels: np.ndarray, shared: np.ndarray, bias: np.ndarray) -> OwnHead:
    """The best candidate by the own images, fitted to all of them; with too few, the shared head.

    :param features: float32 `[m, F]`, of the device's images.
    :param labels: int64 `[m]`, 0 to C - 1.
    :param shared: float32 `[C, F]`, the global head; `bias`: float32 `[C]`, what it adds to every image's logits.
    """
    images = len(features)
    if images < LEAST_IMAGES:
        return OwnHead(HeadChoice("shared", SHARED, images), shared, bias)
    basis, logits = rotated(features), (shared @ features.T + bias[:, None]).astype(np.float32)

    def heads(rows: np.ndarray) -> Iterator[_Head]:
        return _candidates(basis.z[rows], basis.moments, labels[rows], logits[:, rows])

    folds = np.empty(images, int)
    folds[np.argsort(labels, kind="stable")] = np.arange(images) % FOLDS  # each has its part of every class
    scores: dict[tuple[Kind, str], _Score] = {}
    for fold in range(FOLDS):
        unseen = folds == fold
        for head in heads(~unseen):
            found = head.scale * logits[:, unseen] + head.prior[:, None] + head.pull @ basis.z[unseen].T
            key = head.kind, head.name
            scores[key] = scores.get(key, _Score()).plus(found, labels[unseen])
    plain = scores["shared", SHARED]
    alone = min((score for (kind, _), score in scores.items() if kind == "alone"), key=sum)
    chosen = min(scores, key=lambda key: sum(scores[key]))
    if plain.errors - scores[chosen].errors <= MARGIN * images:
        chosen = "shared", SHARED
    (head,) = (head for head in heads(np.ones(images, bool)) if (head.kind, head.name) == chosen)
    weight = (head.scale * shared + head.pull @ basis.axes).astype(np.float32)
    prior = (head.scale * bias + head.prior).astype(np.float32)
    choice = HeadChoice(*chosen, images, scores[chosen].errors, plain.errors, alone.errors)
    return OwnHead(choice, weight, prior)


def _candidates(z: np.ndarray, moments: np.ndarray, labels: np.ndarray, logits: np.ndarray) -> Iterator[_Head]:
    """All candidates, fitted to some images.

    :param z: float32 `[m, r]`, and `moments [r]` of all images.
    :param logits: float32 `[C, m]`, the shared head's.
    """
    classes = len(logits)
    none, own = np.zeros(classes, np.float32), log_prior(labels, classes)
    bases = [(scale, prior, _words(scale, prior is own)) for scale in SCALES for prior in (none, own)]
    offsets = [scale * logits + prior[:, None] for scale, prior, _ in bases for _ in PENALTIES]
    offsets += [np.zeros_like(logits)] * len(PENALTIES_ALONE)
    pulls = iter(fit(z, moments, labels, np.stack(offsets), np.array(PENALTIES * len(bases) + PENALTIES_ALONE)))
    unmoved = np.zeros((classes, z.shape[1]), np.float32)
    for scale, prior, words in bases:
        yield _Head("shared" if words == SHARED else "scaled", words, scale, prior, unmoved)
        for penalty in PENALTIES:
            yield _Head("pulled", f"a head pulled to {words} (penalty {penalty:g})", scale, prior, next(pulls))
    for penalty in PENALTIES_ALONE:
        pull, words = next(pulls), f"trained alone (penalty {penalty:g})"
        yield _Head("alone", f"a head {words}", 0.0, none, pull)
        # the normalisers of log-probabilities cancel: their mean is a head again
        yield _Head("mean", f"the mean of {SHARED} and one {words}", 0.5, none, pull / 2)


def _words(scale: float, with_prior: bool) -> str:
    return SHARED + ("" if scale == 1 else f" times {scale:g}") + (" with the own prior" if with_prior else "")


def log_prior(labels: np.ndarray, classes: int) -> np.ndarray:
    """The log of the share of each class, one image added to each: float32 `[C]`."""
    counts = np.bincount(labels, minlength=classes) + 1.0
    logs: np.ndarray = np.log(counts / counts.sum()).astype(np.float32)
    return logs
