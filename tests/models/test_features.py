"""Fixed features: against sums written out, as graphs against PyTorch, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from hushfleet.errors import BadInput, GraphRefused
from hushfleet.learning.graph_session import open_session
from hushfleet.models import features
from hushfleet.models.features import backbone, get_features, make_graph, synthetic
from hushfleet.models.features.filters import Filters
from hushfleet.models.features.scattering import ANGLES, MAPS, Scattering, low_pass, wavelets
from hushfleet.models.features.whitening import BIAS, POWER, Whitening, unit_with_bias
from hushfleet.models.onnx_nodes import Graph


def convolved(image: np.ndarray, kernel: np.ndarray, stride: int) -> np.ndarray:
    """One image `[H, W]` with one kernel, window by window."""
    radius, size = len(kernel) // 2, len(kernel)
    padded = np.pad(image, radius, mode="reflect")
    rows, columns = (range(0, side, stride) for side in image.shape)
    return np.array([[(padded[r : r + size, c : c + size] * kernel).sum() for c in columns] for r in rows])


def scattered(image: np.ndarray) -> np.ndarray:
    """S0, S1 and S2 of one image `[H, W]`, by the formulas."""
    psi = [[wavelets(j)[a, 0] + 1j * wavelets(j)[a + ANGLES, 0] for a in range(ANGLES)] for j in (0, 1)]
    fine = [abs(convolved(image, wave, 1)) for wave in psi[0]]
    low = [convolved(maps, low_pass(1)[0, 0], 4) for maps in (image, *fine)]
    coarse = [abs(convolved(maps, wave, 2)) for maps in (image, *fine) for wave in psi[1]]
    return np.stack(low + [convolved(maps, low_pass(0)[0, 0], 2) for maps in coarse])


@settings(max_examples=4, deadline=None)
@given(side=st.sampled_from([16, 20]), channels=st.sampled_from([1, 3]), seed=st.integers(0, 9))
def test_scattering_is_its_formula(side: int, channels: int, seed: int) -> None:
    images = np.random.default_rng(seed).random((2, channels, side, side))
    raw = Scattering((channels, side, side))
    found = raw(torch.from_numpy(images)).numpy()
    expected = np.stack([np.concatenate([scattered(channel) for channel in image]).ravel() for image in images])
    assert found.shape == (2, raw.size) == (2, channels * MAPS * (side // 4) ** 2)
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)


def test_wavelets_do_not_see_brightness_and_low_passes_keep_it() -> None:
    for scale in (0, 1):
        np.testing.assert_allclose(wavelets(scale).sum((1, 2, 3)), 0, atol=1e-12)
        np.testing.assert_allclose(low_pass(scale).sum(), 1)


def test_filters_are_their_formula() -> None:
    raw = Filters((3, 6, 6))
    image = np.random.default_rng(0).random((3, 6, 6))
    waves = np.stack([sum(convolved(image[c], kernel[c], 1) for c in range(3)) for kernel in raw.kernels()])
    inner = waves[:, 1:-1, 1:-1]  # windows that lie in the image
    pooled = np.maximum(np.concatenate((inner, -inner)), 0).reshape(-1, 2, 2, 2, 2).mean((2, 4))
    np.testing.assert_allclose(raw(torch.from_numpy(image[None])).numpy()[0], pooled.ravel())


def test_whitening_leaves_directions_apart_and_half_their_spread() -> None:
    rng = np.random.default_rng(1)
    raw = rng.standard_normal((400, 6)) @ np.diag([9.0, 5, 3, 2, 1, 0.5]) @ rng.standard_normal((6, 20)) + 3
    white = Whitening.fit(raw, 4)
    projected = raw @ white.matrix * white.scale + white.offset
    values = np.linalg.eigvalsh(np.corrcoef(raw.T))[::-1][:4]
    covariance = projected.T @ projected / len(raw)
    np.testing.assert_allclose(projected.mean(0), 0, atol=1e-4 * abs(projected).max())
    np.testing.assert_allclose(covariance, np.diag(values ** (1 - POWER)), atol=0.03 * values[0] ** 0.5)
    assert white.matrix.dtype == np.int8
    assert (white.matrix.max(0) == 127).all()  # the sign is fixed: the largest entry is positive


def test_rows_have_norm_one_and_a_bias() -> None:
    made = unit_with_bias(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
    np.testing.assert_allclose(made, [[0.6, 0.8, BIAS], [0, 0, BIAS]], rtol=1e-6)


@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 16, 16), (3, 16, 16)])
def test_public_images_are_the_same_each_time(shape: tuple[int, int, int]) -> None:
    images = synthetic.mixed(60, shape)
    assert images.shape == (60, *shape)
    assert 0 <= images.min() < 0.05
    assert 0.9 < images.max() <= 1
    np.testing.assert_array_equal(images, synthetic.mixed(60, shape))


@pytest.mark.parametrize(("raw", "images"), [(Filters((1, 8, 8), kept=5), 50), (Scattering((3, 16, 16), kept=7), 30)])
def test_a_graph_gives_what_pytorch_gives(raw: Filters | Scattering, images: int) -> None:
    seen = raw(torch.from_numpy(synthetic.mixed(images, raw.image_shape)))
    white = Whitening.fit(seen.numpy(), raw.kept)
    made = make_graph(raw, white)  # compares, and raises where they differ
    x = np.random.default_rng(3).random((2, *raw.image_shape), np.float32)
    found = open_session(made).run(["features"], {"x": x})[0]
    assert found.shape == (2, raw.kept + 1)
    np.testing.assert_allclose(np.linalg.norm(found[:, :-1], axis=1), 1, rtol=1e-5)


def test_a_graph_that_computes_something_else_is_refused() -> None:
    class Wrong(Filters):
        def kernels(self) -> np.ndarray:
            self.__dict__["turn"] = self.__dict__.get("turn", 0) + 1
            return super().kernels() * self.__dict__["turn"]

    white = Whitening.fit(np.random.default_rng(0).random((40, Filters((1, 6, 6)).size)), 3)
    with pytest.raises(GraphRefused, match="differ from PyTorch's"):
        make_graph(Wrong((1, 6, 6)), white)


def test_features_are_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = get_features("filters", (1, 8, 8), cache_dir=tmp_path)
    assert made.count == 129
    monkeypatch.setattr(features, "fit", lambda _: pytest.fail("made again"))
    assert get_features("filters", (1, 8, 8), cache_dir=tmp_path) == made


def test_leading_directions_come_first_and_then_all(tmp_path: Path) -> None:
    whole = get_features("filters", (1, 8, 8), cache_dir=tmp_path)
    some = get_features("filters", (1, 8, 8), directions=40, cache_dir=tmp_path)
    assert (some.count, some.shared, whole.shared) == (41 + 129, 41, 129)
    x = np.random.default_rng(3).random((5, 1, 8, 8), np.float32)
    every, found = (open_session(each.graph).run(["features"], {"x": x})[0] for each in (whole, some))
    np.testing.assert_array_equal(found[:, 41:], every)
    np.testing.assert_allclose(found[:, :41], unit_with_bias(torch.from_numpy(every[:, :40])), rtol=1e-5)
    assert get_features("filters", (1, 8, 8), directions=128, cache_dir=tmp_path) == whole
    write_backbone(tmp_path / "net.onnx")
    with pytest.raises(BadInput, match=r"4 outputs .* have no order"):
        get_features(str(tmp_path / "net.onnx"), (3, 6, 6), directions=3)


@pytest.mark.parametrize(
    ("name", "shape", "text"),
    [
        ("filters", (1, 28, 28), "take 'scattering'"),
        ("scattering", (1, 8, 8), "take 'filters'"),
        ("scattering", (1, 28, 32), "square"),
        (
            "sift",
            (1, 8, 8),
            "filters, scattering, sound:speech, sound:log-mel, unit-norm, .*, or an .onnx file",
        ),
        ("nowhere.onnx", (1, 8, 8), "cannot be read"),
    ],
)
def test_what_there_is_not_is_refused(name: str, shape: tuple[int, int, int], text: str) -> None:
    with pytest.raises(BadInput, match=text):
        get_features(name, shape)


def write_backbone(path: Path, *, inputs: tuple[str, ...] = ("pixels",), side: int | str = 6, rank: int = 2) -> None:
    """A convolution and a global mean: 4 features of an image of 3 channels, in operator set 13."""
    weights = np.random.default_rng(0).standard_normal((4, 3, 3, 3)).astype(np.float32)
    nodes = [
        helper.make_node("Conv", ["pixels", "w"], ["maps"]),
        helper.make_node("GlobalAveragePool", ["maps"], ["m"]),
    ]
    nodes.append(helper.make_node("Flatten" if rank == 2 else "Identity", ["m"], ["out"]))
    graph = helper.make_graph(
        nodes,
        "backbone",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 3, side, side]) for name in inputs],
        [helper.make_tensor_value_info("out", TensorProto.FLOAT, ["n", 4, 1, 1][:rank])],
        [numpy_helper.from_array(weights, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    path.write_bytes(model.SerializeToString())


@pytest.mark.parametrize("side", [6, "s"])
def test_any_network_gives_features(tmp_path: Path, side: int | str) -> None:
    path = tmp_path / "net.onnx"
    write_backbone(path, side=side)
    extractor = get_features(str(path), (3, 6, 6))
    assert extractor.count == 5
    x = np.random.default_rng(1).random((3, 3, 6, 6), np.float32)
    plain = open_session(path.read_bytes()).run(["out"], {"pixels": x})[0]
    expected = np.c_[plain / np.linalg.norm(plain, axis=1, keepdims=True), np.full(3, BIAS)]
    np.testing.assert_allclose(open_session(extractor.graph).run(["features"], {"x": x})[0], expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"inputs": ("pixels", "more")}, "2 inputs"),
        ({"side": 7}, r"takes images of \[3, 7, 7\]"),
        ({"rank": 4}, r"must give \[batch, features\]"),
    ],
)
def test_a_network_that_does_not_fit_is_refused(tmp_path: Path, change: dict[str, Any], text: str) -> None:
    path = tmp_path / "net.onnx"
    write_backbone(path, **change)
    with pytest.raises(BadInput, match=text):
        backbone.from_file(path, (3, 6, 6))


def test_more_features_than_a_task_package_names_are_refused_with_their_directions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(features, "MAX_SIDE", 169)
    with pytest.raises(BadInput, match=r"model.features = 'filters' with model.directions = 40: an image has 170 feat"):
        get_features("filters", (1, 8, 8), directions=40, cache_dir=tmp_path)
    assert get_features("filters", (1, 8, 8), directions=39, cache_dir=tmp_path).count == 169
    monkeypatch.setattr(features, "MAX_SIDE", 128)
    with pytest.raises(
        BadInput, match=r"model.features = 'filters': an image has 129 features, and devices take at most"
    ):
        get_features("filters", (1, 8, 8), cache_dir=tmp_path)


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    path.write_bytes(b"not a network")
    with pytest.raises(BadInput, match="not an ONNX file"):
        backbone.from_file(path, (3, 6, 6))


def test_operators_that_a_board_refuses_are_refused_here(tmp_path: Path) -> None:
    graph = Graph()
    data = graph.to_bytes(graph.node("NonZero", "x"), (1, 8, 8), 4)
    path = tmp_path / "net.onnx"
    path.write_bytes(data)
    with pytest.raises((GraphRefused, BadInput)):
        get_features(str(path), (1, 8, 8))
    assert onnx.load_from_string(data).graph.node[0].op_type == "NonZero"
