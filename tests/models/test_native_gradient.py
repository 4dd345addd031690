"""The compiled gradient against PyTorch's. Where no C compiler is, every test checks the reason, then says so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from hushfleet.data.samples import Samples
from hushfleet.errors import BadInput, HushfleetError
from hushfleet.learning.linear import LinearClipping
from hushfleet.learning.optim import SGD
from hushfleet.methods import make_method
from hushfleet.methods.state import PublicState
from hushfleet.models import checks, get_model, native
from hushfleet.models.layers import Conv, Dropout, Layered, Linear, Pool
from hushfleet.models.model import Model
from hushfleet.models.native.build import find_compiler
from hushfleet.models.native.gradient import LOGITS_BATCH, NativeGradient
from hushfleet.models.torch_gradient import TorchGradient
from hushfleet.objectives import Objective
from hushfleet.wire.format.spec import PrivacySpec
from support.methods import trained

pytestmark = pytest.mark.slow

COMPACT = ["cifar10-cnn", "cnn", "digits-cnn", "emnist-cnn", "fashion-mnist-cnn", "mnist-cnn", "svhn-cnn"]
TOLERANCE = 1e-5


def described(name: str, input_shape: tuple[int, int, int], *layers: object) -> Model:
    network = Layered(input_shape, layers)
    return Model(name, "this test", input_shape, layers[-1].outputs, network.layout, network.dropout, network)


# What the compact networks do not have: odd sizes, unusual kernels and widths, outputs in several words of bits,
# inner layers without pooling, pooled first layers of many channels, Winograd's way on an odd number of tiles.
ODD = {
    "odd-sizes": described(
        "odd-sizes",
        (2, 13, 11),
        Conv(48, 2, padding=1),
        Pool(),
        Conv(80, 4, padding=2),
        Conv(16, 1),
        Pool(),
        Dropout(0.5),
        Linear(16),
        Linear(3, relu=False),
    ),
    "inner-winograd": described(
        "inner-winograd",
        (1, 14, 14),
        Conv(16, 3),
        Conv(32, 3, padding=1),
        Conv(128, 5, padding=2),
        Linear(48),
        Dropout(0.3),
        Linear(32),
        Linear(7, relu=False),
    ),
    "one-pixel": described("one-pixel", (3, 6, 7), Conv(16, 1), Pool(), Linear(2, relu=False)),
    "no-convolution": described(
        "no-convolution", (3, 5, 7), Linear(32), Dropout(0.5), Linear(16), Linear(3, relu=False)
    ),
}
PARTED = ["digits-cnn", "odd-sizes", "inner-winograd", "no-convolution"]


def model_of(name: str) -> Model:
    return ODD.get(name) or get_model(name)


@pytest.fixture(scope="module")
def native_of(compiled, why_not_compiled, need_compiler) -> Iterator[Callable[[str], NativeGradient]]:
    @cache
    def build(name: str) -> NativeGradient:
        return NativeGradient(model_of(name))

    def build_or_say_why(name: str) -> NativeGradient:
        reason = why_not_compiled()
        if reason is None:
            return build(name)
        with pytest.raises(HushfleetError) as error:
            NativeGradient(model_of(name))
        assert str(error.value) == reason
        return need_compiler()

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(compiled))
        yield build_or_say_why


@pytest.mark.parametrize("name", [*COMPACT, *ODD])
def test_it_computes_what_pytorch_computes(name, native_of):
    run, model = native_of(name), model_of(name)
    reference, rng, params = TorchGradient(model), np.random.default_rng(5), model.init(3)
    sizes = {"digits-cnn": (1, 2, 7, 10, 16, 64), "mnist-cnn": (2, 10, 16, 64)}.get(name, (1, 7))
    for size in sizes:
        x, y, masks = checks.stable_batch(reference, params, size, rng)
        for dropout in ((), masks) if masks else ((),):
            expected_loss, expected = reference(params, x, y, dropout)
            out = np.full_like(params, np.nan)
            loss, grad = run(params, x, y, dropout, out=out)
            assert grad is out
            assert loss == pytest.approx(expected_loss, rel=2e-6)
            for tensor, place in model.layout.slices.items():
                assert checks.relative_error(grad[place], expected[place]) < TOLERANCE, (tensor, size)
        assert checks.relative_error(run.logits(params, x), reference.logits(params, x)) < TOLERANCE


def test_logits_of_more_images_than_fit_one_pass(native_of):
    run, model = native_of("digits-cnn"), get_model("digits-cnn")
    x, _, _ = checks.random_batch(model, 2 * LOGITS_BATCH + 3, np.random.default_rng(0))
    params = model.init(0)
    expected = np.concatenate([run.logits(params, x[i : i + 1]) for i in range(len(x))])
    assert np.array_equal(run.logits(params, x), expected)


@pytest.mark.parametrize(("inputs", "classes"), [(1, 2), (5, 3), (72, 10), (1090, 26)])
def test_one_linear_layer(inputs, classes, native_of):
    """The head on fixed features, whose bias is a layer of its own in the layout."""
    native_of("digits-cnn")
    model = get_model("linear", classes=classes, input_shape=(inputs, 1, 1))
    run, reference, rng = NativeGradient(model), TorchGradient(model), np.random.default_rng(inputs)
    params, out = rng.standard_normal(model.layout.size, np.float32), np.empty(model.layout.size, np.float32)
    other = params.copy()
    other[-1] += 1
    for size in (1, 7, 20):
        x, y, _ = checks.random_batch(model, size, rng)
        for part in (slice(None), *parts_of(model)):
            loss, grad = run(params, x, y, out=np.full_like(params, np.nan), part=part)
            expected_loss, expected = reference(params, x, y)
            assert loss == pytest.approx(expected_loss, rel=2e-6)
            assert checks.relative_error(grad[part], expected[part]) < TOLERANCE
            _, norms = run.clipped_sum(params, x, y, clip_norm=0.5, out=out, part=part)
            closed = np.empty_like(out)
            _, expected_norms = LinearClipping(model.layout)(params, x, y, clip_norm=0.5, out=closed, part=part)
            assert norms.tobytes() == expected_norms.tobytes()
            assert out.tobytes() == closed.tobytes()
        logits = run.logits_of_models([params, other], x)
        for found, vector in zip(logits, (params, other), strict=True):
            assert checks.relative_error(found, reference.logits(vector, x)) < TOLERANCE
        singles = [run(params, x[i : i + 1], y[i : i + 1])[1].astype(np.float64) ** 2 for i in range(size)]
        assert checks.relative_error(run.squared_sum(params, x, y), sum(singles)) < TOLERANCE


@pytest.mark.parametrize("name", ["digits-cnn", "fashion-mnist-cnn"])
def test_the_same_inputs_give_the_same_bits_whatever_came_before(name, native_of):
    run, model, rng = native_of(name), get_model(name), np.random.default_rng(1)
    params = model.init(1)
    x, y, masks = checks.random_batch(model, 5, rng)
    fresh_loss, fresh = run(params, x, y, masks)
    other = checks.random_batch(model, 9, rng)
    run(model.init(2), *other)
    run(np.full_like(params, np.nan), x, y)
    run.logits(model.init(4), other[0])
    again_loss, again = run(params, x, y, masks)
    assert again_loss == fresh_loss
    assert again.tobytes() == fresh.tobytes()
    rebuilt = NativeGradient(model)
    assert rebuilt(params, x, y, masks)[1].tobytes() == fresh.tobytes()


@pytest.mark.parametrize(("name", "layer"), [("digits-cnn", "conv1"), ("digits-cnn", "conv2"), ("mnist-cnn", "conv2")])
def test_of_equal_maxima_the_first_gets_the_gradient(name, layer, native_of):
    """Without weights a layer's outputs are its bias: every window ties, above 0."""
    run, model = native_of(name), get_model(name)
    params = model.init(0)
    tensors = model.layout.unflatten(params)
    tensors[f"{layer}.weight"][...] = 0
    tensors[f"{layer}.bias"][...] = np.linspace(0.1, 0.7, len(tensors[f"{layer}.bias"]))
    x, y, _ = checks.random_batch(model, 3, np.random.default_rng(2))
    expected_loss, expected = TorchGradient(model)(params, x, y)
    loss, grad = run(params, x, y)
    assert loss == pytest.approx(expected_loss, rel=2e-6)
    place = model.layout.slices[f"{layer}.weight"]
    assert np.abs(expected[place]).max() > 0
    assert checks.relative_error(grad[place], expected[place]) < TOLERANCE


@pytest.mark.parametrize("name", ["digits-cnn", "mnist-cnn"])
def test_divergence_is_seen(name, native_of):
    """NaN in any tensor, or in one pixel, is NaN in the loss: neither ReLU nor pooling may swallow it."""
    run, model = native_of(name), get_model(name)
    x, y, _ = checks.random_batch(model, 3, np.random.default_rng(3))
    for tensor, place in model.layout.slices.items():
        params = model.init(0)
        params[place.start] = np.nan
        assert np.isnan(run(params, x, y)[0]), tensor
    center = model.input_shape[1] // 2
    x[1, 0, center, center] = np.nan
    loss, grad = run(model.init(0), x, y)
    assert np.isnan(loss)
    assert np.isnan(grad).any()
    huge = model.init(0) * np.float32(1e30)
    assert not np.isfinite(run(huge, np.ones_like(x), y)[0])


@pytest.mark.parametrize("corner", [(2, 2), (2, 3), (3, 2), (3, 3)])
def test_pooling_lets_nan_win_in_every_corner(corner, native_of):
    run, model = native_of("one-pixel"), ODD["one-pixel"]
    x, y, _ = checks.random_batch(model, 2, np.random.default_rng(0))
    x[1, 2, *corner] = np.nan
    assert np.isnan(run(model.init(0), x, y)[0])


@pytest.mark.parametrize("flag", ["-march=x86-64", "-march=haswell"])
def test_narrower_vectors_compute_the_same(flag, native_of, tmp_path, monkeypatch):
    """By a compiler that takes this machine for an older one, where this machine is of that family."""
    native_of("digits-cnn")
    real = find_compiler()
    if {"__x86_64__", "__AVX2__", "__FMA__"} <= real.defined:
        compiler = tmp_path / "cc"
        compiler.write_text(f'#!/bin/sh\nexec {real.path} "$@" {flag}\n')
        compiler.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        assert ("__AVX2__" in find_compiler().defined) == (flag == "-march=haswell")
        assert "__AVX512F__" not in find_compiler().defined
    convs = Conv(16, 5), Pool(), Conv(32, 5, padding=2), Pool(), Conv(16, 3, padding=1)
    model = described("narrow", (1, 20, 20), *convs, Pool(), Dropout(0.5), Linear(5, relu=False))
    params, rng = model.init(0), np.random.default_rng(0)
    x, y, masks = checks.stable_batch(TorchGradient(model), params, 7, rng)
    _, expected = TorchGradient(model)(params, x, y, masks)
    _, grad = NativeGradient(model)(params, x, y, masks)
    for tensor, place in model.layout.slices.items():
        assert checks.relative_error(grad[place], expected[place]) < TOLERANCE, tensor


def test_a_training_run_stays_close_to_pytorchs(native_of):
    model, rng = get_model("digits-cnn"), np.random.default_rng(0)
    batches = [checks.random_batch(model, 8, rng)[:2] for _ in range(30)]
    ends = []
    for gradient in (TorchGradient(model), native_of("digits-cnn")):
        params, optimizer = model.init(0), SGD(0.05)
        for x, y in batches:
            optimizer.step(params, gradient(params, x, y)[1])
        ends.append(params)
    assert checks.relative_error(ends[1], ends[0]) < 1e-4
    assert checks.relative_error(model.init(0), ends[0]) > 0.05


def test_what_does_not_fit_is_refused(native_of):
    run, model = native_of("fashion-mnist-cnn"), get_model("fashion-mnist-cnn")
    params = model.init(0)
    x, y, masks = checks.random_batch(model, 2, np.random.default_rng(0))
    refused = [
        (r"params must be a NumPy array float32 \(1199882,\)", (params[:-1], x, y)),
        ("params must be a NumPy array float32", (params.astype(np.float64), x, y)),
        (r"x must be a NumPy array float32 \(2, 1, 28, 28\)", (params, x[:, :, 1:], y)),
        ("x must be contiguous", (params, np.asfortranarray(x), y)),
        (r"y must be a NumPy array int64 \(2,\)", (params, x, y.astype(np.int32))),
        (r"y must be a NumPy array int64 \(2,\)", (params, x, y[:1])),
        (r"takes 2 dropout masks or none, not 1", (params, x, y, masks[:1])),
        (r"dropout.1 must be a NumPy array float32 \(2, 128\)", (params, x, y, (masks[0], masks[1][:1]))),
        ("the batch is empty", (params, x[:0], y[:0])),
        (r"y\[1\] = 10: labels must be in 0 .. 9", (params, x, np.array([9, 10]))),
        (r"y\[0\] = -1: labels must be in 0 .. 9", (params, x, np.array([-1, 10]))),
        (r"out must be a NumPy array float32 \(1199882,\)", (params, x, y, (), params[:-1].copy())),
        ("out must be writeable memory that is not", (params, x, y, (), params)),
    ]
    for text, arguments in refused:
        with pytest.raises(ValueError, match=text):
            run(*arguments)
    sealed = np.empty_like(params)
    sealed.flags.writeable = False
    with pytest.raises(ValueError, match="out must be writeable"):
        run(params, x, y, out=sealed)
    with pytest.raises(ValueError, match="x must be a NumPy array"):
        run.logits(params, x[:, 0])


# Parts of a gradient.


def parts_of(model: Model) -> list[slice]:
    """Every head, every backbone, a layer alone."""
    starts = [span.start for span in model.layout.layers]
    heads, backbones = [slice(start, None) for start in starts], [slice(start) for start in starts[1:]]
    return [*heads, *backbones, slice(*starts[-2:])]


@pytest.mark.parametrize("name", PARTED)
def test_a_part_of_the_gradient_has_the_bits_of_the_whole(name, native_of):
    run, model = native_of(name), model_of(name)
    params, rng = model.init(1), np.random.default_rng(2)
    x, y, masks = checks.random_batch(model, 5, rng)
    expected_loss, whole = run(params, x, y, masks)
    for part in (*parts_of(model), slice(0)):
        expected = np.zeros_like(whole)
        expected[part] = whole[part]
        out = np.full_like(params, np.nan)
        run(out, x, y)  # nothing is left of the call before
        loss, grad = run(params, x, y, masks, out=out, part=part)
        assert loss == expected_loss
        np.testing.assert_array_equal(grad, expected, err_msg=str(part))
    first, second = model.layout.layers[:2]
    _, grad = run(params, x, y, masks, part=slice(second.stop - 1, None))  # its last entry, so all of the layer
    np.testing.assert_array_equal(grad[second.start :], whole[second.start :])
    assert not grad[first.start : first.stop].any()


@pytest.mark.parametrize("name", PARTED)
def test_clipped_sums_of_a_part_have_its_norms(name, native_of):
    run, model = native_of(name), model_of(name)
    params, rng = model.init(1), np.random.default_rng(3)
    x, y, masks = checks.random_batch(model, 5, rng)
    x *= np.geomspace(0.1, 3, 5, dtype=np.float32)[:, None, None, None]
    ones = [(slice(i, i + 1), [mask[i : i + 1] for mask in masks]) for i in range(5)]
    each = np.stack([run(params, x[one], y[one], rows)[1] for one, rows in ones]).astype(np.float64)
    for part in parts_of(model):
        single = np.zeros_like(each)
        single[:, part] = each[:, part]
        expected_norms = np.sqrt((single**2).sum(1))
        bound = float(np.median(expected_norms))
        factors = np.minimum(1, bound / np.maximum(expected_norms, 1e-300))
        by_norms, fixed = np.full_like(params, np.nan), np.full_like(params, np.nan)
        run.clipped_sum(by_norms, x, y, (), 1.0, fixed)  # nothing is left of the call before
        _, norms = run.clipped_sum(params, x, y, masks, np.median, by_norms, part=part)
        np.testing.assert_allclose(norms, expected_norms, rtol=1e-5)
        assert checks.relative_error(by_norms, factors @ single) < TOLERANCE, part
        _, norms_again = run.clipped_sum(params, x, y, masks, float(np.median(norms)), fixed, part=part)
        assert fixed.tobytes() == by_norms.tobytes()
        assert norms_again.tobytes() == norms.tobytes()


@pytest.mark.parametrize("name", PARTED)
def test_sums_of_some_layers_by_the_norms_of_all_have_the_bits_of_the_whole_sum(name, native_of):
    run, model = native_of(name), model_of(name)
    params, rng = model.init(1), np.random.default_rng(4)
    x, y, masks = checks.random_batch(model, 5, rng)
    whole, some = np.empty_like(params), np.full_like(params, np.nan)
    _, norms = run.clipped_sum(params, x, y, masks, np.median, whole)
    for part in (*parts_of(model), slice(0)):
        expected = np.zeros_like(whole)
        expected[part] = whole[part]
        losses, norms_again = run.clipped_sum(params, x, y, masks, np.median, some, summed=part)
        np.testing.assert_array_equal(some, expected, err_msg=str(part))
        assert norms_again.tobytes() == norms.tobytes()
        assert losses.shape == (5,)


@pytest.mark.parametrize("name", PARTED)
def test_models_that_share_their_first_layers_have_the_logits_that_each_has_alone(name, native_of):
    run, model = native_of(name), model_of(name)
    x, _, _ = checks.random_batch(model, 70, np.random.default_rng(5))  # more than are computed at a time
    first, other = model.init(1), model.init(2)
    for start in (*(span.start for span in model.layout.layers), model.layout.size):
        models = [first, first.copy(), first.copy()]
        models[1][start:] = other[start:]
        expected = [run.logits(params, x) for params in models]
        np.testing.assert_array_equal(run.logits_of_models(models, x), expected, err_msg=str(start))


def test_what_is_skipped_is_zero_even_where_it_is_no_number(native_of):
    """An infinite weight behind which every unit is dead: the loss is finite, and no gradient below it would be."""
    run, model = native_of("digits-cnn"), get_model("digits-cnn")
    params = model.init(0)
    tensors = model.layout.unflatten(params)
    tensors["fc1.weight"][0] = np.inf
    tensors["fc1.bias"][0] = np.inf
    x, y, _ = checks.random_batch(model, 3, np.random.default_rng(0))
    assert np.isnan(run(params, x, y)[1]).any()
    head = slice(model.layout.layers[-1].start, None)
    _, grad = run(params, x, y, part=head)
    out = np.full_like(params, np.nan)
    run.clipped_sum(params, x, y, (), np.max, out, part=head)
    assert not grad[: head.start].any()
    assert not out[: head.start].any()


def test_parts_that_are_none_are_refused(native_of):
    run, model = native_of("digits-cnn"), get_model("digits-cnn")
    params, out = model.init(0), np.empty(model.layout.size, np.float32)
    x, y, _ = checks.random_batch(model, 2, np.random.default_rng(0))
    with pytest.raises(ValueError, match="must be a range without gaps"):
        run(params, x, y, part=slice(0, None, 2))
    with pytest.raises(ValueError, match="must be whole layers"):
        run.clipped_sum(params, x, y, (), 1.0, out, part=slice(1, None))


@pytest.mark.parametrize(
    ("name", "settings", "tolerance"),
    [
        ("fedrep", {"optimizer": "adam"}, 0),
        ("fedrep", {"momentum": 0.5, "head_layers": 2}, 0),
        ("fedglp-adp", {"sequential": True}, 0),
        ("perfreezeclip", {"clipping": "none"}, 0),
        ("perfreezeclip", {"momentum": 0.5}, 1e-5),
        ("perfreezeclip", {"clipping": "value", "max_norm": 0.5, "head_layers": 2}, 1e-5),
    ],
)
def test_local_training_by_parts_ends_where_it_does_without(name, settings, tolerance, native_of):
    """Without: the same program behind a function that takes no parts and has no sums of clipped gradients."""
    run, model = native_of("digits-cnn"), get_model("digits-cnn")
    usual = {"optimizer": "sgd", "learning_rate": 0.05, "batch_size": 4, "local_epochs": 3}
    privacy = PrivacySpec("device", accounting="as-published", clip_norm=1.0, noise_multiplier=0.0, delta=0.1)
    method = make_method(name, {**usual, **settings}, privacy, model.layout, rounds=1)
    mask = method.init_state().public.mask
    state = replace(method.init_state(), public=PublicState(mask if mask.any() else np.arange(mask.size) % 3 == 1, 1))
    rng = np.random.default_rng(0)
    samples = Samples(rng.integers(0, 256, (11, 1, 8, 8), np.uint8), rng.integers(0, 10, 11), (0.5,), (0.25,))
    ends, losses = [], []
    for gradient in (run, lambda *args, **named: run(*args, **named)):
        done = trained(method, model.init(0), gradient, samples, state=state, rng=np.random.default_rng(1))
        ends.append(done.end)
        losses.append(done.loss)
    assert np.abs(ends[0] - ends[1]).max() <= tolerance * np.abs(ends[1] - model.init(0)).max()
    assert np.abs(ends[0] - model.init(0)).max() > 1e-3
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (get_model("resnet18-gn"), "resnet18-gn is written as PyTorch code"),
        (described("narrow", (1, 8, 8), Conv(12, 3), Linear(2, False)), "conv1 has 12 outputs; .* a multiple of 16"),
        (described("narrow", (1, 8, 8), Conv(16, 3), Linear(9), Linear(2, False)), "fc1 has 9 outputs"),
        (described("late", (1, 8, 8), Conv(16, 3), Dropout(0.1), Pool(), Linear(2, False)), "late: the compiled"),
        (described("relu", (1, 8, 8), Conv(16, 3), Linear(16)), "of which only the last is without ReLU"),
    ],
    ids=lambda value: value.name if isinstance(value, Model) else "",
)
def test_a_network_that_the_kernels_do_not_know_is_refused_with_the_reason(model, reason, native_of):
    native_of("digits-cnn")
    with pytest.raises(BadInput, match=reason) as error:
        NativeGradient(model)
    assert native.unavailable(model) == str(error.value)


# Sums of clipped gradients.


def clipped_one_by_one(
    run: NativeGradient, params: np.ndarray, x: np.ndarray, y: np.ndarray, masks: tuple, clip_norm: float, **taught
) -> tuple[list[float], list[float], np.ndarray]:
    """Losses, norms and the sum, from gradients of single samples."""
    losses, norms, total = [], [], np.zeros(len(params))
    for i in range(len(x)):
        one = slice(i, i + 1)
        rows = {name: array[one] for name, array in taught.items()}
        loss, grad = run(params, x[one], y[one], [mask[one] for mask in masks], **rows)
        grad = grad.astype(np.float64)
        losses.append(loss)
        norms.append(np.sqrt((grad**2).sum()))
        total += grad * min(1, clip_norm / norms[-1])
    return losses, norms, total


@pytest.mark.parametrize("name", PARTED)
def test_clipped_sums_are_those_of_single_samples(name, native_of):
    run, model = native_of(name), model_of(name)
    params = model.init(1)
    for size in (1, 5, 8):
        x, y, masks = checks.random_batch(model, size, np.random.default_rng(size))
        x *= np.geomspace(0.1, 3, size, dtype=np.float32)[:, None, None, None]  # norms of all sizes
        for dropout in ((), masks) if masks else ((),):
            middle = float(np.median(clipped_one_by_one(run, params, x, y, dropout, np.inf)[1]))
            for clip_norm in (middle, 1e-3, np.inf):
                expected_losses, expected_norms, expected = clipped_one_by_one(run, params, x, y, dropout, clip_norm)
                out = np.full_like(params, np.nan)
                losses, norms = run.clipped_sum(params, x, y, dropout, clip_norm, out)
                np.testing.assert_allclose(losses, expected_losses, rtol=1e-5, atol=1e-6)
                np.testing.assert_allclose(norms, expected_norms, rtol=1e-6)
                assert norms.dtype == np.float64
                for tensor, place in model.layout.slices.items():
                    assert checks.relative_error(out[place], expected[place]) < TOLERANCE, (tensor, clip_norm)
                assert np.linalg.norm(out.astype(np.float64)) <= size * clip_norm * (1 + 1e-6)


@pytest.mark.parametrize("name", PARTED)
def test_squared_sums_are_those_of_single_samples(name, native_of):
    run, model = native_of(name), model_of(name)
    params = model.init(1)
    for size in (1, 5, 32, 3):  # of 32 slopes, memory that was freed too early would be overwritten
        x, y, _ = checks.random_batch(model, size, np.random.default_rng(size))
        singles = [run(params, x[i : i + 1], y[i : i + 1])[1].astype(np.float64) for i in range(size)]
        squares = run.squared_sum(params, x, y)
        assert squares.dtype == np.float32
        for tensor, place in model.layout.slices.items():
            expected = sum(single[place] ** 2 for single in singles)
            assert checks.relative_error(squares[place], expected) < TOLERANCE, (tensor, size)


def test_clipped_sums_with_a_teacher(native_of):
    native_of("digits-cnn")
    model = get_model("digits-cnn")
    run = NativeGradient(model, objective=Objective("decoupled-distillation", 2.0, 0.25))
    params, rng = model.init(1), np.random.default_rng(0)
    x, y, _ = checks.random_batch(model, 6, rng)
    teacher, distill = checks.random_teacher(model, 6, rng)
    _, expected_norms, expected = clipped_one_by_one(run, params, x, y, (), 1.0, teacher=teacher, distill=distill)
    out = np.empty_like(params)
    _, norms = run.clipped_sum(params, x, y, (), 1.0, out, teacher, distill)
    np.testing.assert_allclose(norms, expected_norms, rtol=1e-5)
    assert checks.relative_error(out, expected) < TOLERANCE


def test_clipped_sums_repeat_to_the_bit_and_pass_divergence_on(native_of):
    run, model = native_of("digits-cnn"), get_model("digits-cnn")
    params, rng = model.init(1), np.random.default_rng(1)
    x, y, _ = checks.random_batch(model, 4, rng)
    first, again = np.empty_like(params), np.empty_like(params)
    _, norms = run.clipped_sum(params, x, y, (), 0.5, first)
    bad = x.copy()
    bad[2, 0, 3, 3] = np.nan
    losses, wrong = run.clipped_sum(params, bad, y, (), 0.5, again)
    assert np.isnan(again).any()
    assert np.isnan(wrong).tolist() == np.isnan(losses).tolist() == [False, False, True, False]
    run.clipped_sum(params, *checks.random_batch(model, 9, rng), 0.5, again)
    _, norms_again = run.clipped_sum(params, x, y, (), 0.5, again)
    assert first.tobytes() == again.tobytes()
    assert norms.tobytes() == norms_again.tobytes()
    assert run(params, x, y)[1].tobytes() == NativeGradient(model)(params, x, y)[1].tobytes()


def test_an_empty_batch_has_a_clipped_sum_of_zero(native_of):
    run, model = native_of("digits-cnn"), get_model("digits-cnn")
    out = np.ones(model.layout.size, np.float32)
    losses, norms = run.clipped_sum(model.init(0), np.empty((0, 1, 8, 8), np.float32), np.empty(0, np.int64), out=out)
    assert losses.shape == norms.shape == (0,)
    assert not out.any()


def test_what_does_not_fit_a_clipped_sum_is_refused(native_of):
    run, model = native_of("digits-cnn"), get_model("digits-cnn")
    params, out = model.init(0), np.empty(model.layout.size, np.float32)
    x, y, _ = checks.random_batch(model, 2, np.random.default_rng(0))
    refused = [
        ("clip_norm = 0.0: must be positive", (params, x, y, (), 0.0, out)),
        ("clip_norm = nan: must be positive", (params, x, y, (), np.nan, out)),
        ("out must be given", (params, x, y, (), 1.0)),
        ("out must be writeable memory that is not", (params, x, y, (), 1.0, params)),
        (r"y\[1\] = 10: labels must be in 0 .. 9", (params, x, np.array([9, 10]), (), 1.0, out)),
        ("x must be contiguous", (params, np.asfortranarray(x), y, (), 1.0, out)),
        ("which has no teacher", (params, x, y, (), 1.0, out, np.zeros((2, 10)), np.zeros(2))),
    ]
    for text, arguments in refused:
        with pytest.raises(ValueError, match=text):
            run.clipped_sum(*arguments)
