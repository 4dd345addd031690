"""Autoencoders: the target is the input; the threshold, the samples that it is chosen by, and the AUROC."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from hushfleet.data.samples import Samples
from hushfleet.data.targets import Targets
from hushfleet.errors import BadInput, Malformed
from hushfleet.learning.anomaly import Threshold, divided, judging, threshold
from hushfleet.learning.batch import ClientBatch
from hushfleet.learning.evaluation import evaluate
from hushfleet.learning.graph_session import GradientGraph
from hushfleet.losses import auroc, normal
from hushfleet.models import get_model
from hushfleet.models.export import export_graphs
from hushfleet.models.torch_gradient import TorchGradient
from hushfleet.objectives import Objective
from hushfleet.schema import from_plain, to_plain

SHAPE, VALUES = (2, 1, 3), 6
TARGETS = Targets("reconstruction", false_alarms=0.1)
RECONSTRUCTION = Objective("reconstruction")
LAYOUT = get_model("autoencoder", input_shape=SHAPE).layout


def samples(count: int, faults: int = 0, seed: int = 0) -> Samples:
    rng = np.random.default_rng(seed)
    labels = (np.arange(count) >= count - faults).astype(np.float32)[:, None]
    return Samples(rng.normal(3, 2, (count, *SHAPE)).astype(np.float32), labels, (3.0, 1.0), (2.0, 4.0), TARGETS)


@cache
def network() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(VALUES, 3), nn.Linear(3, VALUES))


def test_the_gradient_is_that_of_the_error_of_the_input() -> None:
    """By plain PyTorch modules on the normalised samples, for each runtime that boards and simulations have."""
    model, own = get_model("autoencoder", input_shape=SHAPE), samples(5)
    params = model.init(3)
    nn.utils.vector_to_parameters(torch.from_numpy(params), network().parameters())
    x = torch.from_numpy((own.images - np.array([3, 1]).reshape(2, 1, 1)) / np.array([2, 4]).reshape(2, 1, 1)).float()
    errors = F.mse_loss(network()(x), x.flatten(1), reduction="none").mean(1)
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(errors.mean(), list(network().parameters()))])
    graphs = export_graphs(model, objective=RECONSTRUCTION)
    of_torch = TorchGradient(model, objective=RECONSTRUCTION)
    for run in (of_torch, GradientGraph(graphs.gradient, model.layout, objective=RECONSTRUCTION)):
        batch = ClientBatch(run, own.x, own.y, (), {}, np.empty_like(params))
        loss, gradient = batch.mean(params)
        assert loss == pytest.approx(float(errors.detach().mean()), rel=1e-5)
        np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-6)
        losses, each = batch.each(params)
        np.testing.assert_allclose(losses, errors.detach(), rtol=1e-5)
        np.testing.assert_allclose(each.mean(0), expected, rtol=1e-4, atol=1e-6)
    twice = [np.stack([array, array]) for array in (params, own.x, own.y)]
    np.testing.assert_allclose(of_torch.clients(*twice)[1], np.stack([expected] * 2), rtol=1e-4, atol=1e-6)


@given(st.lists(st.integers(0, 9), max_size=12), st.lists(st.integers(0, 9), max_size=12))
def test_auroc_is_the_share_of_pairs_in_the_right_order(normal: list[int], faults: list[int]) -> None:
    pairs = [(f > n) + (f == n) / 2 for f in faults for n in normal]
    found = auroc(np.array(normal, float), np.array(faults, float))
    assert found == pytest.approx(np.mean(pairs)) if pairs else np.isnan(found)


def test_a_model_is_scored_by_auroc_and_by_the_error_of_normal_samples() -> None:
    tested, rng = samples(40, faults=15), np.random.default_rng(2)
    params = rng.standard_normal((VALUES, VALUES)).astype(np.float32)
    errors = np.square(tested.y @ params - tested.y).mean(1)
    found = evaluate(lambda p, x: x.reshape(len(x), -1) @ p, params, tested)
    assert found[:2] == pytest.approx((auroc(errors[:25], errors[25:]), errors[:25].mean()), rel=1e-5)
    unlabelled = evaluate(lambda p, x: x.reshape(len(x), -1) @ p, params, samples(4))
    assert np.isnan(unlabelled.accuracy)
    assert unlabelled.loss > 0


@given(st.integers(1, 60), st.sampled_from([0.01, 0.05, 0.1, 0.5]), st.integers(0, 999))
def test_the_threshold_is_the_smallest_that_keeps_to_the_false_alarms(count: int, wanted: float, seed: int) -> None:
    """A further sample of the same kind has any rank among the others with the same probability."""
    errors = np.random.default_rng(seed).permutation(count).astype(float)
    found = Threshold.of(errors, wanted)
    above = (errors >= found.error).sum()  # ranks of the further one, from the top, at which it lies above
    assert found.false_alarms == pytest.approx(above / (count + 1))
    assert found.false_alarms <= wanted or above == 1
    assert (above + 1) / (count + 1) > wanted
    assert found.held_out == count


def test_every_fifth_normal_sample_is_held_out_and_later_ones_change_nothing() -> None:
    these = samples(16, faults=3).take(np.array([0, 15, *range(1, 15)]))  # the second, and the last two, are faults
    these.images[:, 0, 0, 0] = np.arange(16)

    def numbers(found: Samples) -> list[int]:
        return found.images[:, 0, 0, 0].astype(int).tolist()

    train, held = map(numbers, divided(these, by_content=False))
    assert held == [5, 10]
    assert train == [0, 2, 3, 4, 6, 7, 8, 9, 11, 12, 13]
    assert numbers(divided(these.take(slice(7)), by_content=False)[1]) == [5]
    for by_content in (False, True):  # clips of two segments
        clips = replace(these, clips=np.arange(16) // 2)
        parts = [set(each.clips.tolist()) for each in divided(clips, by_content=by_content)]
        assert not set.intersection(*parts)
    few = judging(samples(3), LAYOUT, by_content=False)
    with pytest.raises(BadInput, match="every 5th normal sample"):
        threshold(lambda p, x: x.reshape(len(x), -1), np.zeros(1), LAYOUT, few)


def test_by_content_one_sample_less_changes_nothing_for_the_others() -> None:
    """The unit `record` promises that two sets of samples look alike that differ in one: they must train alike."""
    all_of_them = samples(200, faults=3)

    def trained(places: np.ndarray) -> set[bytes]:
        these = all_of_them.take(places)
        train, held = ([each.tobytes() for each in part.images] for part in divided(these, by_content=True))
        assert len(train) + len(held) == normal(these.labels).sum()
        assert not set(train) & set(held)
        return set(train)

    whole, gone = trained(np.arange(200)), all_of_them.images[17].tobytes()
    assert 0.7 < len(whole) / 197 < 0.9
    assert trained(np.delete(np.arange(200), 17)) == whole - {gone}
    assert not len(divided(all_of_them.take(slice(0)), by_content=True)[0])


def test_the_task_says_the_false_alarms_and_old_packages_read_as_ever() -> None:
    assert from_plain(Targets, to_plain(TARGETS)) == TARGETS
    assert "false_alarms" not in to_plain(Targets())
    with pytest.raises(Malformed, match="false_alarms = None: must be given for 'reconstruction' alone"):
        from_plain(Targets, {"loss": "reconstruction"})
