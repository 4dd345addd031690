"""With one bit a value, what a device has sent over all rounds is what it has noised, up to one residual."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from hushfleet.edge_client.worker.trainer import DeviceRound
from hushfleet.errors import StoreError
from hushfleet.methods.privatize import NoisedUpdate
from hushfleet.methods.state import PublicState
from hushfleet.wire.format.messages import RoundPlan
from hushfleet.wire.format.question import QuestionSpec
from hushfleet.wire.format.spec import WireSpec
from hushfleet.wire.format.update_values import decode_update
from support.edge import DEVICE, Bench, Package


def test_what_signs_leave_out_is_sent_later(make_bench: Callable[..., Bench], package: Package) -> None:
    bench = make_bench(package=package.with_spec(wire=WireSpec("one-bit"), method="fedglp-adp"))
    trainer, store, size = bench.load().trainer, bench.store, package.initial.size
    trainer.store = store
    seen: list[NoisedUpdate] = []
    trainer.observer = lambda round, trained, noised: seen.append(noised)
    task = trainer.spec.task
    noised, sent = np.zeros(size), np.zeros(size)
    residual = store.load_residual(task, size=size)
    assert not residual.any()
    for number in range(1, 5):
        state = store.load_state(task)
        shared = ~(PublicState.initial(size) if state is None else state.public).mask
        counts = [int(shared[layer.start : layer.stop].sum()) for layer in trainer.spec.model.layout.layers]
        cohort = {DEVICE: bytes(16)}
        plan = RoundPlan(task, number, 5, "open", bytes(32), 4 * size, cohort, 1, 60.0)
        entry = DeviceRound(trainer, plan).run(package.initial)
        values = decode_update(entry.data, public_key=store.identity.public_key, counts=counts).values
        noised[shared] += seen[-1].values[shared]
        sent[shared] += values
        before, residual = residual, store.load_residual(task, size=size)
        # the sign is that of the noised value and what was left out before, and a personal parameter's residual stays
        assert (np.signbit(values) == (seen[-1].values[shared] + before[shared] < 0)).all()
        assert (residual[~shared] == before[~shared]).all()
        np.testing.assert_allclose(sent + residual, noised, rtol=0, atol=1e-4)
        bench.restart()  # it is kept across a power cut
        store = trainer.store = bench.store
    assert shared.sum() < size
    assert "wire:residual" not in store.load_state(task).private
    with pytest.raises(StoreError, match="residual"):
        store.load_residual(task, size=size - 1)


def test_an_answer_between_two_trainings_leaves_what_signs_have_left_out(
    make_bench: Callable[..., Bench], linear: Package
) -> None:
    """The answer itself has another form, and leaves nothing out."""
    question = QuestionSpec("evaluation", every=2, noise_multiplier=4.0, held_out=0.3)
    bench = make_bench(package=linear.with_spec(wire=WireSpec("one-bit"), question=question))
    trainer, store, size = bench.load().trainer, bench.store, linear.initial.size
    trainer.store = store
    task, residuals, states = trainer.spec.task, [], []
    for number in (1, 2):
        plan = RoundPlan(task, number, 5, "open", bytes(32), 4 * size, {DEVICE: bytes(16)}, 1, 60.0)
        DeviceRound(trainer, plan).run(linear.initial)
        residuals.append(store.load_residual(task, size=size))
        states.append(store.load_state(task))
    trained, asked = states
    assert residuals[0].any()
    assert np.array_equal(*residuals)
    assert trained.public.digest() == asked.public.digest()
    assert np.array_equal(trained.own, asked.own)
