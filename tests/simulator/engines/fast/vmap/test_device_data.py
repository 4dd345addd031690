"""Batches of a group: the same pixels, order and masks as each client's own, with padding that does not count."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import torch

from hushfleet.data.samples import Samples
from hushfleet.learning.draws import Inputs, draw_dropout, drawn_inputs, shuffled_batches
from hushfleet.learning.own_samples import Teacher
from hushfleet.methods.method import TrainingConfig
from hushfleet.privacy.record import RecordMechanism
from hushfleet.simulator.engines.fast.vmap import device_data
from hushfleet.simulator.engines.fast.vmap.device_data import GroupBatches, SamplesOnDevice, step_count
from hushfleet.wire.format.spec import Augment, DropoutSpec

pytestmark = pytest.mark.slow

DROPOUT = (DropoutSpec((2, 3), 0.5), DropoutSpec((4,), 0.25))


def samples_of(count: int, seed: int) -> Samples:
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (count, 3, 2, 2), dtype=np.uint8)
    mean, std = rng.uniform(0.2, 0.7, 3), rng.uniform(0.1, 0.4, 3)
    return Samples(images, rng.integers(0, 10, count), tuple(mean.tolist()), tuple(std.tolist()))


def batches_of(
    counts: list[int],
    *,
    epochs: int = 2,
    dropout: tuple[DropoutSpec, ...] = DROPOUT,
    steps: int = 0,
    augment: Augment = "none",
    device: str = "cpu",
    **more: Any,
) -> GroupBatches:
    return GroupBatches(
        [samples_of(count, seed) for seed, count in enumerate(counts)],
        [np.random.default_rng(seed) for seed in range(len(counts))],
        SamplesOnDevice(torch.device(device)),
        config=TrainingConfig(batch_size=4, local_epochs=epochs, local_steps=steps),
        inputs=Inputs(dropout, augment),
        **more,
    )


@pytest.mark.parametrize("ahead", [1, 700, 1 << 26])
@pytest.mark.parametrize("counts", [[11, 9, 4, 3], [8, 8], [1], [6, 5, 2, 1, 1]])
def test_each_client_gets_its_own_batches_to_the_bit(
    counts: list[int], ahead: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_data, "AHEAD_BYTES", ahead)  # one step, several, all
    steps = list(batches_of(counts, device=device))
    assert len(steps) == -(-counts[0] // 4) * 2
    for row, count in enumerate(counts):
        samples, rng, taken = samples_of(count, row), np.random.default_rng(row), 0
        for _ in range(2):
            for indices in shuffled_batches(count, 4, rng):
                batch, own = steps[taken], samples.take(indices)
                assert batch.active > row
                assert batch.sizes[row] == len(own)
                np.testing.assert_array_equal(batch.x[row, : len(own)].cpu(), own.x)
                np.testing.assert_array_equal(batch.y[row, : len(own)].cpu(), own.y)
                for mask, expected in zip(batch.masks, draw_dropout(DROPOUT, len(own), rng), strict=True):
                    np.testing.assert_array_equal(mask[row, : len(own)].cpu(), expected)
                    assert (mask[row, len(own) :] == 0).all()
                # Padding is the batch's own first sample, without weight.
                np.testing.assert_array_equal(
                    batch.x[row, len(own) :].cpu(), own.x[:1].repeat(batch.x.shape[1] - len(own), 0)
                )
                if batch.weights is not None:
                    padding = batch.x.shape[1] - len(own)
                    assert batch.weights[row].tolist() == [1.0] * len(own) + [0.0] * padding
                taken += 1
        assert all(batch.active <= row for batch in steps[taken:])


def test_only_as_much_is_padded_as_a_step_needs(device: str) -> None:
    # 11, 9 and 4 samples in batches of 4: sizes 4 4 4 | 4 4 4 | 3 1, all of it twice, but the last client has one batch
    # an epoch and takes its second at step 1.
    steps = list(batches_of([11, 9, 4], dropout=(), device=device))
    assert [batch.sizes.tolist() for batch in steps] == [[4, 4, 4], [4, 4, 4], [3, 1], [4, 4], [4, 4], [3, 1]]
    assert [batch.x.shape[1] for batch in steps] == [4, 4, 3, 4, 4, 3]
    assert [batch.weights is None for batch in steps] == [True, True, False, True, True, False]
    assert steps[2].weights.tolist() == [[1, 1, 1], [1, 0, 0]]


def test_clients_come_with_most_steps_first() -> None:
    with pytest.raises(ValueError, match="falling order"):
        batches_of([3, 9])


def test_steps_are_counted_by_epochs_of_whole_and_partial_batches() -> None:
    assert [step_count(count, TrainingConfig(batch_size=4, local_epochs=3)) for count in (1, 4, 5, 12)] == [3, 3, 6, 9]


def test_a_number_of_steps_goes_through_the_samples_as_often_as_it_takes(device: str) -> None:
    steps = list(batches_of([11, 5], steps=4, dropout=(), device=device))
    assert [batch.sizes.tolist() for batch in steps] == [[4, 4], [4, 1], [3, 4], [4, 1]]
    assert [batch.epoch for batch in steps] == [0, 0, 0, 1]


def test_images_are_shifted_and_mirrored_as_each_client_would_alone_to_the_bit(device: str) -> None:
    counts, how = [40, 23, 5], Inputs(DROPOUT, "flip-crop")
    steps = list(batches_of(counts, augment="flip-crop", device=device))
    changed = 0
    for row, count in enumerate(counts):
        samples, rng, taken = samples_of(count, row), np.random.default_rng(row), 0
        for _ in range(2):
            for indices in shuffled_batches(count, 4, rng):
                x, masks = drawn_inputs(samples, indices, how, rng)
                np.testing.assert_array_equal(steps[taken].x[row, : len(x)].cpu(), x)
                np.testing.assert_array_equal(steps[taken].x[row, len(x) :].cpu(), x[:1].repeat(4 - len(x), 0))
                for mask, expected in zip(steps[taken].masks, masks, strict=True):
                    np.testing.assert_array_equal(mask[row, : len(x)].cpu(), expected)
                changed += (x != samples.take(indices).x).any()
                taken += 1
    assert changed > 10


def test_batches_by_record_may_be_empty_and_are_as_many_for_all(device: str) -> None:
    record = RecordMechanism(1.0, 0.0, sample_rate=0.06, batches=30, gradients_per_batch=1, batch_size=4)
    counts = [11, 9, 2]
    steps = list(batches_of(counts, record=record, augment="flip-crop", device=device))
    assert len(steps) == 30
    sizes = np.array([batch.sizes.tolist() for batch in steps])
    assert (sizes.max(1) == 0).any(), "the rate is such that all are empty at some step"
    assert (sizes.max(1) > 1).any()
    how = Inputs(DROPOUT, "flip-crop")
    for row, count in enumerate(counts):
        samples, rng = samples_of(count, row), np.random.default_rng(row)
        for batch in steps:
            indices = record.sample(count, rng)
            x, _ = drawn_inputs(samples, indices, how, rng)
            assert batch.sizes[row] == len(indices)
            np.testing.assert_array_equal(batch.x[row, : len(x)].cpu(), x)
            if batch.weights is not None:
                assert batch.weights[row].tolist() == [1.0] * len(x) + [0.0] * (batch.x.shape[1] - len(x))


def test_each_sample_brings_its_teachers_logits(device: str) -> None:
    counts = [9, 6, 3]
    rng = np.random.default_rng(3)
    logits = [rng.standard_normal((count, 5)).astype(np.float32) for count in counts]
    teachers = [Teacher(logits[0], 0.25), None, Teacher(logits[2], 1.0)]
    steps = list(batches_of(counts, dropout=(), teachers=teachers, device=device))
    for row, count in enumerate(counts):
        rng, taken = np.random.default_rng(row), 0
        for _ in range(2):
            for indices in shuffled_batches(count, 4, rng):
                own = logits[row][indices] if row != 1 else np.zeros((len(indices), 5))
                np.testing.assert_array_equal(steps[taken].teacher[row, : len(indices)].cpu(), own)
                assert set(steps[taken].distill[row].tolist()) == {(0.25, 0.0, 1.0)[row]}
                taken += 1
    assert next(iter(batches_of(counts, teachers=[None] * 3, device=device))).teacher is None


def test_data_stays_on_the_device_as_long_as_somebody_has_it(device: str) -> None:
    kept, samples, other = SamplesOnDevice(torch.device(device)), samples_of(5, 0), samples_of(5, 1)
    first, _ = kept.of(samples)
    assert first.dtype == torch.uint8
    assert kept.of(samples)[0] is first
    kept.of(other)
    assert len(kept) == 2
    kept.keep_only({samples})
    assert len(kept) == 1
    assert kept.of(samples)[0] is first
    del samples
    gc.collect()
    assert len(kept) == 0


def test_read_only_images_are_taken_without_a_warning(recwarn: pytest.WarningsRecorder, device: str) -> None:
    samples = samples_of(3, 0)
    samples.images.flags.writeable = False
    np.testing.assert_array_equal(SamplesOnDevice(torch.device(device)).of(samples)[0].cpu(), samples.images)
    assert not recwarn.list
