"""The head that a device keeps: against a slow oracle, and what noise, images and classes make of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hushfleet.data.samples import FeatureSamples, Samples
from hushfleet.learning import personalized_head, softmax
from hushfleet.learning.head_choice import HeadChoice
from hushfleet.learning.personalized_head import (
    Mixture,
    default,
    equivalent,
    inputs_of_own,
    local_only_head_of,
    mix_of,
    mixture,
    own_logits,
    personalized_head_of,
)
from hushfleet.methods.hush_rule import steps_at
from hushfleet.params import ParamLayout, is_linear

CLASSES, WIDTH = 4, 20


def images(count: int, *, noise: float = 0.3, seed: int = 0, kept: int = CLASSES) -> tuple[np.ndarray, np.ndarray]:
    """Features around one centre a class, of unit length; `kept` classes only."""
    centres = np.random.default_rng(99).normal(size=(CLASSES, WIDTH))
    rng = np.random.default_rng(seed)
    y = np.arange(count) % kept
    x = centres[y] / np.linalg.norm(centres[y], axis=1, keepdims=True) + rng.normal(0, noise, (count, WIDTH))
    return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32), y.astype(np.int64)


GOOD = (8 * np.random.default_rng(99).normal(size=(CLASSES, WIDTH)) / np.sqrt(WIDTH)).astype(np.float32)
NOISE = np.random.default_rng(1).normal(0, 10, (CLASSES, WIDTH)).astype(np.float32)


def mixed(x: np.ndarray, y: np.ndarray, shared: np.ndarray, r: float | None = 15.0) -> Mixture:
    return mixture(x, y, (shared @ x.T).astype(np.float32), r)


def accuracy(head: Mixture, shared: np.ndarray, x: np.ndarray, y: np.ndarray) -> float:
    return float(((x @ (head.scale * shared + head.pull).T + head.prior).argmax(1) == y).mean())


def head(scale: float, pull: np.ndarray) -> Mixture:
    return Mixture(HeadChoice(), scale, pull, np.zeros(CLASSES, np.float32))


def log_softmax(logits: np.ndarray) -> np.ndarray:
    return logits - np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1, keepdims=True)) - logits.max(
        1, keepdims=True
    )  # fmt: skip


def fitted(x: np.ndarray, y: np.ndarray, offsets: np.ndarray, penalty: float) -> np.ndarray:
    """D `[C, F]` by Newton's steps on all of its entries, float64; `offsets [m, C]`."""
    (count, width), classes = x.shape, offsets.shape[1]
    d = np.zeros((classes, width))

    def loss(d: np.ndarray) -> float:
        lost = -log_softmax(offsets + x @ d.T)[range(count), y].mean()
        return float(lost + penalty / 2 * (d * d).sum())

    for _ in range(60 if count else 0):
        p = np.exp(log_softmax(offsets + x @ d.T))
        slope = (p - np.eye(classes)[y]).T @ x / count + penalty * d
        curve = np.einsum("mc,ck,mf,mg->cfkg", p, np.eye(classes), x, x) - np.einsum("mc,mk,mf,mg->cfkg", p, p, x, x)
        curve = curve.reshape(d.size, d.size) / count + penalty * np.eye(d.size)
        step = np.linalg.solve(curve, slope.ravel()).reshape(d.shape)
        step *= min(1.0, 2.0 / max(np.abs(step).max(), 1e-12))  # far away Newton's step is too long
        while loss(d - step) > loss(d) + 1e-12:  # or it goes to and fro
            step /= 2
        d -= step
    return d


def mix(y: np.ndarray, classes: int) -> tuple[np.ndarray, float]:
    """Shares of the classes, and how likely they differ: Polya's urn with 0.3 balls a class, one to four."""
    urn, odds = np.full(classes, 0.3), 0.25
    for label in y:
        odds *= urn[label] / urn.sum() * classes
        urn[label] += 1
    unlike = odds / (1 + odds)
    return unlike * urn / urn.sum() + (1 - unlike) / classes, unlike


def oracle(
    x: np.ndarray, y: np.ndarray, shared: np.ndarray, r: float
) -> tuple[float, np.ndarray, np.ndarray, np.ndarray]:
    """Weight of the shared head, pull, prior, and the seven weights, from the recipe's words."""
    x = x.astype(np.float64)
    logits, (count, classes) = x @ shared.T.astype(np.float64), (len(y), len(shared))
    path = [(1.0, None), *((1.0, p) for p in (0.1, 0.03, 0.01, 0.003)), (0.4, 0.0003), (0.0, 0.0003)]
    where = 6 if r < 9 else 5 if r < 13 else 4 if r < 17.5 else 3 if r < 22 else 2 if r < 35 else 1 if r < 100 else 0
    where = min(6.0, where + 1.5 * mix(y, classes)[1])
    folds, part = min(5, count), np.empty(count, int)
    for place, image in enumerate(sorted(range(count), key=lambda i: (y[i], i))):
        part[image] = place % folds

    def pull_of(scale: float, penalty: float | None, seen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        shares = mix(y[seen], classes)[0]
        prior = 0.3 * scale * np.log(classes * shares)
        counts = np.bincount(y[seen], minlength=classes) + 0.5
        chance = np.log(counts / counts.mean()) - np.log(classes * shares)
        if penalty is None:
            return 0 * shared, prior
        return fitted(x[seen], y[seen], scale * logits[seen] + prior + chance, penalty), prior

    def means_of(seen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Logits are minus eight times the squared distance from a class's mean, but for what all classes have."""
        middle = x[seen].mean(0) if len(seen) else np.zeros(x.shape[1])
        of = [x[seen][y[seen] == label] for label in range(classes)]
        means = np.array([each.mean(0) if len(each) else middle for each in of])
        return 16 * means, np.array(
            [-8 * (mean @ mean if len(each) else 1) for mean, each in zip(means, of, strict=True)]
        )

    def told(fit: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]], scale: float) -> tuple[float, int]:
        """The log loss of unseen images, and how many are right."""
        lost, right = 0.0, 0
        for fold in range(folds):
            unseen = np.flatnonzero(part == fold)
            pull, prior = fit(np.flatnonzero(part != fold))
            found = log_softmax(scale * logits[unseen] + prior + x[unseen] @ pull.T)
            lost -= found[range(len(unseen)), y[unseen]].sum()
            right += int((found.argmax(1) == y[unseen]).sum())
        return lost, right

    near = [math.exp(-0.7 * abs(place - where)) for place in range(7)]
    fits = [partial(pull_of, *each) for each in path]
    alone, means = told(fits[-1], 0.0), told(means_of, 0.0)
    if means[0] < alone[0] - 2 and means[1] >= alone[1]:
        fits[-1] = means_of
    scores = [
        0.5 * told(fit, scale)[0] - math.log(0.8 * near[place] / sum(near) + 0.2 / 7)
        for place, (fit, (scale, _)) in enumerate(zip(fits, path, strict=True))
    ]
    weights = np.exp(min(scores) - np.array(scores))
    weights /= weights.sum()
    pulls, priors = zip(*(fit(np.arange(count)) for fit in fits), strict=True)
    pull, prior = (np.tensordot(weights, np.stack(each), 1) for each in (pulls, priors))
    return float(weights @ [part for part, _ in path]), pull, prior, weights


@settings(max_examples=12, deadline=None)
@example(count=3, width=5, classes=3, r=14.0, size=6.0, seed=2)  # Newton's full steps do not end there
@example(count=7, width=4, classes=2, r=3.0, size=0.0, seed=2)  # the class means are the last head
@given(
    count=st.sampled_from([1, 2, 3, 7]),
    width=st.integers(2, 5),
    classes=st.integers(2, 4),
    r=st.sampled_from([3.0, 9.0, 12.9, 14.0, 21.0, 30.0, 99.0, math.inf]),
    size=st.sampled_from([0.0, 1.0, 6.0]),
    seed=st.integers(0, 99),
)
def test_the_mixture_is_that_of_the_recipe(
    count: int, width: int, classes: int, r: float, size: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, width))
    x = (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)
    y = rng.integers(0, classes, count)
    shared = (size * rng.normal(size=(classes, width))).astype(np.float32)
    scale, pull, prior, weights = oracle(x, y, shared, r)
    with pytest.MonkeyPatch.context() as patch:  # fits end a little before their optimum
        patch.setattr(softmax, "TOLERANCE", 1e-6)
        patch.setattr(softmax, "MOST_STEPS", 5000)
        found = mixed(x, y, shared, r)
    assert found.scale == pytest.approx(scale, abs=0.02)
    assert (found.choice.shared, found.choice.alone) == pytest.approx((weights[0], weights[-1]), abs=0.02)
    np.testing.assert_allclose(found.pull @ x.T, pull @ x.T.astype(np.float64), atol=0.02 * max(1.0, abs(pull).max()))
    np.testing.assert_allclose(found.prior, prior, atol=0.03)


def test_without_images_it_is_the_shared_head() -> None:
    x, y = images(0)
    found = mixed(x, y, NOISE)
    assert (found.choice, found.scale) == (HeadChoice(), 1.0)
    assert not found.pull.any()


@pytest.mark.parametrize("count", [1, 5, 20, 60, 300])
@pytest.mark.parametrize("r", [None, 5.0, 25.0, math.inf])
def test_it_works_from_one_image_on_and_is_repeatable(count: int, r: float | None) -> None:
    x, y = images(count, noise=0.6)
    one, two = (mixed(x, y, GOOD, r) for _ in range(2))
    assert one.choice == two.choice
    np.testing.assert_array_equal(one.pull, two.pull)
    assert one.pull.dtype == np.float32
    assert np.isfinite(one.pull).all()
    assert one.choice.shared + one.choice.pulled + one.choice.alone == pytest.approx(1)


def test_who_has_many_images_is_hardly_held_back() -> None:
    """A fixed penalty on the mean loss would hold three hundred images as far from their personalized head as
    twenty."""
    x, y = images(300, noise=1.0)
    test = images(2000, noise=1.0, seed=5)
    found = mixed(x, y, NOISE, 15.0)
    basis = softmax.rotated(x)
    best = softmax.fit(basis.z, basis.moments, y, np.zeros((1, CLASSES, 300), np.float32), np.array([1e-4]))[0]
    assert accuracy(found, NOISE, *test) > accuracy(head(0.0, best @ basis.axes), NOISE, *test) - 0.01


def test_noise_in_place_of_a_head_costs_little() -> None:
    x, y = images(60)
    found = mixed(x, y, NOISE, math.inf)  # also where the package says that there is no noise
    assert found.choice.alone > 0.99
    assert found.choice.right >= found.choice.right_alone > found.choice.right_shared
    assert accuracy(found, NOISE, *images(400, seed=5)) > 0.85


def test_a_good_head_is_hardly_moved() -> None:
    x, y = images(12, noise=0.6)
    test = images(400, noise=0.6, seed=5)
    found = mixed(x, y, GOOD, 200.0)
    assert accuracy(found, GOOD, *test) > accuracy(head(1.0, 0 * GOOD), GOOD, *test) - 0.03


def test_a_head_that_knows_half_of_the_classes_is_completed() -> None:
    half = GOOD * (np.arange(CLASSES) < 2)[:, None]
    x, y = images(24, noise=0.5)
    found, test = mixed(x, y, half), images(400, noise=0.5, seed=5)
    assert found.choice.pulled > 0.9
    assert accuracy(found, half, *test) > accuracy(head(1.0, 0 * half), half, *test) + 0.1


def test_who_has_one_class_only_expects_that_class() -> None:
    x, y = images(12, kept=1)
    assert accuracy(mixed(x, y, NOISE), NOISE, *images(50, kept=1, seed=5)) == 1


def test_counts_that_chance_explains_are_not_learned() -> None:
    """Every class is as frequent as the others, and few images have more of some."""
    even, gained = images(400, seed=5), []
    for seed in range(8):
        x, y = images(32, seed=seed)
        kept = np.concatenate([np.flatnonzero(y == label)[:count] for label, count in enumerate((8, 6, 4, 2))])
        x, y = x[kept], y[kept]
        assert mix_of(y, CLASSES).unlike < 0.25
        basis = softmax.rotated(x)
        plain = softmax.fit(basis.z, basis.moments, y, np.zeros((1, CLASSES, 20), np.float32), np.array([1e-3]))[0]
        gained.append(
            accuracy(mixed(x, y, NOISE, 1.0), NOISE, *even) - accuracy(head(0, plain @ basis.axes), NOISE, *even)
        )
    assert np.mean(gained) > 0.01


def heard(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Class 0 is what was taken for one of the others: each image is half one of these, and half of its own kind."""
    x, y = images(count, noise=0.15, seed=seed)
    others = np.random.default_rng([seed, 1]).normal(size=(count, WIDTH)) / np.sqrt(WIDTH)
    near = images(count, noise=0.15, seed=seed + 50)[0][np.random.default_rng([seed, 2]).permutation(count)]
    x = np.where((y == 0)[:, None], near / 2 + others, x)
    return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32), y


def test_class_means_are_the_last_head_where_own_images_favour_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in what the board's gain is compared with."""
    test, gained = heard(400, 99), []
    for seed in range(6):
        x, y = heard(24, seed)
        means = np.stack([x[y == label].mean(0) for label in range(CLASSES)])
        nearest = np.square(test[0][:, None] - means).sum(2).argmin(1)
        alone = local_only_head_of(FeatureSamples(x[:, :, None, None], y), CLASSES)
        found = accuracy(mixed(x, y, NOISE, 5.0), NOISE, *test)
        np.testing.assert_array_equal(own_logits(alone, test[0]).argmax(1), nearest)
        with monkeypatch.context() as patch:
            patch.setattr(personalized_head, "CLEARLY", math.inf)
            gained.append(found - accuracy(mixed(x, y, NOISE, 5.0), NOISE, *test))
        more = local_only_head_of(FeatureSamples(x[:, :, None, None], y), CLASSES + 1)
        assert more[-1] == -8, "a class without images is as far from an image as the mean of all, and a bit more"
        np.testing.assert_allclose(more[-CLASSES - 1 - WIDTH : -CLASSES - 1], 16 * x.mean(0), atol=1e-4)
    assert np.mean(gained) > 0.02


def test_class_means_with_fewer_right_are_no_last_head(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = images(24, noise=0.6, seed=20)  # 12 of unseen images are right and not 14, at a log loss of 35 and not 41
    samples = FeatureSamples(x[:, :, None, None], y)
    found = local_only_head_of(samples, CLASSES)
    monkeypatch.setattr(personalized_head, "CLEARLY", math.inf)
    np.testing.assert_array_equal(found, local_only_head_of(samples, CLASSES))


def test_the_head_alone_has_no_part_of_a_clip_in_two_folds() -> None:
    """Else softmax regression, which then remembers each clip, is not given up for the class means."""
    x, y = heard(24, 0)
    clips = np.repeat(np.arange(24), 2)
    twice = FeatureSamples(x[clips][:, :, None, None], y[clips])
    once, together = (
        local_only_head_of(samples, CLASSES)
        for samples in (FeatureSamples(x[:, :, None, None], y), replace(twice, clips=clips))
    )
    np.testing.assert_allclose(together, once, atol=1e-4)


def test_who_has_few_classes_is_told_so_by_the_labels() -> None:
    shares, unlike = mix_of(np.array([0] * 15 + [1] * 5), CLASSES)
    assert unlike > 0.9
    assert shares[0] > 0.65
    assert shares.sum() == pytest.approx(1)
    assert shares[2] == shares[3] < 0.03
    np.testing.assert_allclose(mix_of(np.array([], int), CLASSES).shares, 0.25)


def test_segments_of_one_clip_are_in_one_fold() -> None:
    """Otherwise a head trained alone seems to know unseen sound: it has seen the next segment of the same clip."""
    rng, layout = np.random.default_rng(0), ParamLayout(("head.weight", "prior"), ((2, 60), (2,)))
    features = np.repeat(rng.standard_normal((40, 60)), 2, axis=0) + 0.01 * rng.standard_normal((80, 60))
    labels, clips = np.repeat(rng.permutation(np.arange(40) % 2), 2), np.repeat(np.arange(40), 2)
    samples = FeatureSamples(features[:, :, None, None].astype(np.float32), labels)
    apart, together = (
        personalized_head_of(np.zeros(122, np.float32), layout, given, None).choice.right_alone
        for given in (samples, replace(samples, clips=clips))
    )
    assert apart > 72
    assert together < 56  # 40 by chance, with a standard error of 6


def test_the_noise_says_where_to_begin() -> None:
    places = [default(r) for r in (0.1, 9, 13, 17.5, 22, 35, 100, math.inf)]
    assert places == [6, 5, 4, 3, 2, 1, 0, 0]
    x, y = images(1)
    weights = [mixed(x, y, 0 * GOOD, r).choice.alone for r in (5.0, 15.0, 50.0)]
    assert all(more > less for more, less in pairwise(weights))


def test_few_values_have_little_noise_and_many_classes_much() -> None:
    """Against ten classes with the directions of the rule, if each sample has a direction of its own."""
    apart, alike = np.eye(20, 40, dtype=np.float32), np.eye(1, 40, dtype=np.float32).repeat(20, 0)
    for r in (4.0, 20.0, 80.0):
        assert equivalent(r, apart, 10, steps_at(r).directions) == pytest.approx(r, rel=0.05)
        assert equivalent(r, apart, 10, 8 * steps_at(r).directions) == pytest.approx(r / 2, rel=0.05)
    assert [equivalent(20.0, apart, classes, 50) for classes in (20, 40)] == [10, 5]
    assert equivalent(10.0, apart, 3, 4) == pytest.approx(10 * (32 * 9 / 8) ** (1 / 3))
    assert equivalent(10.0, alike, 3, 4) == 10, "samples that do not differ carry no signal"
    assert equivalent(10.0, apart[:0], 3, 4) == 10


def test_the_unit_of_the_samples_changes_nothing() -> None:
    """Penalties are for features of norm 1, and a linear model without features has samples of any size."""
    x, y = images(20, noise=0.6)
    layout = ParamLayout(("head.weight", "prior"), (GOOD.shape, (CLASSES,)))
    found = []
    for unit in (1.0, 1e-4, 300.0):
        samples = Samples(unit * x[:, :, None, None], y, (0.0,) * WIDTH, (1.0,) * WIDTH)
        params = np.concatenate([(NOISE + GOOD).ravel() / unit, np.zeros(CLASSES)]).astype(np.float32)
        head, alone = personalized_head_of(params, layout, samples, 15.0).params, local_only_head_of(samples, CLASSES)
        shown = unit * images(400, noise=0.6, seed=5)[0]
        found.append((own_logits(head, shown), own_logits(alone, shown)))
    for each, first in zip(found[1:], found[:1] * 2, strict=True):
        for logits, expected in zip(each, first, strict=True):
            np.testing.assert_allclose(logits, expected, rtol=1e-2, atol=1e-2 * np.abs(expected).max())


def test_of_a_linear_models_flat_vector() -> None:
    layout = ParamLayout(("head.weight", "prior"), (GOOD.shape, (CLASSES,)))
    rng, bias = np.random.default_rng(0), np.array([0, 0, -5, -5], np.float32)
    samples = Samples(rng.integers(0, 256, (20, 1, WIDTH, 1), np.uint8), rng.integers(0, CLASSES, 20), (0.0,), (1.0,))
    head = personalized_head_of(np.concatenate([GOOD.ravel(), bias]), layout, samples, 15.0)
    x = samples.x.reshape(20, WIDTH)
    size = float(np.sqrt((x.astype(float) ** 2).sum(1).mean()))
    again = mixture(x / size, samples.y, GOOD @ x.T + bias[:, None], equivalent(15.0, x / size, CLASSES, WIDTH))
    assert is_linear(layout)
    assert head.choice == again.choice
    weight, prior = layout.unflatten(head.params).values()
    np.testing.assert_allclose(weight, again.scale * GOOD + again.pull / size, rtol=1e-5)
    np.testing.assert_allclose(prior, again.scale * bias + again.prior, rtol=1e-5)
    assert personalized_head_of(head.params, layout, samples.take(slice(0, 0)), None).choice.images == 0
    assert not is_linear(ParamLayout(("head.weight", "head.bias"), ((2, 3), (2,))))


def test_of_features_it_takes_all_and_the_shared_head_the_first_ones() -> None:
    x, y = images(20)
    first = (x[:, :6] / np.linalg.norm(x[:, :6], axis=1, keepdims=True)).astype(np.float32)
    layout = ParamLayout(("head.weight", "prior"), ((CLASSES, 6), (CLASSES,)))
    samples = FeatureSamples(np.concatenate([first, x], 1)[:, :, None, None], y, given=6)
    head = personalized_head_of(
        np.concatenate([GOOD[:, :6].ravel(), np.ones(CLASSES, np.float32)]), layout, samples, 15.0
    )
    logits = GOOD[:, :6] @ first.T + 1
    expected = mixture(x, y, logits, equivalent(15.0, x, CLASSES, given=6))
    assert head.params.shape == (CLASSES * (6 + WIDTH + 1),)
    assert head.choice == expected.choice
    found = own_logits(head.params, inputs_of_own(samples).x)
    again = expected.scale * logits + expected.pull @ x.T + expected.prior[:, None]
    np.testing.assert_allclose(found.T, again, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("choice", "told"),
    [
        (HeadChoice(), "the fleet's model (there are no own samples)"),
        (
            HeadChoice(36, 0.5, 0.3, 0.2, 30, 29, 27),
            "50 % the fleet's model, 30 % the fleet's model fitted to own samples, 20 % trained alone (own samples "
            "right, cross-validated: 30 of 36; the fleet's model 29, trained alone 27)",
        ),
    ],
)
def test_in_words(choice: HeadChoice, told: str) -> None:
    assert choice.text == told
