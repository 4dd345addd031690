"""The count of a client's memory, by hand and against tensors that are really allocated."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hushfleet.learning.draws import Inputs
from hushfleet.methods.method import TrainingConfig
from hushfleet.models import get_model
from hushfleet.models.torch_gradient import TorchGradient
from hushfleet.objectives import Objective
from hushfleet.privacy.record import RecordMechanism
from hushfleet.simulator.engines.fast.vmap.memory import AliveBytes, bytes_per_client, pass_bytes


def test_the_peak_of_a_few_lines_by_hand() -> None:
    before = torch.zeros(100)
    with AliveBytes() as alive:
        x = torch.zeros(1000)  # 4,000 bytes
        y = x + 1  # 8,000
        z = y.view(10, 100)  # a view
        y *= 2  # in place
        before += 1  # not made here
        del x  # 4,000
        w = z + z  # 8,000
        del y, z, w  # none
        v = torch.zeros(1500)  # 6,000
    assert alive.peak == 8000
    assert v.numel() == 1500


@pytest.mark.parametrize("name", ["digits-cnn", "fashion-mnist-cnn"])
def test_shapes_without_numbers_cost_what_numbers_cost(name: str) -> None:
    gradient = TorchGradient(get_model(name))
    model, clients, batch = gradient.model, 2, 3
    params = torch.zeros(clients, model.layout.size)
    out = torch.empty_like(params)
    with AliveBytes() as alive:
        x, y = torch.zeros(clients, batch, *model.input_shape), torch.zeros(clients, batch, dtype=torch.int64)
        masks = [torch.zeros(clients, batch, *spec.shape) for spec in model.dropout]
        gradient.clients(params, x, y, masks, out=out, weights=torch.ones(clients, batch))
    counted = pass_bytes(gradient, clients, batch_size=batch, dropout=model.dropout)
    assert counted == pytest.approx(alive.peak, rel=0.02)
    assert counted > out.nbytes  # the gradients by name are among it


def test_vectors_and_activations_add_up() -> None:
    gradient = TorchGradient(get_model("digits-cnn"))

    def needed(batch_size: int = 8, optimizer: str = "sgd", **changes: object) -> int:
        config = TrainingConfig(batch_size=batch_size, optimizer=optimizer)
        usual = {"config": config, "inputs": Inputs(), "parts": 1, "samples": 100, "image_bytes": 0}
        return bytes_per_client(gradient, **{**usual, **changes})

    size = gradient.layout.size
    assert needed(image_bytes=500) == needed() + 1000
    assert needed(optimizer="adam") == needed() + 8 * size
    assert needed(optimizer="adam", parts=2) == needed() + 16 * size
    # Twice the batch: twice the activations, while the vectors stay.
    vectors = needed() - pass_bytes(gradient, 2, batch_size=8, dropout=()) // 2
    assert vectors == 29 * size
    assert 1.6 < (needed(batch_size=16) - vectors) / (needed() - vectors) < 2


def test_what_a_method_needs_beyond_plain_training_is_counted() -> None:
    gradient = TorchGradient(get_model("digits-cnn"))
    config = TrainingConfig(batch_size=8, optimizer="sgd")
    usual = {"config": config, "inputs": Inputs(), "parts": 2, "image_bytes": 0, "samples": 400}
    size, plain = gradient.layout.size, bytes_per_client(gradient, **usual)
    assert bytes_per_client(gradient, **{**usual, "config": replace(config, momentum=0.5)}) == plain + 8 * size
    # Gradients of 8 samples, twice, and three of them by tensors.
    assert bytes_per_client(gradient, **usual, each=True, records_at_once=3) == plain + 4 * (16 + 3) * size
    assert bytes_per_client(gradient, **usual, second=True) == plain + 8 * size
    augmented = bytes_per_client(gradient, **{**usual, "inputs": Inputs(augment="flip-crop")})
    assert augmented == plain + 40 * 8 * 8 * 8
    # By record: hardly ever more than 40 + 6 * 6 + 1 samples, but five at a time.
    record = RecordMechanism(1.0, 1.0, sample_rate=0.1, batches=9, gradients_per_batch=1, batch_size=40)
    five = pass_bytes(gradient, 2, batch_size=5, dropout=()) // 2
    expected = (4 * (7 + 2 + 3 * 5) + 1) * size + five + 77 * 4 * 64
    assert bytes_per_client(gradient, **usual, record=record, records_at_once=5) == expected
    teaching = TorchGradient(gradient.model, objective=Objective("distillation", temperature=3.0))
    assert bytes_per_client(teaching, **usual) > plain + 400 * 4 * 10


def test_a_group_costs_as_many_times_a_client() -> None:
    gradient = TorchGradient(get_model("digits-cnn"))
    two, ten = (pass_bytes(gradient, clients, batch_size=8, dropout=()) for clients in (2, 10))
    assert ten == pytest.approx(5 * two, rel=0.01)
