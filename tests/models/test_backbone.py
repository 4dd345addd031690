"""Networks that others have trained as features: the classifier's directions, weights that are missing, and exports."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
import safetensors.torch
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from hushfleet.aggregator.config.task import Task, parse_task
from hushfleet.aggregator.payloads.prepare import prepare
from hushfleet.aggregator.planning.advice import Question
from hushfleet.data.torchvision_sets import import_torchvision
from hushfleet.errors import BadInput
from hushfleet.learning.graph_session import open_session
from hushfleet.models.features import get_features, pretrained
from hushfleet.models.features.whitening import BIAS
from hushfleet.models.model import Model
from hushfleet.simulator.studies.plan.needs import needs

SHAPE = (3, 6, 6)
INNER, CLASSES = 48, 41


def write_network(path: Path, last: str = "Gemm", *, classes: int = CLASSES, softmax: bool = False) -> np.ndarray:
    """A convolution, a global mean and a classifier, in an ONNX file. Gives the classifier's weights `[classes, F]`."""
    rng = np.random.default_rng(0)
    kernels = rng.standard_normal((INNER, 3, 3, 3)).astype(np.float32)
    weight = (rng.standard_normal((classes, INNER)) + 3).astype(np.float32)
    constants = {"kernels": kernels, "bias": rng.standard_normal(classes).astype(np.float32)}
    nodes = [
        helper.make_node("Conv", ["pixels", "kernels"], ["maps"]),
        helper.make_node("Relu", ["maps"], ["positive"]),
        helper.make_node("GlobalAveragePool", ["positive"], ["means"]),
        helper.make_node("Flatten", ["means"], ["inner"]),
    ]
    if last == "Gemm":
        constants["weight"] = weight
        nodes.append(helper.make_node("Gemm", ["inner", "weight", "bias"], ["logits"], transB=1))
    else:
        nodes += [
            helper.make_node("Constant", [], ["stored"], value=numpy_helper.from_array(weight)),
            helper.make_node("Transpose", ["stored"], ["weight"], perm=[1, 0]),
            helper.make_node("MatMul", ["inner", "weight"], ["product"]),
            helper.make_node("Add", ["bias", "product"], ["logits"]),
        ]
    result = "logits"
    if softmax:
        result = "shares"
        nodes.append(helper.make_node("Softmax", ["logits"], [result], axis=1))
    graph = helper.make_graph(
        nodes,
        "network",
        [helper.make_tensor_value_info("pixels", TensorProto.FLOAT, ["n", *SHAPE])],
        [helper.make_tensor_value_info(result, TensorProto.FLOAT, ["n", classes])],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    path.write_bytes(model.SerializeToString())
    return weight


@pytest.mark.parametrize(("last", "softmax"), [("Gemm", False), ("MatMul", True)])
def test_a_classifier_orders_the_features_below_it(tmp_path: Path, last: str, softmax: bool) -> None:
    path, x = tmp_path / "net.onnx", np.random.default_rng(1).random((9, *SHAPE), np.float32)
    weight = write_network(path, last, softmax=softmax)
    model = onnx.load(path)
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("inner", TensorProto.FLOAT, ["n", INNER]))
    inner = open_session(model.SerializeToString()).run(["inner"], {"pixels": x})[0]
    whole, some = get_features(str(path), SHAPE), get_features(str(path), SHAPE, directions=33)
    assert (whole.count, whole.shared, some.count, some.shared) == (41, 41, 34 + 41, 34)
    every, found = (open_session(each.graph, fold=False).run(["features"], {"x": x})[0] for each in (whole, some))
    np.testing.assert_array_equal(found[:, 34:], every)
    logits = inner @ (weight - weight.mean(0)).T  # without what all classes share, and in other axes the same
    unit = logits / np.linalg.norm(logits, axis=1, keepdims=True)
    np.testing.assert_allclose(every[:, :-1] @ every[:, :-1].T, unit @ unit.T, atol=0.02)
    _, values, axes = np.linalg.svd(weight - weight.mean(0), full_matrices=False)
    leading = inner @ axes[:33].T * values[:33]
    leading /= np.linalg.norm(leading, axis=1, keepdims=True)
    signs = np.sign((leading * found[:, :33]).sum(0))
    np.testing.assert_allclose(found[:, :33], leading * signs, atol=0.02)
    np.testing.assert_allclose(found[:, 33], BIAS)


def test_a_network_of_few_classes_gives_what_it_gives_and_no_order(tmp_path: Path) -> None:
    path, x = tmp_path / "net.onnx", np.random.default_rng(1).random((2, *SHAPE), np.float32)
    write_network(path, classes=10)
    logits = open_session(path.read_bytes()).run(["logits"], {"pixels": x})[0]
    found = open_session(get_features(str(path), SHAPE).graph).run(["features"], {"x": x})[0]
    np.testing.assert_allclose(found[:, :-1], logits / np.linalg.norm(logits, axis=1, keepdims=True), rtol=1e-5)
    with pytest.raises(BadInput, match=r"10 outputs .* no order.* at least 33 classes.*leave model.directions out"):
        get_features(str(path), SHAPE, directions=5)


@pytest.mark.parametrize(("classes", "directions"), [(CLASSES, 56), (12, None)])
def test_a_plan_counts_the_leading_directions_of_a_classifier(
    tmp_path: Path, classes: int, directions: int | None
) -> None:
    write_network(path := tmp_path / "net.onnx", classes=classes)
    asked = Question(devices=50, images=20, classes=10, epsilon=2, features=str(path), shape=SHAPE)
    assert needs(asked).directions == directions


def photographs(features: str, **more: object) -> Task:
    names = [f"c{label}" for label in range(3)]
    return parse_task(
        {
            "name": "photographs",
            "model": {"name": "linear", "features": features, **more},
            "method": {"name": "hush"},
            "privacy": {"accounting": "secure", "epsilon": 2.0, "honest_fraction": 1.0},
            "data": {"name": "folder", "devices": 100, "class_names": names, "input_shape": list(SHAPE)},
        }
    )


def test_hush_sends_the_leading_directions_of_a_classifier(tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    write_network(path, classes=200)
    task = photographs(str(path))
    assert task.model.directions == 120  # as the rule says, more than there are
    with pytest.raises(Enough, match=r"\(41, 1, 1\)"):
        prepare(replace(task, model=replace(task.model, directions=40)), run_id="test")
    write_network(path, classes=10)
    assert photographs(str(path)).model.directions is None
    with pytest.raises(Enough, match=r"\(11, 1, 1\)"):
        prepare(photographs(str(path)), run_id="test")


class Enough(Exception):
    """Ends a preparation before the graphs of the head are exported, which takes seconds."""


@pytest.fixture(autouse=True)
def _no_export(monkeypatch: pytest.MonkeyPatch) -> None:
    def export(model: Model, **_: object) -> None:
        raise Enough(model.input_shape)

    monkeypatch.setattr("hushfleet.aggregator.payloads.prepare.export_graphs", export)


def test_weights_that_are_missing_are_named_with_their_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "torchvision:mobilenet_v3_small"
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", lambda *_, **__: pytest.fail("downloaded"))
    file = "mobilenet_v3_small-047dcff4.pth"
    place = tmp_path / "checkpoints" / file
    with pytest.raises(
        BadInput, match=rf"Fetch https://\S+/{file} \(9.8 MB\), and put it at {place}, or name the file"
    ):
        get_features(name, (3, 96, 96))
    with pytest.raises(BadInput, match="is not a file; fetch https"):
        prepare(photographs(name, weights=str(tmp_path / "none.pth")))
    place.parent.mkdir()
    place.write_bytes(b"weights")
    with pytest.raises(BadInput, match="does not hold the weights"):
        get_features(name, (3, 96, 96))
    torch.save(import_torchvision().models.get_model("mobilenet_v3_small").state_dict(), place)
    found = pretrained.find(name, None)
    assert found.about.startswith(f"{name}: 2.5 million weights, 10.")
    assert "licence" in found.about
    with pytest.raises(BadInput, match="no classifier of that name"):
        get_features("torchvision:mobilenet_v9", (3, 96, 96))


def test_timm_is_an_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(BadInput, match=r"pip install 'hushfleet\[timm\]'"):
        get_features("timm:tiny", SHAPE)
    known = SimpleNamespace(hf_hub_id="timm/tiny", hf_hub_filename=None, mean=(0.5,) * 3, std=(0.5,) * 3, license="mit")

    def create(name: str, *, pretrained: bool, pretrained_cfg_overlay: dict[str, str]) -> nn.Module:
        made = tiny()
        made.load_state_dict(safetensors.torch.load_file(pretrained_cfg_overlay["file"]))
        return made

    timm = SimpleNamespace(is_model=lambda _: True, get_pretrained_cfg=lambda _: known, create_model=create)
    monkeypatch.setitem(sys.modules, "timm", timm)
    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(try_to_load_from_cache=lambda *_: None))
    with pytest.raises(BadInput, match=r"Fetch https://huggingface.co/timm/tiny/\S+, and name the file: model.weights"):
        get_features("timm:tiny", SHAPE)
    file = tmp_path / "tiny.safetensors"
    safetensors.torch.save_file(tiny().state_dict(), file)
    assert pretrained.find("timm:tiny", file).about.endswith("licence: mit")


def tiny() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 40, 3),
        nn.BatchNorm2d(40),
        nn.Hardswish(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(40, 60),
    )


def test_an_exported_network_is_a_boards_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    network = tiny().eval()
    found = pretrained.Pretrained("timm:tiny", network, (0.4, 0.5, 0.6), (0.2, 0.3, 0.4), "digest", "tiny, free")
    monkeypatch.setattr(pretrained, "find", lambda *_: found)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(Enough):
        prepare(photographs("timm:tiny"), run_id="test")
    assert "tiny, free" in capsys.readouterr().err
    monkeypatch.setattr(pretrained, "export", lambda *_: pytest.fail("exported again"))
    x = np.random.default_rng(2).random((5, *SHAPE), np.float32)
    shown = open_session(get_features("timm:tiny", SHAPE).graph, fold=False).run(["features"], {"x": x})[0]
    pixels = (torch.from_numpy(x) - torch.tensor(found.mean)[:, None, None]) / torch.tensor(found.std)[:, None, None]
    with torch.no_grad():
        inner, weight = network[:-1](pixels).numpy(), network[-1].weight.numpy()
    logits = inner @ (weight - weight.mean(0)).T
    unit = logits / np.linalg.norm(logits, axis=1, keepdims=True)
    np.testing.assert_allclose(shown[:, :-1] @ shown[:, :-1].T, unit @ unit.T, atol=0.03)
