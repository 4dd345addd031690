"""What only a CUDA device can show: that no step waits for it, and that the count of its memory holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from hushfleet.data.samples import Samples
from hushfleet.edge_client.worker.randomness import SeededRandomness
from hushfleet.learning.draws import Inputs
from hushfleet.methods import make_method
from hushfleet.methods.task_method import TaskMethod
from hushfleet.models import get_model
from hushfleet.models.torch_gradient import TorchGradient
from hushfleet.simulator.engines.fast.vmap.device_data import CohortStep, GroupBatches
from hushfleet.simulator.engines.fast.vmap.replay import EAGER, ReplayedGradient
from hushfleet.simulator.engines.fast.vmap.streams import StreamedGradient
from hushfleet.simulator.engines.fast.vmap.training import CohortTrainer, Member
from hushfleet.wire.format.spec import PrivacySpec

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no CUDA device")

PRIVACY = PrivacySpec("device", accounting="strict", clip_norm=0.05, noise_multiplier=1.0, delta=0.1)


def method_of(name: str, gradient: TorchGradient, **config: Any) -> TaskMethod:
    return make_method(name, {"learning_rate": 0.01, **config}, PRIVACY, gradient.layout, rounds=4)


def members_of(method: TaskMethod, gradient: TorchGradient, *, clients: int, samples: int) -> list[Member]:
    members = []
    for index in range(clients):
        rng = np.random.default_rng(index)
        images = rng.integers(0, 256, (samples, *gradient.model.input_shape), dtype=np.uint8)
        own, channels = rng.integers(0, 10, samples), gradient.model.input_shape[0]
        kept = Samples(images, own, (0.5,) * channels, (0.25,) * channels)
        members.append(Member(method.init_state(), kept, SeededRandomness(7, index).order(1)))
    return members


@pytest.mark.parametrize("name", ["dp-fedavg", "fedglp-adp", "fedper"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_no_step_waits_for_the_device(name: str, optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first steps, in which libraries are loaded."""
    gradient = TorchGradient(get_model("fashion-mnist-cnn"), device="cuda")
    method = method_of(name, gradient, optimizer=optimizer, batch_size=8, local_epochs=2)

    draw = GroupBatches.__iter__

    def watched(batches: GroupBatches) -> Iterator[CohortStep]:
        for done, step in enumerate(draw(batches)):
            torch.cuda.set_sync_debug_mode("error" if 8 <= done < batches.steps[0] - 1 else "default")
            yield step

    monkeypatch.setattr(GroupBatches, "__iter__", watched)

    try:
        CohortTrainer(gradient, "cuda").train(
            method,
            members_of(method, gradient, clients=3, samples=64),
            gradient.model.init(1),
            inputs=Inputs(gradient.model.dropout, "flip-crop"),
        )
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("model", ["mnist-cnn", "cifar10-cnn", "resnet18-gn"])
def test_a_client_needs_about_what_was_counted(model: str) -> None:
    gradient = TorchGradient(get_model(model), device="cuda")
    method = method_of("fedglp-adp", gradient, optimizer="adam", batch_size=16)
    trainer, clients = CohortTrainer(gradient, "cuda"), 4
    members = members_of(method, gradient, clients=clients, samples=64)
    for _ in range(2):  # the first time libraries take their own
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        trainer.train(method, members, gradient.model.init(1), inputs=Inputs(gradient.model.dropout))
    assert trainer.grouping is not None
    taken = (torch.cuda.max_memory_allocated() - before) / clients
    assert 0.3 < taken / trainer.grouping.bytes_per_client < 1.25


def test_replayed_passes_have_the_bits_of_the_passes_that_were_recorded() -> None:
    """Shapes take turns, as they do when clients finish, and come again after memory was given back."""
    gradient = TorchGradient(get_model("fashion-mnist-cnn"), device="cuda")
    replayed, model = ReplayedGradient(gradient), gradient.model
    generator = torch.Generator("cuda").manual_seed(3)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.rand(shape, device="cuda", generator=generator)

    for turn in range(14):
        if turn == 9:
            replayed.forget()
        for clients, batch in ((3, 8), (2, 8), (2, 5)):
            params = torch.from_numpy(np.stack([model.init(turn + i) for i in range(clients)])).cuda()
            x, y = drawn(clients, batch, *model.input_shape), (10 * drawn(clients, batch)).long()
            masks = [2.0 * (drawn(clients, batch, *spec.shape) > 0.5) for spec in model.dropout]
            weights = (drawn(clients, batch) + 0.1) if batch == 5 else None
            out, expected = torch.empty_like(params), torch.empty_like(params)
            how = {"enabled": True, "benchmark": False, "deterministic": True, "allow_tf32": False}
            with torch.backends.cudnn.flags(**how):
                losses, grads = replayed.clients(params, x, y, masks, out=out, weights=weights)
                other, _ = gradient.clients(params, x, y, masks, expected, weights=weights)
            assert grads is out
            assert torch.equal(out, expected)
            assert torch.equal(losses, other)
    assert len(replayed._recordings) == 3
    assert not replayed._refused


def test_clients_on_streams_of_their_own_get_what_one_pass_gets() -> None:
    """Recorded and replayed, with weights, as `ReplayedGradient` does it with a large network."""
    gradient = TorchGradient(get_model("resnet8-gn"), device="cuda")
    rng = torch.Generator("cuda").manual_seed(5)
    params = torch.from_numpy(np.stack([gradient.model.init(seed) for seed in range(3)])).cuda()
    replayed, out = ReplayedGradient(StreamedGradient(gradient, streams=2)), torch.empty_like(params)
    with torch.backends.cudnn.flags(deterministic=True, allow_tf32=False):
        for _ in range(2 * EAGER):
            x = torch.rand((3, 4, *gradient.model.input_shape), generator=rng, device="cuda")
            y = torch.randint(10, (3, 4), generator=rng, device="cuda")
            weights = torch.rand((3, 4), generator=rng, device="cuda")
            losses, _ = replayed.clients(params, x, y, out=out, weights=weights)
            expected, expected_out = gradient.clients(params, x, y, weights=weights)
            torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(out, expected_out, rtol=1e-3, atol=1e-5)
