"""Every runtime on objectives with a teacher, against PyTorch's automatic differentiation of the written formula."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from hushfleet.errors import GraphRefused
from hushfleet.learning.graph_safety import check_graph
from hushfleet.learning.graph_session import GradientGraph
from hushfleet.models import checks, export, get_model
from hushfleet.models.export import Graphs, export_graphs
from hushfleet.models.layers import Conv, Dropout, Layered, Linear, Pool
from hushfleet.models.model import Model
from hushfleet.models.native.gradient import NativeGradient
from hushfleet.models.torch_gradient import TorchGradient
from hushfleet.objectives import Objective
from hushfleet.simulator.engines.fast.runtimes import make_gradient

pytestmark = pytest.mark.slow

KINDS = {
    "distillation": Objective("distillation", 3.0),
    "decoupled-distillation": Objective("decoupled-distillation", 2.0, 0.25),
    "contrastive": Objective("contrastive", 0.5),
}
RUNTIMES = ["torch", "onnx", "native"]
EXPORTED = "decoupled-distillation"  # takes seconds; test_every_method.py exports the other
CASES = [(runtime, kind) for runtime in RUNTIMES for kind in KINDS if runtime != "onnx" or kind == EXPORTED]


def small() -> Model:
    layers = Conv(16, 3), Pool(), Dropout(0.25), Linear(16), Dropout(0.5), Linear(5, relu=False)
    network = Layered((1, 8, 8), layers)
    return Model("small", "this test", (1, 8, 8), 5, network.layout, network.dropout, network)


MODEL = small()


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Graphs:
    return export_graphs(MODEL, objective=KINDS[EXPORTED], cache_dir=tmp_path_factory.mktemp("graphs"))


@pytest.fixture(scope="module")
def run_of(exported, compiled, need_compiler):
    @cache
    def build(runtime: str, kind: str):
        if runtime == "onnx":
            return GradientGraph(exported.gradient, MODEL.layout)
        if runtime == "native":
            need_compiler()
            return NativeGradient(MODEL, objective=KINDS[kind])
        return TorchGradient(MODEL, objective=KINDS[kind])

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(compiled))
        yield build


def drawn(size: int, seed: int, kind: str = EXPORTED):
    rng, params = np.random.default_rng(seed), MODEL.init(seed)
    x, y, masks = checks.stable_batch(TorchGradient(MODEL), params, size, rng)
    return params, x, y, masks, *checks.random_teacher(MODEL, size, rng, KINDS[kind])


def written(objective: Objective, logits, y, teacher, weight):
    """The formulas again, from the binary and the remaining probabilities."""
    if objective.kind == "distillation":
        t = objective.temperature
        both = F.log_softmax(logits / t, 1), F.softmax(teacher / t, 1)
        divergence = t * t * F.kl_div(*both, reduction="none").sum(1)
    elif objective.kind == "contrastive":
        near, far = (F.cosine_similarity(logits, each) / objective.temperature for each in teacher.chunk(2, 1))
        divergence = -torch.log_softmax(torch.stack([near, far], 1), 1)[:, 0]
    else:
        label = F.one_hot(y, logits.shape[1]).bool()
        parts = []
        for values in (teacher, logits):
            p = values.softmax(1)
            rest = values[~label].reshape(len(y), -1)
            two = torch.stack([p[label], p[~label].reshape(len(y), -1).sum(1)], 1)
            parts.append((two, (rest / objective.temperature).softmax(1)))
        kl = [(t * (t.log() - s.log())).sum(1) for t, s in zip(*parts, strict=True)]
        divergence = kl[0] + objective.non_target_weight * kl[1]
    return ((1 - weight) * F.cross_entropy(logits, y, reduction="none") + weight * divergence).mean()


def expected_of(kind, params, x, y, masks, teacher, weight):
    leaf = torch.from_numpy(params).double().requires_grad_()
    tensors = MODEL.layout.unflatten(leaf)
    x, *masks, teacher, weight = (torch.from_numpy(a).double() for a in (x, *masks, teacher, weight))
    loss = written(KINDS[kind], MODEL.forward(tensors, x, masks), torch.from_numpy(y), teacher, weight)
    loss.backward()
    return loss.item(), leaf.grad.numpy()


@pytest.mark.parametrize("size", [1, 7])
@pytest.mark.parametrize(("runtime", "kind"), CASES)
def test_every_runtime_computes_the_written_loss(runtime, kind, size, run_of):
    params, x, y, masks, teacher, weight = drawn(size, 3, kind)
    for dropout in ((), masks):
        expected_loss, expected = expected_of(kind, params, x, y, dropout, teacher, weight)
        out = np.full_like(params, np.nan)
        loss, grad = run_of(runtime, kind)(params, x, y, dropout, out=out, teacher=teacher, distill=weight)
        assert grad is out
        assert loss == pytest.approx(expected_loss, rel=1e-5)
        for tensor, place in MODEL.layout.slices.items():
            assert checks.relative_error(grad[place], expected[place]) < 1e-4, tensor


@pytest.mark.parametrize(("runtime", "kind"), CASES)
def test_without_a_teacher_and_without_weight_it_is_the_cross_entropy(runtime, kind, run_of):
    params, x, y, masks, teacher, _ = drawn(4, 4, kind)
    run, (expected_loss, expected) = run_of(runtime, kind), TorchGradient(MODEL)(params, x, y, masks)
    for taught in ({}, {"teacher": teacher, "distill": np.zeros(4, np.float32)}):
        loss, grad = run(params, x, y, masks, **taught)
        assert loss == pytest.approx(expected_loss, rel=1e-5)
        assert checks.relative_error(grad, expected) < 1e-5


@pytest.mark.parametrize(("runtime", "kind"), [case for case in CASES if case[1] != "contrastive"])
def test_a_teacher_who_says_the_same_leaves_the_network_alone(runtime, kind, run_of):
    params, x, y, _, _, _ = drawn(4, 5)
    teacher = TorchGradient(MODEL).logits(params, x)
    loss, grad = run_of(runtime, kind)(params, x, y, teacher=teacher, distill=np.ones(4, np.float32))
    scale = np.abs(TorchGradient(MODEL)(params, x, y)[1]).max()
    assert abs(loss) < 1e-5
    assert np.abs(grad).max() < 1e-5 * scale


@pytest.mark.parametrize("kind", KINDS)
def test_clients_at_once_and_sample_by_sample(kind, exported):
    run = TorchGradient(MODEL, objective=KINDS[kind])
    first, second = drawn(4, 6, kind), drawn(4, 7, kind)
    params, x, y, teacher, weight = (np.stack([first[i], second[i]]) for i in (0, 1, 2, 4, 5))
    masks = [np.stack(pair) for pair in zip(first[3], second[3], strict=True)]
    counted = np.array([[1, 1, 1, 1], [1, 1, 0, 0]], np.float32)
    losses, grads = run.clients(params, x, y, masks, teacher=teacher, distill=weight)
    short, short_grads = run.clients(params, x, y, masks, weights=counted, teacher=teacher, distill=weight)
    for i, (p, a, b, m, t, w) in enumerate((first, second)):
        loss, grad = run(p, a, b, m, teacher=t, distill=w)
        assert losses[i] == pytest.approx(loss, rel=1e-5)
        assert checks.relative_error(grads[i], grad) < 1e-5
    each, single = run.records(params, x, y, masks, teacher=teacher, distill=weight)
    for i, j in np.ndindex(2, 4):
        p, a, b, m, t, w = (first, second)[i]
        one = slice(j, j + 1)
        loss, grad = run(p, a[one], b[one], [mask[one] for mask in m], teacher=t[one], distill=w[one])
        assert each[i, j] == pytest.approx(loss, rel=1e-5)
        assert checks.relative_error(single[i, j], grad) < 1e-5
    p, a, b, m, t, w = second
    loss, grad = run(p, a[:2], b[:2], [mask[:2] for mask in m], teacher=t[:2], distill=w[:2])
    assert short[1] == pytest.approx(loss, rel=1e-5)
    assert checks.relative_error(short_grads[1], grad) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_a_network_in_half_precision_has_its_losses_in_float32(kind):
    params, x, y, _, teacher, weight = drawn(4, 6, kind)
    run = TorchGradient(MODEL, objective=KINDS[kind])
    with torch.autocast("cpu", torch.bfloat16):
        losses, grads = run.clients(params[None], x[None], y[None], teacher=teacher[None], distill=weight[None])
    loss, grad = run(params, x, y, teacher=teacher, distill=weight)
    assert losses.dtype == np.float32
    assert losses[0] == pytest.approx(loss, rel=0.02)
    assert checks.relative_error(grads[0], grad) < 0.05


def test_devices_accept_the_graphs_and_the_check_tells_objectives_apart(exported):
    inputs = check_graph(exported.gradient).inputs
    assert inputs["teacher"].shape == ("batch", 5)
    assert inputs["distill"].shape == ("batch",)
    other = KINDS["distillation"]
    with pytest.raises(GraphRefused, match="disagrees with PyTorch"):
        checks.check_against_torch(MODEL, gradient=exported.gradient, inference=exported.inference, objective=other)


def test_the_cache_knows_objectives_apart():
    objectives = [Objective(), *KINDS.values(), Objective("distillation", 2.0)]
    assert len({export.content_key(MODEL, objective) for objective in objectives}) == 5
    assert export.content_key(MODEL) == export.content_key(MODEL, Objective())


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_what_does_not_fit_is_refused(runtime, run_of):
    run = run_of(runtime, EXPORTED)
    params, x, y, _, teacher, weight = drawn(2, 8)
    with pytest.raises(ValueError, match="or neither"):
        run(params, x, y, teacher=teacher)
    with pytest.raises(ValueError, match="or neither"):
        run(params, x, y, distill=weight)
    if runtime == "torch":
        return
    with pytest.raises(ValueError, match=r"teacher must be a NumPy array float32 \(2, 5\)"):
        run(params, x, y, teacher=teacher[:, :4].copy(), distill=weight)
    with pytest.raises(ValueError, match=r"distill must be a NumPy array float32 \(2,\), not float64"):
        run(params, x, y, teacher=teacher, distill=weight.astype(np.float64))
    if runtime == "native":
        with pytest.raises(ValueError, match=r"y\[1\] = -1: labels must be in 0 .. 4"):
            run(params, x, np.array([0, -1]), teacher=teacher, distill=weight)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_the_cross_entropy_takes_no_teacher(runtime, graphs_of, need_compiler):
    if runtime == "native":
        need_compiler()
    digits = get_model("digits-cnn")
    graph = graphs_of("digits-cnn").gradient if runtime == "onnx" else b""
    run = make_gradient(runtime, digits.name, 10, digits.layout, graph)
    rng = np.random.default_rng(0)
    x, y, _ = checks.random_batch(digits, 2, rng)
    teacher, weight = checks.random_teacher(digits, 2, rng)
    with pytest.raises(ValueError, match="which has no teacher"):
        run(digits.init(0), x, y, teacher=teacher, distill=weight)
