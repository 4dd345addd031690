"""Clients trained at once against the same clients trained one by one by `train_round`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hushfleet.data.samples import Samples
from hushfleet.edge_client.worker.randomness import SeededRandomness
from hushfleet.errors import BadInput
from hushfleet.learning.draws import Inputs
from hushfleet.methods import make_method
from hushfleet.methods.cost import RoundTerms
from hushfleet.methods.local import GradientRule, Penalty, Sgd
from hushfleet.methods.method import Method, TrainingConfig
from hushfleet.methods.personal import Personal
from hushfleet.methods.state import DeviceState, RoundContext
from hushfleet.methods.task_method import TaskMethod
from hushfleet.models import get_model
from hushfleet.models.torch_gradient import TorchGradient
from hushfleet.privacy.noise import SeededNoise
from hushfleet.simulator.engines.fast.vmap.device_data import CohortStep, GroupBatches
from hushfleet.simulator.engines.fast.vmap.training import CohortTrainer, Member, Trained
from hushfleet.wire.format.spec import PrivacySpec
from support.methods import train_round

PRIVACY = PrivacySpec("device", accounting="strict", clip_norm=0.05, noise_multiplier=1.0, delta=0.1)
BY_RECORD = replace(PRIVACY, unit="record", clip_norm=1.0, sample_rate=0.3, batches=3)
DIGITS, FASHION = TorchGradient(get_model("digits-cnn")), TorchGradient(get_model("fashion-mnist-cnn"))
GENTLE = {"optimizer": "sgd", "learning_rate": 0.05, "batch_size": 4, "local_epochs": 2}

# In batches of 4: one that is always full, one smaller than a batch, ones that end an epoch with 1 and with 2.
COUNTS = (9, 3, 8, 14)


def method_of(
    name: str, gradient: TorchGradient = DIGITS, *, privacy: PrivacySpec = PRIVACY, **config: Any
) -> TaskMethod:
    config = {**GENTLE, **config}
    return make_method(name, config, privacy, gradient.layout, rounds=4)


def state_of(method: TaskMethod, gradient: TorchGradient, rng: np.random.Generator) -> DeviceState:
    """Of a device that has taken part: some of its parameters are personal, its personalized model is not the global
    one."""
    state = method.init_state()
    mask = state.public.mask | (rng.random(gradient.layout.size) < 0.3)
    own = gradient.model.init(int(rng.integers(1000)))
    return replace(state, public=replace(state.public, mask=mask, participations=int(rng.integers(1, 4))), own=own)


def cohort_of(
    method: TaskMethod, gradient: TorchGradient = DIGITS, counts: Sequence[int] = COUNTS, fresh: Sequence[int] = ()
) -> list[Member]:
    """The same members at every call; those whose numbers are in `fresh` take part for the first time."""
    rng, members = np.random.default_rng(5), []
    channels, height, width = gradient.model.input_shape
    for index, count in enumerate(counts):
        images = rng.integers(0, 256, (count, channels, height, width), dtype=np.uint8)
        # Normalised differently, which no data set is, but nothing may take one client's figures for another's.
        samples = Samples(images, rng.integers(0, 10, count), (0.1 * (index % 4),) * channels, (0.4,) * channels)
        state = state_of(method, gradient, rng)
        state = method.init_state() if index in fresh else state
        noise = SeededNoise(7, index, 2)
        members.append(Member(state, samples, SeededRandomness(7, index).order(2), RoundTerms(), noise))
    return members


def one_by_one(
    method: TaskMethod, members: Sequence[Member], start: np.ndarray, gradient: TorchGradient
) -> list[Trained]:
    how = {"inputs": Inputs(gradient.model.dropout), "logits_of": gradient.logits}
    return [
        train_round(
            method,
            member.state,
            start,
            gradient,
            member.samples,
            terms=member.terms,
            rng=member.rng,
            noise=member.noise,
            **how,
        )
        for member in members
    ]


def train_cohort(
    method: TaskMethod,
    members: Sequence[Member],
    start: np.ndarray,
    gradient: TorchGradient,
    device: str = "cpu",
    **how: Any,
) -> list[Trained]:
    return CohortTrainer(gradient, device).train(method, members, start, **how)


def assert_same(got: Sequence[Trained], expected: Sequence[Trained], tolerance: float = 1e-5) -> None:
    """What training has changed is compared, so that the start cannot hide an error."""
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_array_equal(one.context.start, other.context.start)
        assert one.own.dtype == np.float32
        moved = other.own - other.context.start
        assert np.abs(moved).max() > 1e-3
        assert np.abs(one.own - other.own).max() <= tolerance * np.abs(moved).max()
        assert isinstance(one.loss, float)
        assert one.loss == pytest.approx(other.loss, rel=tolerance)


def check(
    device: str, method: TaskMethod, gradient: TorchGradient = DIGITS, tolerance: float = 1e-5, **cohort: Any
) -> list[Trained]:
    """Against each member alone on the processor, whatever the device."""
    start = gradient.model.init(1)
    start.flags.writeable = False
    together, alone = cohort_of(method, gradient, **cohort), cohort_of(method, gradient, **cohort)
    got = train_cohort(method, together, start, gradient, device, inputs=Inputs(gradient.model.dropout))
    assert_same(got, one_by_one(method, alone, start, gradient), tolerance)
    for one, other in zip(together, alone, strict=True):
        assert one.rng.bit_generator.state == other.rng.bit_generator.state
    return got


@pytest.mark.parametrize("name", ["fedavg", "dp-fedavg", "fedglp-adp", "fedper"])
def test_a_cohort_trains_as_its_members_do_alone(name: str, device: str) -> None:
    check(device, method_of(name))


def test_the_methods_own_terms_reach_every_member(device: str) -> None:
    """Penalties so heavy that they are most of the gradient."""
    pulled = method_of("fedglp-adp", lambda_1=20.0, lambda_2=20.0)
    plain = method_of("fedglp-adp", lambda_1=0.0, lambda_2=0.0)
    for one, other in zip(check(device, pulled, tolerance=1e-4), check(device, plain), strict=True):
        moved = np.abs(one.own - one.context.start).max()
        assert np.abs(one.own - other.own).max() > 0.2 * moved


@pytest.mark.parametrize("privacy", [PRIVACY, BY_RECORD])
def test_two_passes_a_batch_for_members_with_and_without_personal_parameters(privacy: PrivacySpec, device: str) -> None:
    """By record, a pass more would draw more of a member's noise."""
    method = method_of("fedglp-adp", sequential=True, privacy=privacy, learning_rate=0.01)
    check(device, method, tolerance=1e-4)
    start = DIGITS.model.init(1)
    together, alone = cohort_of(method), cohort_of(method)
    for index in (0, 3):
        for member in (together[index], alone[index]):
            member.state.public.mask[:] = False
    got = train_cohort(method, together, start, DIGITS, device, inputs=Inputs())
    assert_same(got, one_by_one(method, alone, start, DIGITS), tolerance=1e-4)


def test_adam_counts_each_members_own_steps(device: str) -> None:
    """Entries with next to no gradient move by the rounding of that gradient, hence the tolerance."""
    check(device, method_of("fedavg", optimizer="adam", learning_rate=1e-3, local_epochs=3), tolerance=1e-3)


def test_dropout_masks_are_drawn_in_the_same_order(device: str) -> None:
    tolerance = 1e-5 if device == "cpu" else 1e-4  # cuDNN sums in another order, over 1.2 million parameters
    check(device, method_of("fedavg", FASHION, batch_size=3), FASHION, counts=(4, 2, 6), tolerance=tolerance)


def test_newcomers_and_returning_devices_share_a_round(device: str) -> None:
    check(device, method_of("fedglp-adp"), fresh=(1, 2))


def test_values_that_go_back_to_the_global_ones_do_at_each_members_own_epochs(device: str) -> None:
    once, often = (method_of("dp-fedsim", masks=masks, local_epochs=3) for masks in ("round", "epoch"))
    for one, other in zip(check(device, often, fresh=(1,)), check(device, once, fresh=(1,)), strict=True):
        assert np.array_equal(one.own, other.own) == (one.context.chosen is None)


def test_a_member_alone_is_a_cohort_too_and_so_is_nobody(device: str) -> None:
    check(device, method_of("fedavg"), counts=(7,))
    assert train_cohort(method_of("fedavg"), [], DIGITS.model.init(1), DIGITS, device, inputs=Inputs()) == []


class Poisoned(TorchGradient):
    """Gives no number from a step on; remembers how many clients each step had."""

    def __init__(self, first_bad: float) -> None:
        super().__init__(DIGITS.model)
        self.first_bad = first_bad
        self.clients_at: list[int] = []

    def clients(self, params, x, y, dropout=(), out=None, *, weights=None):
        losses, grads = super().clients(params, x, y, dropout, out, weights=weights)
        if params.device.type != "meta":  # as it is where memory is counted
            if len(self.clients_at) >= self.first_bad:
                grads.fill_(float("nan"))
            self.clients_at.append(len(params))
        return losses, grads


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_who_has_finished_stays_to_the_bit(optimizer: str, device: str) -> None:
    method, start = method_of("fedglp-adp", optimizer=optimizer), DIGITS.model.init(1)
    healthy, poisoned = Poisoned(np.inf), Poisoned(4)
    calm = train_cohort(method, cohort_of(method), start, healthy, device, inputs=Inputs())
    ill = train_cohort(method, cohort_of(method), start, poisoned, device, inputs=Inputs())
    # 9 samples in batches of 4 are 3 steps an epoch, and so on: 6, 2, 4 and 8 steps.
    assert healthy.clients_at == poisoned.clients_at == [4, 4, 3, 3, 2, 2, 1, 1]
    for index in (1, 2):
        np.testing.assert_array_equal(ill[index].own, calm[index].own)
        assert ill[index].loss == calm[index].loss
    for index in (0, 3):
        assert np.isnan(ill[index].own).all()


def test_the_size_of_groups_changes_no_result_and_is_shown(device: str) -> None:
    method, start = method_of("fedglp-adp", momentum=0.5), DIGITS.model.init(1)
    counts = (9, 3, 8, 14, 5, 4, 12)
    whole = CohortTrainer(DIGITS, device)
    expected = whole.train(method, cohort_of(method, counts=counts), start, inputs=Inputs())
    assert whole.grouping.sizes == (7,)
    assert (whole.grouping.budget_bytes == 1 << 30) == (device == "cpu")
    for at_once, sizes in ((3, (3, 2, 2)), (1, (1,) * 7)):
        budget = at_once * whole.grouping.bytes_per_client + 1
        split = CohortTrainer(DIGITS, device, memory_bytes=budget)
        members = cohort_of(method, counts=counts)
        assert split.clients_at_once(method, members, inputs=Inputs()) == at_once
        assert_same(split.train(method, members, start, inputs=Inputs()), expected, tolerance=1e-4)
        assert split.grouping.sizes == sizes


class Narrow(TorchGradient):
    """Runs out of memory, in the middle of training, with more than `most` clients."""

    def __init__(self, most: int) -> None:
        super().__init__(DIGITS.model)
        self.most, self.calls = most, 0

    def clients(self, params, x, y, dropout=(), out=None, *, weights=None):
        self._take(params)
        return super().clients(params, x, y, dropout, out, weights=weights)

    def records(self, params, x, y, dropout=(), out=None):
        self._take(params)
        return super().records(params, x, y, dropout, out)

    def _take(self, params):
        self.calls += params.device.type != "meta"
        if len(params) > self.most and self.calls > 1:
            raise torch.OutOfMemoryError("no more")


def test_a_group_that_is_too_large_after_all_is_halved_and_begun_again(device: str) -> None:
    method, start = method_of("fedavg"), DIGITS.model.init(1)
    trainer, members = CohortTrainer(Narrow(1), device), cohort_of(method)
    got = trainer.train(method, members, start, inputs=Inputs())
    assert_same(got, one_by_one(method, cohort_of(method), start, DIGITS))
    assert trainer.grouping.sizes == (1, 1, 1, 1)
    assert trainer.clients_at_once(method, members, inputs=Inputs()) == 1
    with pytest.raises(torch.OutOfMemoryError):
        train_cohort(method, cohort_of(method), start, Narrow(0), device, inputs=Inputs())


def test_a_member_without_samples_is_refused_before_any_training() -> None:
    method = method_of("fedavg")
    with pytest.raises(BadInput, match="no training samples"):
        train_cohort(method, cohort_of(method, counts=(4, 0)), DIGITS.model.init(1), DIGITS, inputs=Inputs())


def test_records_clipped_in_subsets_are_left_to_other_runtimes() -> None:
    method = method_of("apdp-fl", privacy=BY_RECORD, subset_size=2)
    with pytest.raises(BadInput, match="choose another --runtime"):
        train_cohort(method, cohort_of(method), DIGITS.model.init(1), DIGITS, inputs=Inputs())


@pytest.mark.parametrize("at_once", [1, 3, 64])
def test_records_are_clipped_and_noised_one_by_one_and_batches_may_be_empty(
    device: str, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hushfleet.simulator.engines.fast.vmap.memory.MOST_RECORDS", at_once)
    for sample_rate in (0.3, 0.04):
        by_record = replace(BY_RECORD, sample_rate=sample_rate, batches=6)
        check(device, method_of("dp-fedavg", privacy=by_record, learning_rate=0.02), tolerance=1e-4)


def test_what_is_begun_again_has_the_noise_of_the_first_time(device: str) -> None:
    method, start = method_of("dp-fedavg", privacy=BY_RECORD), DIGITS.model.init(1)
    got = CohortTrainer(Narrow(2), device).train(method, cohort_of(method), start, inputs=Inputs())
    assert_same(got, one_by_one(method, cohort_of(method), start, DIGITS), tolerance=1e-4)


class Remembering(GradientRule):
    """Takes each sample's gradient, and goes on with what it remembers of the batches before."""

    samples = True

    def __call__(self, context, params, batch, memory):
        losses, each = batch.each(params)
        _, mean = batch.mean(params)
        weights = losses / batch.sizes[..., None]
        weighted = (weights[..., None] * each).sum(-2)
        gradient = weighted + 0.5 * memory.get("before", 0 * mean) + 0.25 * mean
        return losses.sum(-1) / batch.sizes, gradient + 0, {"before": gradient}


def bound(parts: Method, **config: Any) -> TaskMethod:
    return TaskMethod(parts, TrainingConfig(**{**GENTLE, **config}), PRIVACY, DIGITS.layout)


@pytest.mark.parametrize("at_once", [1, 3, 64])
def test_single_gradients_and_memory_are_each_members_own_to_its_end(
    device: str, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hushfleet.simulator.engines.fast.vmap.memory.MOST_RECORDS", at_once)
    check(device, bound(Method(training=Sgd(Remembering())), learning_rate=0.01))


class Watching(Penalty):
    """Notes what a method is shown."""

    def __init__(self) -> None:
        self.seen: list[RoundContext] = []

    def add(self, context, params, gradient) -> None:
        self.seen.append(context)


class Own(Personal):
    """A choice that may look at the personalized models."""

    reads_own = True


@pytest.mark.parametrize("personal", [Personal(), Own()])
def test_a_method_sees_the_stacked_context_of_those_who_train(personal: Personal, device: str) -> None:
    watching = Watching()
    method = bound(Method(personal, training=Sgd(penalties=(watching,))))
    members = cohort_of(method)
    for index, member in enumerate(members):
        member.state.private["x"] = np.array([index, 10.0 * index])
    train_cohort(method, members, DIGITS.model.init(1), DIGITS, device, inputs=Inputs())
    order = [3, 0, 2, 1]  # most steps first
    for context, count in zip(watching.seen, [4, 4, 3, 3, 2, 2, 1, 1], strict=True):
        shown, state = order[:count], context.state
        assert context.mask.dtype == torch.bool
        np.testing.assert_array_equal(context.mask.cpu(), np.stack([members[i].state.public.mask for i in shown]))
        if type(personal) is Personal:
            assert state.own is None, "no method reads them, and they are as large as the training's own memory"
        else:
            np.testing.assert_array_equal(state.own.cpu(), np.stack([members[i].state.own for i in shown]))
        assert context.start.shape == context.mask.shape
        assert state.private["x"].tolist() == [[i, 10.0 * i] for i in shown]
        assert state.private["x"].dtype == torch.float64


class Transfers(TorchDispatchMode):
    """What a loop makes on the host, step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Counter[str]] = [Counter()]

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        if any(tensor.device.type == "cpu" for tensor in tensors):
            self.made[-1][name] += 1
        return result

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        draw = GroupBatches.__iter__

        def drawn(batches: GroupBatches) -> Iterator[CohortStep]:
            for step in draw(batches):
                self.made.append(Counter())
                yield step

        monkeypatch.setattr(GroupBatches, "__iter__", drawn)


@pytest.mark.parametrize("name", ["fedavg", "dp-fedavg", "fedglp-adp", "fedper"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_on_an_accelerator_no_step_waits_for_a_number(
    name: str, optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's meta device has shapes and no numbers: whoever asks for one fails, as at the end the result does."""
    method = method_of(name, optimizer=optimizer)
    transfers = Transfers()
    transfers.watch(monkeypatch)
    with transfers, pytest.raises(NotImplementedError, match="Cannot copy out of meta"):
        CohortTrainer(DIGITS, "meta").train(method, cohort_of(method), DIGITS.model.init(1), inputs=Inputs())
    steps = transfers.made[1:]
    assert len(steps) == 8
    # All sample numbers are on the device before the first step, and nothing more is made on the host.
    for made in steps[:-1]:
        assert not made


def test_the_same_cohort_trains_to_the_same_bits_again(device: str) -> None:
    method, start = method_of("fedglp-adp"), DIGITS.model.init(1)
    trainer: Callable[..., list[Trained]] = CohortTrainer(DIGITS, device).train
    first, again = (trainer(method, cohort_of(method), start, inputs=Inputs()) for _ in range(2))
    for one, other in zip(first, again, strict=True):
        np.testing.assert_array_equal(one.own, other.own)
        assert one.loss == other.loss
