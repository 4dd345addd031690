from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from hushfleet.errors import BadInput
from hushfleet.models import get_model, model_names


def test_every_name_gives_its_model():
    cnns = [
        "cifar10-cnn",
        "cnn",
        "digits-cnn",
        "emnist-cnn",
        "fashion-mnist-cnn",
        "mnist-cnn",
        "resnet18-gn",
        "resnet8-gn",
        "svhn-cnn",
    ]
    assert model_names() == sorted([*cnns, "autoencoder", "linear", "second-moments"])
    for name in model_names():
        assert get_model(name).name == name


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(BadInput, match="digits-cnn"):
        get_model("mobilenet")
    with pytest.raises(BadInput, match="at least one output"):
        get_model("digits-cnn", classes=0)


# Counted by hand from the layers: inputs x outputs x kernel, plus one bias an output.
@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("digits-cnn", 160 + 2320 + 2080 + 330),
        ("cnn", 160 + 2 * 2320 + 960 * 32 + 32 + 330),
        ("mnist-cnn", 832 + 51264 + 524800 + 5130),
        ("emnist-cnn", 160 + 4640 + 9248 + 9248 + 1568 * 128 + 128 + 129 * 26),
        ("fashion-mnist-cnn", 320 + 18496 + 9216 * 128 + 128 + 1290),
        ("svhn-cnn", 896 + 18496 + 12544 * 128 + 128 + 1290),
        ("cifar10-cnn", 448 + 4640 + 9248 + 262656 + 65664 + 1290),
        ("resnet18-gn", 11_173_962),
        ("resnet8-gn", 216 + 1152 + 3456 + 128 + 13824 + 512 + 6 * (8 + 16 + 32) + 330),
        ("linear", 785 * 10),
    ],
)
def test_layout_covers_every_parameter(name, size):
    layout = get_model(name).layout
    assert layout.size == size
    assert [layout.layers[0].start, layout.layers[-1].stop] == [0, size]
    for before, after in zip(layout.layers, layout.layers[1:], strict=False):
        assert before.stop == after.start


def test_an_autoencoder_gives_its_input_through_fewer_numbers():
    model = get_model("autoencoder", input_shape=(2, 1, 3))
    weights = [(6, 3), (3, 6)]
    assert (model.classes, model.layout.size) == (6, sum(i * o + o for i, o in weights))
    for name in ("autoencoder", "second-moments"):
        with pytest.raises(BadInput, match="7 outputs, and a sample has 6 values"):
            get_model(name, classes=7, input_shape=(2, 1, 3))
    with pytest.raises(BadInput, match="98 blocks of 128 x 128 second moments are 1605632 values"):
        get_model("second-moments", input_shape=(1, 128, 98))


@pytest.mark.parametrize("name", sorted({*model_names()} - {"autoencoder", "second-moments"}))
def test_forward_gives_one_logit_a_class(name):
    model = get_model(name, classes=7)
    x = torch.zeros(3, *model.input_shape)
    logits = model.forward(model.layout.unflatten(torch.from_numpy(model.init(0))), x)
    assert logits.shape == (3, 7)


def test_a_linear_model_takes_any_shape_and_begins_at_zero():
    model = get_model("linear", classes=3, input_shape=(2, 5, 1))
    assert model.layout.slices == {"head.weight": slice(0, 30), "prior": slice(30, 33)}
    assert not model.init(0).any()
    rng = np.random.default_rng(0)
    params, x = rng.standard_normal(33, np.float32), rng.standard_normal((4, 2, 5, 1), np.float32)
    logits = model.forward(model.layout.unflatten(torch.from_numpy(params)), torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(logits, x.reshape(4, 10) @ params[:30].reshape(3, 10).T + params[30:], rtol=1e-5)
    assert get_model("digits-cnn", input_shape=(2, 5, 1)).input_shape == (1, 8, 8)


def test_samples_of_a_batch_do_not_influence_each_other():
    rng = np.random.default_rng(0)
    for name in ("fashion-mnist-cnn", "resnet18-gn"):
        model = get_model(name)
        tensors = model.layout.unflatten(torch.from_numpy(model.init(3)))
        x = torch.from_numpy(rng.standard_normal((3, *model.input_shape), np.float32))
        alone = torch.cat([model.forward(tensors, x[i : i + 1]) for i in range(3)])
        torch.testing.assert_close(model.forward(tensors, x), alone, rtol=1e-4, atol=1e-5)


def test_a_missing_dropout_mask_is_an_error():
    model = get_model("fashion-mnist-cnn")
    tensors = model.layout.unflatten(torch.from_numpy(model.init(0)))
    with pytest.raises(ValueError, match="2 dropout masks or none, but was given 1"):
        model.forward(tensors, torch.zeros(2, 1, 28, 28), [torch.ones(2, 64, 12, 12)])


def test_dropout_masks_multiply_the_pooled_and_the_hidden_activations():
    """With everything dropped, only the last layer's bias is left."""
    model = get_model("fashion-mnist-cnn")
    tensors = model.layout.unflatten(torch.from_numpy(model.init(1)))
    x = torch.randn(2, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    masks = [torch.ones(2, 64, 12, 12), torch.zeros(2, 128)]
    assert torch.equal(model.forward(tensors, x, masks), tensors["fc2.bias"].expand(2, 10))
    ones = [torch.ones(2, *drop.shape) for drop in model.dropout]
    assert torch.equal(model.forward(tensors, x, ones), model.forward(tensors, x))


def test_the_network_equals_the_same_layers_as_modules():
    model = get_model("fashion-mnist-cnn")
    modules = nn.Sequential(
        nn.Conv2d(1, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(9216, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )
    vector = torch.cat([p.detach().flatten() for p in modules.parameters()])
    x = torch.randn(4, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model.forward(model.layout.unflatten(vector), x), modules(x))


def test_init_is_uniform_within_one_over_root_fan_in_like_pytorch():
    model = get_model("fashion-mnist-cnn")
    tensors = model.layout.unflatten(model.init(5))
    for layer, fan_in in {"conv1": 9, "conv2": 288, "fc1": 9216, "fc2": 128}.items():
        bound = fan_in**-0.5
        for kind in ("weight", "bias"):
            values = tensors[f"{layer}.{kind}"]
            assert np.abs(values).max() <= bound
        assert np.abs(tensors[f"{layer}.weight"]).max() > 0.95 * bound
        # A uniform variable on +-b has the deviation b / sqrt(3); PyTorch's own layer must agree with it.
        assert np.std(tensors[f"{layer}.weight"]) == pytest.approx(bound / 3**0.5, rel=0.1)
    torch.manual_seed(0)
    assert nn.Linear(9216, 128).weight.std().item() == pytest.approx(tensors["fc1.weight"].std(), rel=0.01)


def test_init_is_a_function_of_the_seed():
    model = get_model("resnet18-gn")
    first = model.init(1)
    assert np.array_equal(first, model.init(1))
    assert not np.array_equal(first, model.init(2))
    tensors = model.layout.unflatten(first)
    assert np.all(tensors["stem_norm.weight"] == 1)
    assert np.all(tensors["stem_norm.bias"] == 0)


def test_a_cnn_takes_images_of_any_size():
    assert get_model("cnn", classes=3, input_shape=(2, 9, 20)).layout.shapes[-4] == (32, 16 * 1 * 2)
    with pytest.raises(BadInput, match="sides of at least 8"):
        get_model("cnn", input_shape=(1, 1, 16000))
