"""Simulates in seconds how much the devices of a fleet gain by taking part: method `hush` with secure aggregation.

The sums are exact, the noise of a sum is drawn as a whole, and all devices' local steps are one array; nothing is
quantised. Features, personalized heads, the server's half, the rule for rounds, clip norm and principal components,
and the ways to learn alone are the product's own code. The noise depends only on r (`hushfleet.methods.hush_rule`), and
so does a simulation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from hushfleet.data.samples import FeatureSamples
from hushfleet.errors import BadInput
from hushfleet.learning.personalized_head import inputs_of_own, own_logits, personalized_head_of
from hushfleet.methods.hush import TailMean
from hushfleet.methods.hush_rule import steps_at
from hushfleet.methods.method import Steps
from hushfleet.methods.server import ClosedRound
from hushfleet.models.features.public import PublicDirections
from hushfleet.models.features.whitening import BIAS, LEAST_NORM
from hushfleet.params import PRIOR, WEIGHT, ParamLayout
from hushfleet.simulator.engines.fast.local_only_on_features import predict_local_only

STEPS, RATE = 5, 16.0  # of a device's gradient descent in a round
JUDGED = 12  # number of devices of a fleet that are compared with training alone

Figures = dict[str, Any]


@dataclass(frozen=True)
class Images:
    """Features and labels: float32 `[n, F]` and int64 `[n]`, to train on and to test with."""

    x: np.ndarray
    y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray

    @property
    def classes(self) -> int:
        return int(self.y.max()) + 1

    def first_classes(self, count: int) -> Images:
        train, test = self.y < count, self.test_y < count
        return Images(self.x[train], self.y[train], self.test_x[test], self.test_y[test])

    def by_class(self, guesses: np.ndarray) -> np.ndarray:
        """Returns the accuracy on each class of the test set, `[..., C]`, of guesses `[..., n]`."""
        right = guesses == self.test_y
        return np.stack([right[..., self.test_y == c].mean(-1) for c in range(self.classes)], -1)


@dataclass(frozen=True)
class Dealt:
    """Features `[n, m, F]` and labels `[n, m]` of n devices with m images.

    :param mixes: `[n, C]`, the class shares with which a device's images are drawn; its few images have other shares.
    """

    x: np.ndarray
    y: np.ndarray
    mixes: np.ndarray

    @property
    def classes(self) -> int:
        return int(self.mixes.shape[1])

    @property
    def prior(self) -> np.ndarray:
        """The log of the own label shares with one image added to each class, as in method `hush`."""
        counts = np.stack([np.bincount(y, minlength=self.classes) for y in self.y]) + 1
        logs: np.ndarray = np.log(counts / counts.sum(1, keepdims=True)).astype(np.float32)
        return logs

    def first(self, devices: int) -> Dealt:
        return Dealt(self.x[:devices], self.y[:devices], self.mixes[:devices])


def deal(images: Images, *, devices: int, each: int, seed: int, alpha: float | None = None) -> Dealt:
    """Draws each device's mix, and then its images by this mix; other classes replace a class without remaining images.

    :param each: images per device.
    :param alpha: parameter of the Dirichlet distribution of the mixes; None: all classes have equal shares.
    """
    if devices * each > len(images.y):
        raise BadInput(f"{len(images.y)} images are too few for {devices} devices with {each} each")
    rng = np.random.default_rng([seed, 1])
    pools = [list(rng.permutation(np.flatnonzero(images.y == c))) for c in range(images.classes)]
    if alpha is None:
        mixes = np.full((devices, images.classes), 1 / images.classes)
    else:
        mixes = rng.dirichlet(np.full(images.classes, alpha), devices)
    of = []
    for mix in mixes:
        held: list[int] = []
        while len(held) < each:
            left = mix * [bool(pool) for pool in pools] + [1e-9 * bool(pool) for pool in pools]
            for label, count in enumerate(rng.multinomial(each - len(held), left / left.sum())):
                held += [pools[label].pop() for _ in range(min(count, len(pools[label])))]
        of.append(held)
    return Dealt(images.x[np.array(of)], images.y[np.array(of)], mixes)


def leading(features: np.ndarray, directions: int) -> np.ndarray:
    """Returns the features for the shared head: the leading ones, as in the task's graph, or all."""
    if directions >= features.shape[-1] - 1:
        return features
    return _unit_with_bias(features[..., :directions])


def _unit_with_bias(features: np.ndarray) -> np.ndarray:
    norms = np.maximum(np.linalg.norm(features, axis=-1, keepdims=True), np.float32(LEAST_NORM))
    return np.concatenate([features / norms, np.full_like(norms, BIAS)], -1)


def shared_head(dealt: Dealt, server: TailMean, rng: np.random.Generator) -> np.ndarray:
    """Returns the head `[F, C]` at the end of a task.

    :param server: server half, with the noise multiplier of the sum of all devices.
    """
    devices, count, features = dealt.x.shape
    flat, prior = dealt.x.reshape(-1, features), dealt.prior[:, None]
    gram = dealt.x @ dealt.x.transpose(0, 2, 1)
    targets = np.eye(dealt.classes, dtype=np.float32)[dealt.y]
    state, head = server.initial(0), np.zeros((features, dealt.classes), np.float32)
    for number in range(1, server.rounds + 1):
        if number > 1:
            state = server.advance(state, ClosedRound(number - 1, head, head, (), None, None))
        told = server.controls(state, number)
        clip_norm = told.get("clip_norm", server.clip_norm)
        offset = (flat @ head).reshape(targets.shape) + prior
        dual = np.zeros_like(offset)  # the update is x^T dual
        for _ in range(STEPS):
            dual -= RATE / count * (_softmax(offset + gram @ dual) - targets)
        norms = np.sqrt((dual * (gram @ dual)).sum((1, 2)))
        scale = np.divide(clip_norm, norms, out=np.zeros_like(norms), where=norms > 0)
        total = flat.T @ (dual * scale[:, None, None]).reshape(-1, dealt.classes)
        noise = clip_norm * told.get("noise_multiplier", 0.0) * rng.standard_normal(head.shape)
        head = head + ((total + noise) / devices).astype(np.float32)
    return server.final(state, head)


def _softmax(logits: np.ndarray) -> np.ndarray:
    powers: np.ndarray = np.exp(logits - logits.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


@dataclass(frozen=True, eq=False)
class SimulatedFleet:
    """A simulated fleet; accuracies are means over the judged devices.

    :param seed: seed of the noise.
    :param have_order: whether the most important features come first, so that only the first ones are sent.
    :param public: the directions, if public samples determine them: the images have `PublicDirections.own`.
    """

    images: Images
    dealt: Dealt
    seed: int
    have_order: bool = True
    public: PublicDirections | None = None

    def _steps(self, signal: float) -> Steps:
        return steps_at(signal, public=self.public is not None)

    @cached_property
    def judged(self) -> Dealt:
        return self.dealt.first(JUDGED)

    @cached_property
    def _test(self) -> FeatureSamples:
        return _samples(self.images.test_x, self.images.test_y)

    @cached_property
    def _alone(self) -> np.ndarray:
        """Accuracy per class of each way to learn alone, `[ways, devices, C]`."""
        train = [_samples(x, y) for x, y in zip(self.judged.x, self.judged.y, strict=True)]
        found = predict_local_only(train, self._test, classes=self.images.classes)
        said = [list(each.values()) for each in found]
        return self.images.by_class(np.array(said).swapaxes(0, 1))

    @cached_property
    def _best(self) -> np.ndarray:
        """Accuracy on each device's own mix, of the way that is best for all devices on the test."""
        ways = (self._alone * self.judged.mixes).sum(-1)
        best: np.ndarray = ways[ways.mean(1).argmax()]
        return best

    @property
    def alone(self) -> Figures:
        return {"common": float(self._alone.mean((1, 2)).max()), "own": float(self._best.mean())}

    def shared(self, signal: float) -> tuple[np.ndarray, Figures]:
        """Returns the final shared head `[F, C]`, and its accuracies."""
        rounds, clip_norm, directions = self._steps(signal)
        given, tested = self._given(self.dealt.x, directions), self._given(self.images.test_x, directions)
        server = TailMean(rounds, 0.0, clip_norm, math.sqrt(rounds) * len(self.dealt.y) / signal)
        head = shared_head(Dealt(given, self.dealt.y, self.dealt.mixes), server, np.random.default_rng([self.seed, 2]))
        by_class = self.images.by_class((tested @ head).argmax(1))
        return head, {"common": float(by_class.mean()), "own": float((self.judged.mixes @ by_class).mean())}

    def at(self, signal: float) -> Figures:
        """Returns the figures of a fleet with this r: `shared`, the common head; `chosen`, each device's personalized
        head.

        `error` is the standard error of the gain's mean over the judged devices; `worse` is the share of them that are
        more than 0.01 below training alone.
        """
        rounds, clip_norm, directions = self._steps(signal)
        head, shared = self.shared(signal)
        layout = ParamLayout((WEIGHT, PRIOR), (head.T.shape, head.shape[1:]))
        params = np.concatenate([head.T.ravel(), np.zeros(head.shape[1], np.float32)])
        own = (self._with_leading(x, y, directions) for x, y in zip(self.judged.x, self.judged.y, strict=True))
        heads = [personalized_head_of(params, layout, each, signal).params for each in own]
        test = inputs_of_own(self._with_leading(self.images.test_x, self.images.test_y, directions)).x
        classes = self.images.by_class(np.array([own_logits(each, test).argmax(1) for each in heads]))
        found = (classes * self.judged.mixes).sum(-1)
        gain = found - self._best
        return {
            "shared": shared,
            "rounds": rounds,
            "clip_norm": clip_norm,
            "directions": directions,
            "chosen": {"common": float(classes.mean()), "own": float(found.mean())},
            "error": float(gain.std(ddof=1) / math.sqrt(len(gain))),
            "worse": float((gain < -0.01).mean()),
        }

    def _given(self, features: np.ndarray, directions: int) -> np.ndarray:
        if self.public is not None:
            white = self.public.projection(directions)
            return _unit_with_bias(features @ (white.matrix * white.scale))
        return leading(features, directions) if self.have_order else features

    def _with_leading(self, features: np.ndarray, labels: np.ndarray, directions: int) -> FeatureSamples:
        """Returns samples as from a task's graph: the features of the shared head, followed by all features."""
        given = self._given(features, directions)
        if given is features:
            return _samples(features, labels)
        return _samples(np.concatenate([given, features], 1), labels, given.shape[1])


def over_seeds(lines: list[Figures]) -> Figures:
    """Returns means over the seeds of a fleet, and standard deviations of the values that depend on the seed.

    :param lines: for each seed, `alone` and the figures of each `epsilon`.
    """
    points = []
    for epsilon, first in lines[0]["epsilon"].items():
        found = [line["epsilon"][epsilon] for line in lines]
        point = {"epsilon": float(epsilon)} | {key: first[key] for key in ("rounds", "clip_norm", "directions")}
        for head in ("shared", "chosen", "local"):
            if head in first:
                point[head] = {test: mean([each[head][test] for each in found]) for test in ("common", "own")}
        point["std"] = _std([each["shared"]["common"] for each in found])
        gains = [each["chosen"]["own"] - line["alone"]["own"] for each, line in zip(found, lines, strict=True)]
        point |= {"gain_std": _std(gains), "error": mean([each["error"] for each in found])}
        points.append(point | {"worse": mean([each["worse"] for each in found])})
    alone = {test: mean([line["alone"][test] for line in lines]) for test in ("common", "own")}
    return {"seeds": len(lines), "alone": alone, "points": points}


def mean(values: list[float]) -> float:
    return round(float(np.mean(values)), 4)


def _std(values: list[float]) -> float:
    return round(float(np.std(values, ddof=1)), 4) if len(values) > 1 else 0.0


def _samples(features: np.ndarray, labels: np.ndarray, given: int | None = None) -> FeatureSamples:
    return FeatureSamples(features[:, :, None, None], labels, given=given)
