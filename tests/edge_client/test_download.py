"""The global model by differences: chains, newcomers, and whatever may be wrong with a difference."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest

from hushfleet.edge_client.download import FIRST_WAIT_S, MOST_ASKS
from hushfleet.edge_client.rounds import POLL_S
from hushfleet.edge_client.worker import handover
from hushfleet.wire.format.chunks import split
from hushfleet.wire.format.difference import encode_difference, params_digest
from hushfleet.wire.format.messages import BASE_BYTES, DifferenceRef, RoundPlan, ServerState
from support.edge import DEVICE, Bench, Waiting
from support.stores import sql

MakeBench = Callable[..., Bench]


def moved(bench: Bench, *, seed: int) -> DifferenceRef:
    """The aggregator's next global model, and the difference that leads to it, which it serves."""
    server = bench.server
    base = server.global_params.astype(np.float32)
    target = base + np.random.default_rng(seed).normal(0, 0.01, base.size).astype(np.float32)
    counts = [layer.size for layer in server.package.spec.model.layout.layers]
    made = encode_difference(
        base, target, task=server.package.spec.task, round=seed, counts=counts, steps=[0.005] * len(counts)
    )
    server.global_params = made.result
    return served(bench, base, made.data)


def served(bench: Bench, base: np.ndarray, data: bytes) -> DifferenceRef:
    ref = DifferenceRef(params_digest(base)[:BASE_BYTES], hashlib.sha256(data).digest(), len(data))
    bench.server.differences[ref.digest] = data
    return ref


def open_round(bench: Bench, number: int, differences: list[DifferenceRef]) -> RoundPlan:
    state = bench.store.load_state("digits-test")
    public = bench.server.initial_public() if state is None else state.public
    bench.server.wants.clear()
    return bench.server.open_round(number, cohort={"board-1": public.digest()}, differences=tuple(differences))


def trained(bench: Bench, plan: RoundPlan) -> None:
    """Until the round is over, and the model that it was trained on is the plan's."""
    bench.acked(plan.round)
    assert bench.store.global_digest == plan.global_digest
    model = bench.store.blob(plan.global_digest)
    assert np.array_equal(np.frombuffer(model, "<f4"), bench.server.global_params)
    assert len(bench.store.blob_digests()) == 4, "package, two graphs and the last model"


def asked(bench: Bench) -> list[bytes]:
    return list(dict.fromkeys(want.digest for want in bench.server.wants))


@pytest.fixture
def bench(make_bench: MakeBench) -> Bench:
    """After the first round, which a newcomer trains on a whole model."""
    made = make_bench()
    made.steps()
    first = open_round(made, 1, [])
    trained(made, first)
    assert asked(made) == [first.global_digest]
    return made


def test_one_difference_instead_of_the_model(bench: Bench) -> None:
    ref = moved(bench, seed=1)
    plan = open_round(bench, 2, [ref])
    trained(bench, plan)
    assert asked(bench) == [ref.digest]
    assert ref.size < plan.global_bytes / 6


def test_a_device_that_skipped_rounds_applies_what_it_missed(bench: Bench) -> None:
    chain = [moved(bench, seed=seed) for seed in (1, 2, 3)]
    trained(bench, open_round(bench, 4, chain))
    assert asked(bench) == [ref.digest for ref in chain]
    chain.append(moved(bench, seed=4))
    trained(bench, open_round(bench, 5, chain))
    assert asked(bench) == [chain[-1].digest]


@pytest.fixture
def adding(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Waiting:
    """A guardian without NumPy, whose worker adds the differences of round 2, and does not come to an end."""
    monkeypatch.setattr(handover, "sys", SimpleNamespace(modules={}))
    waiting = bench.while_training(lambda: None, looks=1 << 30)
    open_round(bench, 2, [moved(bench, seed=1)])
    bench.until(lambda: bool(waiting.jobs))
    assert waiting.jobs[0].differences
    return waiting


def test_messages_are_answered_while_a_worker_adds_differences(bench: Bench, adding: Waiting) -> None:
    births = len(bench.server.births)
    server = ServerState(bench.server.epoch, "ready", bench.server.identity.public_key)
    bench.server.send(bench.server.topics.down(DEVICE), server)  # the aggregator has not heard from the device
    bench.steps(5)
    assert len(bench.server.births) == births + 1
    assert bench.agent.rests_s(1.0) <= POLL_S, "and the worker's end is noticed"
    assert len(adding.jobs) == 1
    adding._left = adding._looks = 0
    trained(bench, bench.agent.rounds.plan)
    assert [bool(job.differences) for job in adding.jobs] == [True, False]
    assert bench.server.wants[-1].digest in bench.server.differences, "the whole model was not asked for"


def test_a_worker_that_does_not_add_costs_the_whole_model(bench: Bench, adding: Waiting) -> None:
    bench.clock.now += handover.MOST_APPLYING_S
    adding._looks = 0
    trained(bench, bench.agent.rounds.plan)
    assert asked(bench)[-1] == bench.agent.rounds.plan.global_digest


def test_differences_of_a_round_that_is_over_are_added_no_more(bench: Bench, adding: Waiting) -> None:
    plan = open_round(bench, 3, [moved(bench, seed=2)])
    bench.until(lambda: len(adding.jobs) == 2)
    assert adding.jobs[1].plan == plan
    adding._left = adding._looks = 0
    trained(bench, plan)


def test_the_differences_of_a_plan_are_asked_for_at_once(bench: Bench) -> None:
    chain = [moved(bench, seed=seed) for seed in (1, 2, 3)]
    bench.server.serves = False
    plan = open_round(bench, 4, chain)
    bench.until(lambda: asked(bench) == [ref.digest for ref in chain])
    bench.server.serves = True
    bench.clock.now += FIRST_WAIT_S
    trained(bench, plan)


def test_a_model_that_is_kept_is_not_fetched(bench: Bench) -> None:
    trained(bench, open_round(bench, 2, []))
    assert asked(bench) == []


def test_a_newcomer_fetches_the_whole_model(make_bench: MakeBench) -> None:
    bench = make_bench()
    bench.steps()
    plan = open_round(bench, 1, [moved(bench, seed=1)])
    trained(bench, plan)
    assert asked(bench) == [plan.global_digest]


def test_a_power_cut_between_two_differences_costs_nothing_twice(bench: Bench) -> None:
    chain = [moved(bench, seed=seed) for seed in (1, 2, 3)]
    plan = open_round(bench, 2, chain)
    bench.until(lambda: chain[1].digest in bench.store.blob_digests())
    bench.restart()
    trained(bench, plan)
    assert asked(bench) == [ref.digest for ref in chain]
    assert len([want for want in bench.server.wants if want.digest == chain[0].digest]) == 1


def test_a_power_cut_after_the_model_was_made(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = open_round(bench, 2, [moved(bench, seed=1)])
    with monkeypatch.context() as patch:
        patch.setattr(bench.store, "count_attempt", lambda *_: 1 / 0)
        bench.until(lambda: plan.global_digest in bench.store.blob_digests())
    bench.restart()
    bench.server.wants.clear()
    trained(bench, plan)
    assert asked(bench) == []


def test_a_difference_that_never_comes_is_given_up_for_the_whole_model(bench: Bench) -> None:
    ref = moved(bench, seed=1)
    del bench.server.differences[ref.digest]
    plan = open_round(bench, 2, [ref])
    waited = 0.0
    while bench.store.global_digest != plan.global_digest:
        bench.steps(5)
        bench.clock.now += FIRST_WAIT_S
        waited += FIRST_WAIT_S
        assert waited <= 60
    trained(bench, plan)
    assert asked(bench) == [ref.digest, plan.global_digest]
    assert len([want for want in bench.server.wants if want.digest == ref.digest]) == MOST_ASKS
    # the next round has another chance
    ref = moved(bench, seed=2)
    trained(bench, open_round(bench, 3, [ref]))
    assert asked(bench) == [ref.digest]


def test_an_aggregator_that_was_away_is_asked_for_the_difference_again(bench: Bench) -> None:
    ref = moved(bench, seed=1)
    bench.server.serves = False
    plan = open_round(bench, 2, [ref])
    for _ in range(5):
        bench.steps(5)
        bench.clock.now += FIRST_WAIT_S
    bench.server.serves = True
    bench.server.epoch += 1
    bench.server.announce()
    trained(bench, plan)
    assert asked(bench) == [ref.digest]


def test_an_aggregator_that_lost_its_differences_is_asked_for_the_model(bench: Bench) -> None:
    ref = moved(bench, seed=1)
    bench.server.serves = False
    open_round(bench, 2, [ref])
    bench.until(lambda: asked(bench) == [ref.digest])
    bench.server.serves = True
    plan = open_round(bench, 2, [])
    trained(bench, plan)
    assert asked(bench) == [plan.global_digest]


def test_other_bytes_in_place_of_a_difference(bench: Bench) -> None:
    """Without an access list anyone may publish chunks: they are noticed, and the whole model is fetched."""
    ref = moved(bench, seed=1)
    bench.server.serves = False
    plan = open_round(bench, 2, [ref])
    bench.until(lambda: asked(bench) == [ref.digest])
    for frame in split(bytes(ref.size), digest=ref.digest):
        bench.server.link.publish(bench.server.topics.blob(ref.digest), frame)
    bench.steps(5)
    bench.server.serves = True
    bench.clock.now += FIRST_WAIT_S
    trained(bench, plan)
    assert asked(bench) == [ref.digest, plan.global_digest]
    assert bench.agent.rejected.total == 1


@pytest.mark.parametrize("fault", ["garbage", "another base", "another result", "another task", "cut short"])
def test_a_hostile_difference_is_refused_once(bench: Bench, fault: str) -> None:
    base = bench.server.global_params.astype(np.float32)
    good = moved(bench, seed=1)
    data = bench.server.differences[good.digest]
    if fault == "garbage":
        data = b"HD" + bytes(500)
    elif fault == "another base":
        data = bench.server.differences[moved(bench, seed=2).digest]
    elif fault == "another result":
        at = data.index(params_digest(bench.server.global_params))
        data = data[:at] + bytes(32) + data[at + 32 :]
    elif fault == "another task":
        data = data.replace(b"digits-test", b"digits-t3st")
    else:
        data = data[:-1]
    bad = served(bench, base, data)
    plan = open_round(bench, 2, [bad])
    trained(bench, plan)
    assert asked(bench) == [bad.digest, plan.global_digest]
    assert len(bench.server.wants) == 2


def test_after_one_failure_no_other_difference_is_tried_for_the_same_model(bench: Bench) -> None:
    base = bench.server.global_params.astype(np.float32)
    good = moved(bench, seed=1)
    bad = served(bench, base, b"HD" + bytes(500))
    bench.server.serves = False
    plan = open_round(bench, 2, [bad])
    bench.until(lambda: asked(bench) == [bad.digest])
    for frame in split(bench.server.differences[bad.digest]):
        bench.server.link.publish(bench.server.topics.blob(bad.digest), frame)
    bench.until(lambda: plan.global_digest in asked(bench))
    plan = bench.server.open_round(2, cohort=plan.cohort, differences=(good,))
    bench.until(lambda: bench.agent.rounds.plan == plan)
    bench.steps(5)
    bench.server.serves = True
    bench.clock.now += FIRST_WAIT_S
    trained(bench, plan)
    assert asked(bench) == [bad.digest, plan.global_digest]


def test_a_chain_that_leads_elsewhere_is_refused_once(bench: Bench) -> None:
    ref = moved(bench, seed=1)
    bench.server.global_params = bench.server.global_params + np.float32(1)
    plan = open_round(bench, 2, [ref])
    trained(bench, plan)
    assert asked(bench) == [ref.digest, plan.global_digest]


def test_a_kept_model_that_is_damaged_is_not_built_upon(bench: Bench) -> None:
    digest = bench.store.global_digest
    sql(bench.store, "UPDATE blobs SET data = zeroblob(length(data)) WHERE digest = ?", (digest,))
    ref = moved(bench, seed=1)
    plan = open_round(bench, 2, [ref])
    trained(bench, plan)
    assert asked(bench) == [ref.digest, plan.global_digest]
