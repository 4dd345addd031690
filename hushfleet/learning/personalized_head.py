"""Makes the head that a device predicts with: a mixture of the shared head, heads pulled to it, and one trained alone.

Data that stays on a board costs no privacy (Jain et al., Differentially Private Model Personalization, NeurIPS 2021),
and nothing that is computed here may leave the board. The seven heads form one path. It starts with the shared head H.
Then come heads that decreasing penalties pull to H (mean regularisation, Liu et al., On Privacy and Personalization in
Cross-Silo Federated Learning, NeurIPS 2022): their logits are the logits of H plus D phi, where D minimises the
cross-entropy on the own images plus penalty / 2 |D|^2. The last of these takes only a part of H: where the own images
have no features, no penalty corrects H. The path ends with a head that does not use H: softmax regression, or the
class means, if own images that they were not computed from clearly favour these (`CLEARLY`). That is so on boards that
hear, whose false alarms are a class: they look like words, and softmax regression is fitted to the few that it has.

Two terms determine the weight of a head. First, the noise in H is public, and determines where on the path a device
should be without images: the logarithm of a probability, which falls by `STEP` with each step away from there, unless
the device's data differ from the fleet's (`UNLIKE_FLEET`). Second, the own images: `EVIDENCE` times the log loss of a
head on images that it was not fitted to. Twenty images are too few to choose one head reliably. So the heads are
averaged with weights exp(-both terms); the mean is a head again, because logits add up.

A few images of equally frequent classes have different counts by chance. A head fitted to them learns these counts, and
predicts the classes that happened to be frequent. `mix_of` computes how likely chance explains the counts, and
estimates the true class mix. The difference of the counts from this mix is an offset in each fit, but not in the head
(logit adjustment: Menon et al., Long-tail learning via logit adjustment, ICLR 2021). If the class shares really differ,
`SHIFT` times the logarithm of the mix is added to H.

If H is noisy and the owner has named images without labels, their soft means are half of the head (`soft_means`).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from hushfleet.data.samples import FeatureSamples, LabelledSamples, records_of
from hushfleet.learning.head_choice import HeadChoice
from hushfleet.learning.soft_means import soft_means
from hushfleet.learning.softmax import Rotated, fit, log_softmax, rotated
from hushfleet.params import PRIOR, WEIGHT, ParamLayout

EPOCH = 2
"""See `hushfleet.methods.Published.epoch`."""
FOLDS = 5
HEADS = ((1.0, 0.1), (1.0, 0.03), (1.0, 0.01), (1.0, 0.003), (0.4, 0.0003), (0.0, 0.0003))
"""The fitted heads, along the path: the part of the shared head that each begins with, and its penalty on the distance
from there, for features of norm 1; with more than `IMAGES` images, smaller in proportion."""
_PARTS = np.array([1.0, *(part for part, _ in HEADS), 0.0], np.float32)
"""The part of the shared head in itself, in each fitted head, and in the class means."""
IMAGES = 20
EVIDENCE = 0.5
STEP = 0.7
CLEARLY, SHARPNESS = 2.0, 8.0
"""The class means are the last head if their log loss on unseen images is lower by so much, with as many right. Their
logits are minus the squared distance from a mean, times this, for features of norm 1."""
UNLIKE_FLEET = 0.2
"""The prior probability that a device's data differ from the fleet's, so that each place on the path is as likely."""
UNLIKE, CONCENTRATION = 0.2, 0.3
"""The prior probability that the classes' shares differ; the concentration for each class of the Dirichlet distribution
of differing shares."""
SHIFT, STEPS_OF_UNLIKE = 0.3, 1.5
"""If the class shares certainly differ: the part of log(mix) that is added to H; the steps from the default towards the
head trained alone, because a few classes are easier to learn alone."""
_SIGNALS = (9.0, 13.0, 17.5, 22.0, 35.0, 100.0)
"""At each of these values of r (`hushfleet.methods.hush_rule`) the default is one step nearer to the shared head."""
_VALUES, _LEAST_VALUES = 2.5 * 9, 32 * 9
"""They were measured with updates of so many values per r and at least: the directions of the rule, and ten classes."""


@dataclass(frozen=True, eq=False)
class DeviceHead:
    """The head that a device predicts with.

    :param params: float32, the flat vector of a linear model; for all features, even if the shared head takes only the
        first ones.
    """

    choice: HeadChoice
    params: np.ndarray


class Mixture(NamedTuple):
    """A mixture of heads: logits = scale * (the shared head's logits) + pull phi + prior.

    :param pull: float32 `[C, F]`.
    :param prior: float32 `[C]`.
    """

    choice: HeadChoice
    scale: float
    pull: np.ndarray
    prior: np.ndarray


class Mix(NamedTuple):
    """The estimated class shares of a device's data, from the labels of its images.

    :param shares: float64 `[C]`.
    :param unlike: the probability that the classes' shares differ.
    """

    shares: np.ndarray
    unlike: float


def personalized_head_of(
    params: np.ndarray,
    layout: ParamLayout,
    samples: LabelledSamples,
    signal: float | None,
    unlabelled: LabelledSamples | None = None,
) -> DeviceHead:
    """Makes a device's personalized head from its samples.

    :param params: float32 `[d]`, the global model, of a linear layout.
    :param signal: `TaskSpec.signal`.
    :param unlabelled: samples whose labels have no meaning, for a task that `takes_unlabelled`.
    """
    shared, features = layout.unflatten(params), features_of(samples)
    size = _size(features)

    def logits_of(samples: LabelledSamples) -> np.ndarray:
        x = samples.x.reshape(len(samples), shared[WEIGHT].shape[1])
        logits: np.ndarray = shared[WEIGHT] @ x.T + shared[PRIOR][:, None]
        return logits.astype(np.float32)

    features = features / size
    if signal is not None:
        signal = equivalent(signal, features, *shared[WEIGHT].shape)
    head = mixture(features, samples.y, logits_of(samples), signal, records_of(samples.clips, len(samples)))
    if unlabelled is not None and len(unlabelled) and len(samples):
        head = with_unlabelled(head, features, samples.y, features_of(unlabelled) / size, logits_of(unlabelled))
    choice, scale, pull, prior = head
    weight, pull, prior = scale * shared[WEIGHT], pull / size, scale * shared[PRIOR] + prior
    whole = np.concatenate([weight, pull], 1) if _has_more(samples) else weight + pull
    return DeviceHead(choice, np.concatenate([whole.ravel(), prior]).astype(np.float32))


def local_only_head_of(samples: LabelledSamples, classes: int) -> np.ndarray:
    """Returns the head that does not use the shared one, the last of the path, in the form of `DeviceHead.params`.

    :param samples: at least one.
    """
    features = features_of(samples)
    size = _size(features)
    basis, logits = rotated(features / size), np.zeros((classes, len(samples)), np.float32)
    last = _places(_unseen(basis, samples.y, logits, records_of(samples.clips, len(samples))), samples.y)[-1]
    pulls, priors = _fitted(basis, samples.y, logits, np.ones(len(samples), bool))
    weight = (pulls[last] @ basis.axes / size).astype(np.float32)
    return np.concatenate([weight.ravel(), priors[last, :, 0]])


def inputs_of_own(samples: LabelledSamples) -> LabelledSamples:
    """Returns samples whose `x` is a personalized head's input: all features, the shared head's and then the device's
    own."""
    return replace(samples, given=None) if isinstance(samples, FeatureSamples) else samples


def own_logits(params: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Returns logits `[n, C]` of `DeviceHead.params`; `x` is in the form that `inputs_of_own` gives."""
    rows = x.reshape(len(x), math.prod(x.shape[1:]))
    classes = len(params) // (rows.shape[1] + 1)
    logits: np.ndarray = rows @ params[:-classes].reshape(classes, -1).T + params[-classes:]
    return logits


def features_of(samples: LabelledSamples) -> np.ndarray:
    """Returns the input of a head that a device fits alone, float32 `[m, F]`."""
    if isinstance(samples, FeatureSamples):
        return samples.own
    x = samples.x
    return x.reshape(len(x), math.prod(x.shape[1:]))


def _has_more(samples: LabelledSamples) -> bool:
    return isinstance(samples, FeatureSamples) and samples.given is not None


def mixture(
    features: np.ndarray,
    labels: np.ndarray,
    logits: np.ndarray,
    signal: float | None,
    records: tuple[np.ndarray, np.ndarray] | None = None,
) -> Mixture:
    """Returns the weighted mean of all heads on the path, each fitted to all own images.

    :param features: float32 `[m, F]`, the features of the device's images, of norm 1.
    :param labels: int64 `[m]`, 0 to C - 1.
    :param logits: float32 `[C, m]`, the shared head's logits.
    :param signal: r, `equivalent` to that of ten classes; None if it is not known: the own images alone decide.
    :param records: as `records_of` returns them: a record is in one fold. None: each image is one.
    """
    classes, images = logits.shape
    if not images:
        none = np.zeros((classes, features.shape[1]), np.float32)
        return Mixture(HeadChoice(), 1.0, none, np.zeros(classes, np.float32))
    basis = rotated(features)
    unseen = _unseen(basis, labels, logits, records or records_of(None, images))
    places = _places(unseen, labels)
    unseen = unseen[places]
    loss = _losses(unseen, labels)
    weights = np.exp(EVIDENCE * (loss.min() - loss))
    if signal is not None:
        weights *= _odds(min(len(HEADS), default(signal) + STEPS_OF_UNLIKE * mix_of(labels, classes).unlike))
    weights /= weights.sum()
    mixed = np.tensordot(weights, unseen, 1)
    right = [int((each.argmax(0) == labels).sum()) for each in (mixed, unseen[0], unseen[-1])]
    shared, alone = float(weights[0]), float(weights[-1])
    choice = HeadChoice(images, shared, min(1.0, float(weights[1:-1].sum())), alone, *right)
    pulls, priors = (
        np.tensordot(weights, each[places], 1) for each in _fitted(basis, labels, logits, np.ones(images, bool))
    )
    pull, prior = (pulls @ basis.axes).astype(np.float32), priors[:, 0].astype(np.float32)
    return Mixture(choice, float(weights @ _PARTS[places]), pull, prior)


def _unseen(
    basis: Rotated, labels: np.ndarray, logits: np.ndarray, records: tuple[np.ndarray, np.ndarray]
) -> np.ndarray:
    """Returns the logits `[k, C, m]` of all heads for images that they were not fitted to."""
    first, number = records
    folds = np.empty(len(first), int)
    folds[np.argsort(labels[first], kind="stable")] = np.arange(len(first)) % FOLDS  # each has its part of every class
    folds = folds[number]
    unseen: np.ndarray = _PARTS[:, None, None] * logits
    for fold in range(min(FOLDS, len(first))):
        out = folds == fold
        pulls, priors = _fitted(basis, labels, logits, ~out)
        unseen[:, :, out] += priors + pulls @ basis.z[out].T
    return unseen


def _fitted(basis: Rotated, labels: np.ndarray, logits: np.ndarray, kept: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Fits all heads: the shared one, those of `HEADS`, and the class means.

    :param kept: bool `[m]`, the images that they are fitted to.

    Returns what is added to the part of the shared head: `[k, C, r]` in the basis, and `[k, C, 1]`.
    """
    z, labels, classes = basis.z[kept], labels[kept], len(logits)
    priors, chance = _offsets(labels, classes)
    offsets = _PARTS[1:-1, None, None] * logits[:, kept] + priors[1:-1] + chance
    pulls = np.zeros((len(_PARTS), classes, z.shape[1]), np.float32)
    pulls[1:-1] = fit(z, basis.moments, labels, offsets, _penalties(len(kept)))
    means, squares = _class_means(z, labels, classes)
    pulls[-1], priors[-1] = 2 * SHARPNESS * means, -SHARPNESS * squares
    return pulls, priors


def _class_means(z: np.ndarray, labels: np.ndarray, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the means float32 `[C, r]`, and the squares of their norms `[C, 1]`. A class without images has the mean
    of all images, and the norm 1: it is less likely than a class at this place."""
    are = (np.arange(classes)[:, None] == labels).astype(np.float32)
    has = are.any(1, keepdims=True)
    are = np.where(has, are, np.float32(1))
    means = are @ z / np.maximum(are.sum(1, keepdims=True), 1)
    return means, np.where(has, np.square(means).sum(1, keepdims=True), np.float32(1))


def _places(unseen: np.ndarray, labels: np.ndarray) -> list[int]:
    """Returns the heads of the path: without the class means, or with them as the last one."""
    loss, right = _losses(unseen, labels), (unseen.argmax(1) == labels).sum(1)
    clearly = loss[-1] < loss[-2] - CLEARLY and right[-1] >= right[-2]
    return [*range(len(HEADS)), len(HEADS) + int(clearly)]


def _losses(unseen: np.ndarray, labels: np.ndarray) -> np.ndarray:
    losses: np.ndarray = -log_softmax(unseen)[:, labels, np.arange(len(labels))].sum(1, dtype=np.float64)
    return losses


def with_unlabelled(
    head: Mixture, features: np.ndarray, labels: np.ndarray, unlabelled: np.ndarray, logits: np.ndarray
) -> Mixture:
    """Returns the mean of the mixture and the head from the soft means of all images.

    :param unlabelled: float32 `[u, F]`.
    :param logits: float32 `[C, u]`, the shared head's logits for these.
    """
    seen = head.scale * logits + head.pull @ unlabelled.T + head.prior[:, None]
    weight, bias = soft_means(features, labels, unlabelled, seen, mix_of(labels, len(logits)).unlike)
    pull, prior = ((mine + means).astype(np.float32) / 2 for mine, means in ((head.pull, weight), (head.prior, bias)))
    return Mixture(replace(head.choice, unlabelled=len(unlabelled)), head.scale / 2, pull, prior)


def mix_of(labels: np.ndarray, classes: int) -> Mix:
    """Returns the mean of two estimates, equal and differing shares, weighted by their probability given the labels."""
    counts = np.bincount(labels, minlength=classes)
    images, least = len(labels), CONCENTRATION
    alike = math.log(1 - UNLIKE) - images * math.log(classes)
    differing = math.log(UNLIKE) + math.lgamma(classes * least) - math.lgamma(classes * least + images)
    differing += sum(math.lgamma(count + least) - math.lgamma(least) for count in counts)
    unlike = float(np.exp(differing - np.logaddexp(alike, differing)))
    return Mix(unlike * (counts + least) / (images + classes * least) + (1 - unlike) / classes, unlike)


def _offsets(labels: np.ndarray, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns offsets of a fit's logits: float32 `[k, C, 1]`, which the head keeps, and `[C, 1]`, which it drops."""
    mix = np.log(mix_of(labels, classes).shares * classes)
    counts = np.bincount(labels, minlength=classes) + 0.5
    chance = np.log(counts / counts.mean()) - mix
    return SHIFT * _PARTS[:, None, None] * mix.astype(np.float32)[:, None], chance.astype(np.float32)[:, None]


def _penalties(images: int) -> np.ndarray:
    return np.array([penalty for _, penalty in HEADS]) * min(1.0, IMAGES / images)


def _odds(start: float) -> np.ndarray:
    """Returns the prior probabilities of the places on the path, for a device that should be at `start`."""
    near = np.exp(-STEP * np.abs(np.arange(1 + len(HEADS)) - start))
    odds: np.ndarray = (1 - UNLIKE_FLEET) * near / near.sum() + UNLIKE_FLEET / len(near)
    return odds


def _size(features: np.ndarray) -> float:
    """Returns the root of the mean squared norm, by which features get the norm 1 that penalties assume; 1 for none."""
    return math.sqrt(np.square(features, dtype=np.float64).sum() / max(1, len(features))) or 1.0


def default(signal: float) -> int:
    """Returns the place on the path for a device without images: 0 is the shared head, the last is trained alone.

    :param signal: r, `equivalent` to that of ten classes.

    >>> default(1000.0), default(1.0)
    (0, 6)
    """
    return len(_SIGNALS) - bisect_right(_SIGNALS, signal)


def equivalent(signal: float, features: np.ndarray, classes: int, given: int) -> float:
    """Returns the r with which a shared head of ten classes, with directions by the rule, is as good.

    The noise of a value does not depend on the number of values, but the norm of an update does not grow with it, so a
    head of more values has less signal. The cube root was chosen by measurement. Features whose samples hardly differ
    carry little signal even in a small head. With more than ten classes, each has a smaller part of an update.

    :param features: float32 `[m, F]`, of norm 1.
    :param given: the number of features that the shared head takes.
    """
    ratio = max(_VALUES * signal, _LEAST_VALUES) / ((classes - 1) * given)
    if ratio > 1:
        differ = 1 - float(np.square(features.mean(0)).sum()) if len(features) else 0.0
        ratio = max(1.0, ratio * min(1.0, 2 * differ))
    part: float = ratio ** (1 / 3)
    return signal * (part if classes <= 10 else min(part, 10 / classes))
