"""FedBN against the loop of its paper, and which layers it takes for normalisation layers."""

from __future__ import annotations

import numpy as np
import pytest

from hushfleet.errors import Malformed
from hushfleet.methods.papers.fedbn import NormLayers
from hushfleet.models.resnet import resnet8_gn
from hushfleet.params import ParamLayout
from support.quadratics import Fleet, assert_close

RATE, STEPS = 0.1, 3


def layout_of(seed: int) -> ParamLayout:
    """A network of random widths: layers with and without bias, GroupNorm, RMSNorm and a LayerNorm over two axes."""
    a, b, c = np.random.default_rng(seed).integers(1, 4, 3).tolist()
    tensors = {
        "conv.weight": (a, b, 2),
        "norm.weight": (a,),
        "norm.bias": (a,),
        "middle.weight": (b, a),
        "rms.weight": (b,),
        "last.weight": (c, b),
        "last.bias": (c,),
        "wide.weight": (a, c),
        "wide.bias": (a, c),
    }
    return ParamLayout(tuple(tensors), tuple(tensors.values()))


@pytest.mark.parametrize("seed", range(6))
def test_rounds_are_the_papers(seed: int) -> None:
    """Algorithm 1: layers other than normalisation are averaged, and those stay on their device."""
    layout = layout_of(seed)
    fleet = Fleet(seed, layout)
    norms = np.concatenate(
        [
            np.full(size, name.split(".")[0] in ("norm", "rms", "wide"))
            for name, size in zip(layout.names, layout.sizes, strict=True)
        ]
    )
    models = [fleet.start.astype(float) for _ in range(fleet.devices)]
    shared = fleet.start.astype(float)[~norms]
    for cohort in fleet.cohorts:
        for i in cohort:
            models[i][~norms] = shared
            for _ in range(STEPS):
                models[i] = models[i] - RATE * fleet.slope(i, models[i])
        shared = np.mean([models[i][~norms] for i in cohort], axis=0)
    found = fleet.played(fleet.method("fedbn", optimizer="sgd", learning_rate=RATE, local_epochs=STEPS))
    assert_close(found.model[~norms], shared)
    np.testing.assert_array_equal(found.model[norms], fleet.start[norms])
    for device in {device for cohort in fleet.cohorts for device in cohort}:
        assert_close(found.states[device].own, models[device])
    assert all((sent[norms] == 0).all() for sent in found.sent.values())


def test_of_a_resnet_the_group_norms_are_kept() -> None:
    layout = resnet8_gn().layout
    kept = NormLayers().kept(layout)
    names = [layer.name for layer in layout.layers if slice(layer.start, layer.stop) in kept]
    assert names == [layer.name for layer in layout.layers if "norm" in layer.name]
    assert len(names) > 3


@pytest.mark.parametrize("names", [("a.weight",), ("norm.weight", "norm.bias")])
def test_a_network_without_both_kinds_of_layers_is_refused(names: tuple[str, ...]) -> None:
    shape = (2,) if len(names) == 2 else (2, 3)
    with pytest.raises(Malformed, match="normalisation layers and others"):
        Fleet(0, ParamLayout(names, (shape,) * len(names))).method("fedbn")
