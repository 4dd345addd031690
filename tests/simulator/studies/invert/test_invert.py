"""`hushfleet invert`: gradients and attack against closed forms, what the server is shown, and the command."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from hushfleet.aggregator.commands.main import build_app
from hushfleet.errors import BadInput
from hushfleet.models import get_model
from hushfleet.models.torch_gradient import TorchGradient
from hushfleet.simulator.studies.invert.attack import gradients, reconstruct
from hushfleet.simulator.studies.invert.views import LITTLE, Terms, make_views, psnr, recognised

TASKS = Path(__file__).parents[4] / "tasks"


def drawn(count: int, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    return rng.standard_normal((count, *shape), np.float32).clip(-2, 2), rng.integers(0, 10, count)


def test_gradients_are_those_of_training_one_image_at_a_time() -> None:
    model = get_model("digits-cnn")
    params = model.init(0)
    x, y = drawn(3, model.input_shape)
    found = gradients(model, torch.from_numpy(params), torch.from_numpy(x), torch.from_numpy(y))
    each = [TorchGradient(model)(params, x[i : i + 1], y[i : i + 1])[1] for i in range(3)]
    np.testing.assert_allclose(found, np.stack(each), rtol=1e-4, atol=1e-6)


def test_the_attack_finds_what_algebra_finds_in_a_linear_layer() -> None:
    model = get_model("linear", classes=10, input_shape=(1, 4, 4))
    params = model.init(0)
    x, y = drawn(3, model.input_shape)
    updates = -gradients(model, torch.from_numpy(params), torch.from_numpy(x), torch.from_numpy(y)).numpy()
    named = model.layout.unflatten(updates)
    at = np.arange(3), y
    algebra = named["head.weight"][at] / named["prior"][at][:, None]  # dL/dW_k = dL/db_k x
    np.testing.assert_allclose(algebra, x.reshape(3, -1), atol=1e-5)
    limits = (np.array([-2.0]), np.array([2.0]))
    found = reconstruct(model, params, updates, y, limits, smooth=0.0, tries=1)
    np.testing.assert_allclose(found.reshape(3, -1), algebra, atol=0.05)
    # Only directions count: clipping hides nothing.
    scaled = reconstruct(model, params, updates * 0.25, y, limits, smooth=0.0, tries=1)
    np.testing.assert_allclose(scaled, found, atol=0.05)


def test_the_server_is_shown_clipped_noised_and_summed_updates() -> None:
    terms = Terms(clip_norm=0.5, rounds=10, delta=0.01, devices=20, noise_multiplier=0.1)
    updates = np.random.default_rng(0).standard_normal((2 + 19, 5000), np.float32)
    clipped, little, task, eight, two, total, private = (
        vectors for *_, vectors in make_views(updates, 2, terms, seed=1)
    )
    np.testing.assert_allclose(np.linalg.norm(clipped, axis=1), 0.5, rtol=1e-5)
    directions = updates / np.linalg.norm(updates, axis=1, keepdims=True)
    others = 0.5 * directions[2:].sum(axis=0)
    np.testing.assert_allclose(total, 0.5 * directions[:2] + others, atol=1e-5)
    assert (little - clipped).std() == pytest.approx(LITTLE * 0.5, rel=0.05)
    assert (task - clipped).std() == pytest.approx(0.1 * 0.5, rel=0.05)
    # Multipliers by `hushfleet privacy --epsilon E --rounds 10 --delta 0.01`.
    assert (two - clipped).std() / 0.5 == pytest.approx(3.53, rel=0.05)
    assert (private - total).std() == pytest.approx((two - clipped).std(), rel=0.05)
    assert 0.5 < (eight - clipped).std() / 0.5 < 2


def test_an_image_is_recognised_among_its_class_alone() -> None:
    images = np.random.default_rng(0).random((30, 1, 4, 4)).astype(np.float32)
    labels, places = np.arange(30) % 3, np.array([0, 4, 8])
    assert recognised(0.3 * images[places] + 0.5, places, images, labels).all()
    assert not recognised(images[[3, 7, 11]], places, images, labels).any()  # others of the same class
    assert not recognised(np.full((3, 1, 4, 4), 0.5), places, images, labels).any()
    np.testing.assert_allclose(psnr(images + 0.1, images), 20, atol=1e-4)


def test_the_command_writes_figures_and_a_picture(tmp_path: Path) -> None:
    words = ["--images", "2", "--devices", "3", "--steps", "2", "--tries", "1", "--json", "--out", str(tmp_path)]
    result = CliRunner().invoke(build_app(), ["invert", str(TASKS / "digits-fedglp-adp.toml"), *words])
    assert result.exit_code == 0, result.output
    views = json.loads((tmp_path / "invert.json").read_text())["views"]
    assert [view["epsilon_server"] for view in views][3:] == [8, 2, None, 2]
    assert (tmp_path / "invert.png").read_bytes().startswith(b"\x89PNG")
    refused = CliRunner().invoke(build_app(), ["invert", str(TASKS / "digits-hush.toml")])
    assert isinstance(refused.exception, BadInput)
