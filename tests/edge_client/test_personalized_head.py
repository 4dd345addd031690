"""A device in the field chooses its personalized head for each new model, fetches the final one, and tells nobody; it
answers a round that asks by the question's own noise and charge, whatever its package and its plan say."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import onnx
import pytest
from PIL import Image

from hushfleet.data.held_out import is_held_out
from hushfleet.durations import Period
from hushfleet.edge_client.__main__ import main
from hushfleet.edge_client.board.config import DeviceConfig
from hushfleet.edge_client.board.drift import HeldOutTest, note_test, read_tests
from hushfleet.edge_client.board.local_data import LocalData
from hushfleet.edge_client.board.sample_files import load_arrays
from hushfleet.edge_client.download import LONGEST_WAIT_S
from hushfleet.edge_client.status import sentences, status
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.edge_client.worker import head as personalized_head
from hushfleet.edge_client.worker.in_process import InProcess
from hushfleet.edge_client.worker.job import Died, Job, Outcome
from hushfleet.edge_client.worker.personalized_model import personalized_model
from hushfleet.edge_client.worker.predict import graphs_of
from hushfleet.edge_client.worker.trainer import DeviceRound
from hushfleet.methods import method_of
from hushfleet.methods.answer import evaluation_answer
from hushfleet.methods.hush_rule import signal
from hushfleet.models import get_model
from hushfleet.models.export import export_graphs
from hushfleet.privacy.charge import DEVICE_ADJACENCY, Charge
from hushfleet.privacy.ledger import epsilon_server_of
from hushfleet.privacy.mechanism import GaussianMechanism
from hushfleet.privacy.noise_for import noise_multiplier_for
from hushfleet.privacy.spending import charges_on
from hushfleet.schema import pack
from hushfleet.wire.format.question import QuestionSpec
from hushfleet.wire.format.spec import BlobRef, EarlierTask, PrivacySpec, SecureSpec, TaskSpec
from hushfleet.wire.format.update import UpdateHeader, read_header
from hushfleet.wire.format.update_values import decode_update
from support.edge import DEVICE, Bench, Package, Waiting
from support.stores import sql

MakeBench = Callable[..., Bench]
TASK = "digits-test"


@pytest.fixture
def field(config: DeviceConfig) -> DeviceConfig:
    return replace(config, simulation=None)


@pytest.fixture
def bench(make_bench: MakeBench, linear: Package, field: DeviceConfig) -> Bench:
    return make_bench(package=linear, config=field)


def take_part(bench: Bench) -> None:
    bench.train(1)
    bench.steps(5)


def finish(bench: Bench, seed: int = 3) -> bytes:
    """The task ends with another model; its digest."""
    noise = np.random.default_rng(seed).normal(size=bench.server.global_params.shape)
    bench.server.global_params = noise.astype(np.float32)
    return bench.server.open_round(5, phase="finished").global_digest


def kept(bench: Bench) -> bytes | None:
    head = bench.store.personalized_head(TASK)
    return None if head is None else head.global_digest


def test_a_head_for_each_round_and_one_for_the_final_model(bench: Bench) -> None:
    take_part(bench)
    assert kept(bench) == bench.store.global_digest
    sent = (len(bench.server.updates), len(bench.server.offers), len(bench.server.declines))
    final = finish(bench)
    bench.until(lambda: kept(bench) == final)
    assert bench.store.global_digest == final
    assert bench.store.blob(final) is not None
    assert sent == (len(bench.server.updates), len(bench.server.offers), len(bench.server.declines))


def close_round(bench: Bench, round: int, seed: int = 3) -> bytes:
    """The round closes with another model; its digest."""
    noise = np.random.default_rng(seed).normal(size=bench.server.global_params.shape)
    bench.server.global_params = noise.astype(np.float32)
    return bench.server.open_round(round, phase="closed").global_digest


def test_a_head_follows_each_closed_round_and_the_next_round_needs_no_other_model(bench: Bench) -> None:
    """The plan of a closed round names a model that no board has yet."""
    take_part(bench)
    model = close_round(bench, 1)
    bench.until(lambda: kept(bench) == model)
    head = bench.store.personalized_head(TASK)
    assert (head.round, head.shared) == (1, bench.server.global_params.astype("<f4").tobytes())
    asked = len(bench.server.wants)
    bench.train(2)
    assert (len(bench.server.wants), bench.store.personalized_head(TASK).round) == (asked, 1)


def test_a_board_that_was_in_no_round_has_a_head_of_each_and_keeps_one_model(
    make_bench: MakeBench, linear: Package, field: DeviceConfig
) -> None:
    """It cannot pay, was off while the first round was open, and starts again while another one is."""
    poor = replace(field, limits=replace(field.limits, epsilon_server=0.001))
    bench = make_bench(package=linear, config=poor, announce=False)
    model = close_round(bench, 1)
    bench.server.announce()
    bench.until(lambda: kept(bench) == model)
    for number in (2, 3):
        bench.server.open_round(number)
        bench.until(lambda: len(bench.server.declines) == number - 1)  # noqa: B023
        model = close_round(bench, number, seed=number)
        bench.until(lambda: kept(bench) == model)  # noqa: B023
        bench.steps(5)
    assert bench.store.ledger.entries() == []
    before = bench.store.blob_digests()
    bench.server.open_round(4)
    bench.restart()
    bench.server.announce()
    bench.until(lambda: len(bench.server.declines) == 3)
    bench.steps()
    assert (kept(bench), bench.store.blob_digests()) == (model, before)
    assert len(before) == 4, "package, two graphs, one model"


def test_a_head_is_never_chosen_with_a_model_that_has_not_come(bench: Bench) -> None:
    take_part(bench)
    before, bench.server.serves = kept(bench), False
    model = close_round(bench, 1)
    bench.steps()
    assert kept(bench) == before
    bench.server.serves = True
    bench.clock.now += LONGEST_WAIT_S
    bench.until(lambda: kept(bench) == model)


def begin_next(bench: Bench, package: Package) -> None:
    bench.server.package, bench.server.global_params = package, package.initial
    bench.server.latest = (0, b"")
    bench.server.announce()
    bench.server.open_round(0, phase="closed")
    bench.steps()


def test_the_earlier_task_answers_until_the_next_one_has_a_closed_round(
    bench: Bench, linear: Package, field: DeviceConfig, tmp_path: Path
) -> None:
    """Also if the board sits it out, and if others of its tasks' files are deleted."""
    take_part(bench)
    first = close_round(bench, 1)
    bench.until(lambda: kept(bench) == first)
    autumn = personalized_model(bench.store)
    begin_next(bench, linear.with_spec(task="winter"))
    bench.server.open_round(1, cohort={})  # it is not in this round
    bench.steps()
    own = personalized_model(bench.store)
    assert (own.spec.task, own.round) == (TASK, 1)
    np.testing.assert_array_equal(own.params, autumn.params)
    assert f", of {TASK}, round 1; the task winter has no closed round yet: right on" in told(field, bench)
    second = close_round(bench, 1, seed=4)
    bench.until(lambda: personalized_model(bench.store).spec.task == "winter")
    winter = bench.store.personalized_head("winter")
    assert (winter.round, winter.global_digest) == (1, second)
    assert told(field, bench).count("no closed round") == 0
    assert bench.store.personalized_head(TASK).global_digest == first, "its shared head is a part of the next ones"
    assert bench.store.blob(bench.store.personalized_head(TASK).package) is not None


def test_a_task_that_ends_before_its_first_round_closes_takes_nothing_away(bench: Bench, linear: Package) -> None:
    """The board has trained in it, and would delete the files of the task before."""
    take_part(bench)
    first = close_round(bench, 1)
    bench.until(lambda: kept(bench) == first)
    begin_next(bench, linear.with_spec(task="winter"))
    bench.train(1)
    assert bench.store.task_digest == BlobRef.of(bench.server.package.data).digest
    begin_next(bench, linear.with_spec(task="spring"))
    own = personalized_model(bench.store)
    assert (own.spec.task, own.round) == (TASK, 1)
    graphs_of(bench.store, own.spec)


def test_where_the_newest_model_is_damaged_the_earlier_one_answers(bench: Bench, linear: Package) -> None:
    close_round(bench, 1)
    bench.until(lambda: kept(bench) is not None)
    begin_next(bench, linear.with_spec(task="winter"))
    close_round(bench, 1, seed=4)
    bench.until(lambda: personalized_model(bench.store).spec.task == "winter")
    package = BlobRef.of(bench.server.package.data).digest
    sql(bench.store, "UPDATE blobs SET data = x'00' WHERE digest = ?", (package,))
    assert personalized_model(bench.store).spec.task == TASK


def told(config: DeviceConfig, bench: Bench) -> str:
    return sentences(status(config, bench.store))["model"]


@pytest.mark.parametrize("closed", [1, 5])
def test_heads_of_a_task_without_start_begin_with_the_sum_of_both_shared_heads(
    closed: int, bench: Bench, linear: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head of one round of five counts as a fifth."""
    close_round(bench, 5)
    bench.until(lambda: kept(bench) is not None)
    first, given = bench.server.global_params, []
    real = personalized_head.personalized_head_of
    monkeypatch.setattr(
        personalized_head,
        "personalized_head_of",
        lambda params, *rest: given.append((params, rest[2])) or real(params, *rest),
    )
    monkeypatch.setattr(TaskSpec, "signal", property(lambda spec: 20.0))
    begin_next(bench, linear.with_spec(task="winter"))
    assert given == []
    close_round(bench, closed, seed=4)
    bench.until(lambda: bool(given))
    np.testing.assert_allclose(given[0][0], (first + bench.server.global_params) / (1 + closed / 5), rtol=1e-5)
    assert given[0][1] == pytest.approx(20 * math.sqrt(1 + closed / 5))
    continued = EarlierTask("winter", linear.spec.model.class_names)
    begin_next(bench, linear.with_spec(task="spring", continues=continued))
    close_round(bench, 1, seed=5)
    bench.until(lambda: len(given) == 2)
    np.testing.assert_array_equal(given[1][0], bench.server.global_params)
    assert given[1][1] == 20


def test_a_task_with_other_features_and_no_start_answers_from_its_end_on(bench: Bench, linear: Package) -> None:
    close_round(bench, 1)
    bench.until(lambda: kept(bench) is not None)
    begin_next(bench, linear.with_spec(task="winter", model=replace(linear.spec.model, mean=(0.5,))))
    close_round(bench, 1, seed=4)
    bench.steps()
    assert personalized_model(bench.store).spec.task == TASK
    assert "has other features" in bench.store.awaited
    finish(bench)
    bench.until(lambda: personalized_model(bench.store).spec.task == "winter")


def test_a_new_class_has_a_head_before_the_first_round(bench: Bench, linear: Package) -> None:
    """Its images are there, and the earlier model knows none of them."""
    nine = linear.spec.model
    made = get_model("linear", classes=9, input_shape=(1, 8, 8))
    graphs = export_graphs(made)
    refs = {"gradient": BlobRef.of(graphs.gradient), "inference": BlobRef.of(graphs.inference)}
    smaller = replace(nine, class_names=nine.class_names[:9], layout=made.layout, **refs)
    blobs = {refs["gradient"].digest: graphs.gradient, refs["inference"].digest: graphs.inference}
    bench.server.package = replace(linear, blobs=blobs).with_spec(task="nine", model=smaller)
    bench.server.global_params = made.init(7)
    bench.server.announce()
    with np.load(bench.config.data.path) as data:
        few = {name: data[name][data["labels"] < 9] for name in data}
    np.savez(bench.config.data.path, **few)
    close_round(bench, 1)
    bench.until(lambda: bench.store.personalized_head("nine") is not None)
    begin_next(bench, linear)
    own = personalized_model(bench.store)
    assert (own.spec.task, own.round, len(own.params)) == (TASK, 0, linear.spec.model.layout.size)
    assert bench.store.task_digest == BlobRef.of(bench.server.package.data).digest, "its owner can label the new class"


def test_a_board_that_hides_its_training_time_says_why_it_has_no_head_yet(
    make_bench: MakeBench, linear: Package, field: DeviceConfig
) -> None:
    hides = replace(field, limits=replace(field.limits, constant_time=True))
    bench = make_bench(package=linear, config=hides)
    bench.train(1)
    asked = len(bench.server.wants)
    close_round(bench, 1)
    bench.steps()
    assert (kept(bench), len(bench.server.wants)) == (None, asked)
    assert "hides its training time, and chooses a head" in told(hides, bench)
    final = finish(bench)
    bench.until(lambda: kept(bench) == final)


def test_a_personalised_network_answers_until_the_next_task_has_trained_one(
    make_bench: MakeBench, package: Package, field: DeviceConfig
) -> None:
    bench = make_bench(package=package, config=field)
    take_part(bench)
    first = personalized_model(bench.store)
    assert (first.kind, first.round) == ("personalised", 1)
    graph = onnx.load_from_string(package.blobs[package.spec.model.inference.digest])
    graph.producer_name = "another"
    data = bytes(graph.SerializeToString())
    model = replace(package.spec.model, inference=BlobRef.of(data))
    blobs = {**package.blobs, model.inference.digest: data}
    begin_next(bench, replace(package, blobs=blobs).with_spec(task="winter", model=model))
    close_round(bench, 1)
    bench.restart()
    bench.server.announce()
    bench.steps()
    own = personalized_model(bench.store)
    np.testing.assert_array_equal(own.params, first.params)
    assert own.spec.task == TASK
    graphs_of(bench.store, own.spec)
    assert "this board has not trained in the task winter yet" in told(field, bench)
    bench.server.open_round(2)
    bench.acked(2)
    bench.steps(5)
    assert personalized_model(bench.store).spec.task == "winter"
    assert bench.store.blob(package.spec.model.inference.digest) is None, "dropped now"


@pytest.fixture
def camera(tmp_path: Path, field: DeviceConfig) -> DeviceConfig:
    """A board with three images without labels, one of them broken."""
    folder = tmp_path / "camera"
    (folder / "today").mkdir(parents=True)
    for index in range(2):
        pixels = np.random.default_rng(index).integers(0, 256, (8, 8), np.uint8)
        Image.fromarray(pixels).save(folder / "today" / f"{index}.png")
    (folder / "broken.png").write_bytes(b"no image")
    return replace(field, data=replace(field.data, unlabelled=str(folder)))


@pytest.mark.parametrize(("r", "used"), [(19.0, 2), (20.0, 0), (None, 0)])
def test_images_without_labels_serve_the_final_head_of_a_small_fleet_alone(
    make_bench: MakeBench, linear: Package, camera: DeviceConfig, monkeypatch: pytest.MonkeyPatch,
    r: float | None, used: int,
) -> None:  # fmt: skip
    monkeypatch.setattr(TaskSpec, "signal", property(lambda spec: r))
    read: list[int] = []
    real = LocalData.unlabelled
    monkeypatch.setattr(LocalData, "unlabelled", lambda data: read.append(1) or real(data))
    bench = make_bench(package=linear, config=camera)
    take_part(bench)
    assert kept(bench) is not None
    assert (read, bench.store.personalized_head(TASK).choice.unlabelled) == ([], 0), "no round waits for them"
    final = finish(bench)
    bench.until(lambda: kept(bench) == final)
    choice = bench.store.personalized_head(TASK).choice
    assert (choice.images, choice.unlabelled, len(read)) == (48, used, min(used, 1))
    assert ("; and 2 samples without labels" in choice.plain) == bool(used)


def test_a_final_model_of_another_size_is_not_fetched(bench: Bench) -> None:
    """It would fill the memory of the board, and then its card."""
    take_part(bench)
    before = kept(bench), len(bench.server.wants)
    bench.server.open_round(5, phase="finished", global_digest=bytes(32), global_bytes=1 << 30)
    bench.steps()
    assert (kept(bench), len(bench.server.wants)) == before


def test_who_was_in_no_round_has_a_head_too(bench: Bench) -> None:
    final = finish(bench)
    bench.until(lambda: kept(bench) == final)
    assert bench.store.ledger.entries() == []


def test_it_is_chosen_once_also_after_a_restart(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    real = personalized_head.personalized_head_of
    monkeypatch.setattr(personalized_head, "personalized_head_of", lambda *given: calls.append(1) or real(*given))
    final = finish(bench)
    bench.until(lambda: kept(bench) == final)
    bench.restart()
    bench.server.announce()
    bench.steps(100)
    assert len(calls) == 1


def as_schema_5(store: DeviceStore, **facts: bytes) -> None:
    """What an earlier client has left: one personalized head, as a fact."""
    store._connection.execute("DROP TABLE own_models")
    store._set_facts("keep it as earlier clients did", schema=b"5", **facts)


def test_a_board_predicts_with_the_head_that_an_earlier_version_has_kept(bench: Bench) -> None:
    take_part(bench)
    head = bench.store.personalized_head(TASK)
    assert head is not None
    before = personalized_model(bench.store)
    as_schema_5(bench.store, mixture=pack(replace(head, package=None, round=0, shared=b"")))
    bench.restart()
    after = personalized_model(bench.store)
    np.testing.assert_array_equal(after.params, before.params)
    assert (after.kind, after.spec.task, after.round) == (before.kind, TASK, 0)
    assert bench.store._fact("mixture") is None


def test_a_head_of_0_3_0_is_made_anew(bench: Bench) -> None:
    as_schema_5(bench.store, personalized_head=b"\x80", mixture=b"\x80", task_digest=bytes(32))
    bench.restart()
    assert bench.store.personalized_head() is None
    bench.server.announce()
    final = finish(bench)
    bench.until(lambda: kept(bench) == final)
    assert bench.store._fact("own_head") is None


def test_a_final_model_that_does_not_come_leaves_the_older_head(bench: Bench) -> None:
    take_part(bench)
    before = kept(bench)
    bench.server.serves = False
    finish(bench)
    for _ in range(10):
        bench.steps(5)
        bench.clock.now += LONGEST_WAIT_S
    assert kept(bench) == before is not None
    assert not bench.agent.blobs.is_fetching, "it is not asked for without end"


def test_a_choice_that_fails_spoils_no_round(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: object) -> None:
        raise MemoryError

    monkeypatch.setattr(personalized_head, "personalized_head_of", fails)
    take_part(bench)
    bench.train(2)
    assert kept(bench) is None


def test_a_choice_that_kills_its_worker_is_not_made_again(bench: Bench) -> None:
    bench.agent.rounds._handover._workshop = Dying(bench.workshop)
    close_round(bench, 1)
    bench.steps()
    assert kept(bench) is None
    assert bench.workshop.begun == 1


class Dying(Waiting):
    """A workshop whose workers die."""

    begun = 0

    def __init__(self, inner: InProcess) -> None:
        super().__init__(inner, lambda: None)

    def begin(self, job: Job) -> None:
        self.begun += 1
        super().begin(job)

    def poll(self) -> Outcome | None:
        job, self._job = self._job, None
        return None if job is None else Died("was killed")


def test_a_simulated_device_leaves_it_to_the_simulator(
    make_bench: MakeBench, linear: Package, config: DeviceConfig
) -> None:
    bench = make_bench(package=linear, config=config)
    finish(bench)
    bench.steps()
    assert (kept(bench), bench.server.wants[3:]) == (None, [])


def test_status_and_predict_say_which(
    bench: Bench, field: DeviceConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    take_part(bench)
    final = finish(bench)
    bench.until(lambda: kept(bench) == final)
    path, image = tmp_path / "device.toml", tmp_path / "image.png"
    path.write_text(
        f'[device]\nid = "{DEVICE}"\nfederation = "test"\nstate_dir = "state"\nallow_volatile_state = true\n'
        '[broker]\nurl = "mqtt://127.0.0.1:9"\n'
        '[data]\nkind = "arrays"\npath = "train.npz"\n[limits]\nepsilon_server = 1000.0\n'
    )
    Image.fromarray(np.random.default_rng(3).integers(0, 256, (8, 8), np.uint8)).save(image)
    choice = bench.store.personalized_head(TASK).choice
    words = choice.plain
    assert main(["status", str(path)]) == 0
    told = capsys.readouterr().out
    assert (
        f"model       the board's personalized head ({words}), of {TASK}, round 5: right on {choice.right} of 48 own"
        in told
    )
    assert f"{choice.right_shared} against {choice.right_alone}; that stays here" in told
    assert "penalty" not in told
    assert main(["status", str(path), "--details"]) == 0
    assert f"{TASK}: {choice.text}" in capsys.readouterr().out
    assert main(["status", str(path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["own_head"]
    assert (told["task"], told["images"]) == (TASK, 48)
    assert main(["predict", str(path), str(image), "--json", "--top", "10"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["model"] == words
    assert sum(told["classes"].values()) == pytest.approx(1)


def test_the_signal_follows_from_the_task_package(package: Package) -> None:
    """As `hush_rule` counts it, of the devices that a sum has at least."""
    sigma = noise_multiplier_for(epsilon=2.0, delta=1e-5, steps=20)
    spec = replace(package.spec, rounds=20)

    def of(**changes: object) -> float | None:
        given = {"unit": "device", "accounting": "as-published", "clip_norm": 1.0, "delta": 1e-5, "noise_split": 50}
        privacy = PrivacySpec(**{**given, "noise_multiplier": sigma, **changes})  # type: ignore[arg-type]
        codec = "masked" if privacy.accounting == "secure" else "quantized"
        return replace(spec, privacy=privacy, wire=replace(spec.wire, codec=codec)).signal

    assert of() == pytest.approx(signal(devices=50, epsilon=2.0, delta=1e-5), rel=1e-3)
    secure = SecureSpec(24, min_devices=45, honest_devices=40)
    expected = signal(devices=math.sqrt(45 * 40), epsilon=2.0, delta=1e-5)
    assert of(accounting="secure", secure=secure, noise_split=40) == pytest.approx(expected, rel=1e-3)
    assert of(noise_multiplier=0.0) == math.inf
    assert (of(unit="record"), of(accounting="strict", noise_split=1)) == (None, None)


def test_it_answers_a_round_that_asks_and_notes_here_alone_how_right_it_is(
    make_bench: MakeBench, linear: Package, field: DeviceConfig
) -> None:
    """Round 5 asks. Its samples that never train are tested after each model, and the months are compared."""
    question = QuestionSpec("evaluation", every=5, noise_multiplier=4.0, held_out=0.3)
    bench = make_bench(package=linear.with_spec(question=question), config=field)
    take_part(bench)
    state_dir = bench.store.path.parent
    (test,) = read_tests(state_dir)
    assert 0 < test.samples < len(LocalData(field.data, linear.spec.model).samples())
    use = sentences(status(field, bench.store))["samples"]
    assert f"{48 - test.samples} samples are used, {test.samples} are kept for evaluations, none left out" in use
    state = bench.store.load_state(TASK)
    bench.server.open_round(5)
    bench.acked(5)
    entry = bench.store.ledger.entries()[-1]
    assert (entry.round, entry.charge.noise_multiplier) == (5, 4.0)
    after = bench.store.load_state(TASK)
    assert state is not None
    assert after is not None
    assert after.public.digest() == state.public.digest(), "training would go on from where it was"
    assert len(bench.store.outbox(TASK, 5).data) < 1000, "a few values"
    note_test(state_dir, HeldOutTest("2099-01", 0, 40))
    note_test(state_dir, HeldOutTest("2099-02", 30, 40))
    note_test(state_dir, HeldOutTest("2099-03", 3, 40))
    words = sentences(status(field, bench.store))["model"]
    assert (
        "On its samples that never train it was right on 3 of 40 in 2099-03, and on 30 of 40 in 2099-02: its data have "
        "changed, or their labels. "
    ) in words


def test_a_board_predicts_with_its_model_while_its_fleet_is_asked_and_afterwards(
    make_bench: MakeBench, linear: Package, field: DeviceConfig
) -> None:
    """Its own task goes on a day later perhaps, and it would fetch network and features anew."""
    bench = make_bench(package=linear, config=field)
    take_part(bench)
    graph = onnx.load_from_string(linear.blobs[linear.spec.model.gradient.digest])
    graph.producer_name = "another"
    own, data = linear.spec.model.gradient.digest, bytes(graph.SerializeToString())
    model = replace(linear.spec.model, gradient=BlobRef.of(data))
    asked = replace(linear, blobs={**linear.blobs, model.gradient.digest: data})
    question = QuestionSpec("counts", every=1, noise_multiplier=4.0)
    bench.server.package = asked.with_spec(task="ask-counts-1", rounds=1, question=question, model=model)
    bench.server.announce()
    bench.server.open_round(1)
    bench.until(lambda: len(bench.store.ledger.entries()) == 2 and bench.entry_status(1) == "acked")
    bench.steps(5)
    assert bench.store.blob(own) is not None
    assert personalized_model(bench.store).spec.task == TASK
    bench.server.package = linear
    bench.server.announce()
    state = bench.store.load_state(TASK)
    assert state is not None
    bench.server.open_round(2, cohort={DEVICE: state.public.digest()})
    bench.acked(2)
    assert (bench.store.blob(own) is None, bench.store.blob(model.gradient.digest)) == (False, None), "dropped now"


def test_the_rounds_that_are_left_are_counted_by_what_each_costs(
    make_bench: MakeBench, linear: Package, field: DeviceConfig
) -> None:
    """W3: counted as training, cheap evaluations made "5 more rounds" of 7 that a task had to come, and paid for."""
    question = QuestionSpec("evaluation", every=2, noise_multiplier=40.0, held_out=0.3)
    bench = make_bench(package=linear.with_spec(question=question, rounds=9), config=field)
    take_part(bench)
    (train,) = [entry.charge for entry in bench.store.ledger.entries()]
    asking = replace(train, noise_multiplier=GaussianMechanism(40.0).charge().noise_multiplier)
    costs = [asking if number % 2 == 0 or number == 9 else train for number in range(1, 10)]
    delta = field.limits.delta
    for missing, left in ((0.0, 8), (1e-4, 7)):
        limit = epsilon_server_of(costs, delta=delta) + 1e-7 - missing
        limited = replace(field, limits=replace(field.limits, epsilon_server=limit))
        found = status(limited, bench.store)
        assert (found["rounds_left"], found["task_rounds_left"]) == (left, 8)
        said = sentences(found)["privacy"]
        assert ("the rest is enough for all 8 rounds that this task has to come" in said) == (left == 8)


def test_a_round_that_asks_is_answered_without_new_samples(
    make_bench: MakeBench, linear: Package, field: DeviceConfig
) -> None:
    """It follows a round that trained on all of them, so nobody who tells of too few would ever answer."""
    question = QuestionSpec("evaluation", every=5, noise_multiplier=4.0, held_out=0.3)
    tells = replace(field, limits=replace(field.limits, tell_new=True))
    bench = make_bench(package=linear.with_spec(question=question, after_new=5), config=tells)
    take_part(bench)
    bench.server.open_round(5)
    bench.until(lambda: bench.entry_status(5) == "acked" or bool(bench.server.declines))
    assert bench.server.declines == []


def test_an_answer_makes_no_sample_new_again(make_bench: MakeBench, linear: Package, field: DeviceConfig) -> None:
    """It has counted none, as after a restart, and notes none."""
    tells = replace(field, limits=replace(field.limits, tell_new=True))
    bench = make_bench(package=linear.with_spec(question=EVALUATION, after_new=5), config=tells)
    take_part(bench)
    bench.restart()
    state = bench.store.load_state(TASK)
    assert state is not None
    cohort = {DEVICE: state.public.digest()}
    answered(bench, 2, cohort=cohort)
    bench.server.open_round(3, cohort=cohort)
    bench.until(lambda: bench.entry_status(3) == "acked" or bool(bench.server.declines))
    assert [decline.code for decline in bench.server.declines] == ["paused"]


def test_an_answer_is_announced_at_the_end_of_a_slot_where_the_owner_hides_how_long_work_takes(
    make_bench: MakeBench, linear: Package, field: DeviceConfig
) -> None:
    question = QuestionSpec("evaluation", every=5, noise_multiplier=4.0, held_out=0.3)
    hidden = replace(field, limits=replace(field.limits, constant_time=True))
    bench = make_bench(package=linear.with_spec(question=question), config=hidden)
    bench.until(lambda: bool(bench.server.births))
    began = bench.clock.now
    bench.server.open_round(5)
    bench.acked(5)
    assert bench.clock.now - began == pytest.approx(8.0, abs=0.5), "whatever the number of samples"


def answered(bench: Bench, round: int = 1, **changes: object) -> tuple[UpdateHeader, np.ndarray]:
    """Opens a round that asks, and gives what the server decodes: its header and its values."""
    bench.server.open_round(round, **changes)
    bench.until(lambda: bench.entry_status(round) == "acked" or bool(bench.server.declines))
    assert bench.server.declines == []
    (layer,) = read_header(data := bench.server.updates[-1]).noise_stds
    assert layer >= 0
    count = read_header(data).value_count
    decoded = decode_update(data, public_key=bench.store.identity.public_key, counts=[count])
    return decoded.header, np.array(decoded.values)


def packed_anew(package: Package, **sections: dict[str, object] | object) -> Package:
    """The package of an aggregator that checks nothing: `sections` change single keys of its bytes."""
    plain = msgpack.unpackb(package.data)
    for name, value in sections.items():
        plain[name] = plain[name] | value if isinstance(value, dict) else value
    data = msgpack.packb(plain)
    return replace(package, data=data, blobs={**package.blobs, hashlib.sha256(data).digest(): data})


COUNTS = QuestionSpec("counts", every=1, noise_multiplier=4.0, most=50)
EVALUATION = QuestionSpec("evaluation", every=2, noise_multiplier=4.0, held_out=0.3)
OF_RECORDS = {"unit": "record", "sample_rate": 0.5, "batches": 2, "clip_norm": 3.0}


@pytest.mark.parametrize("question", [COUNTS, EVALUATION], ids=["counts", "evaluation"])
def test_a_package_that_asks_about_records_is_refused(
    question: QuestionSpec, make_bench: MakeBench, linear: Package, field: DeviceConfig
) -> None:
    """An answer has no gradients, to which alone the unit `record` adds noise."""
    bench = make_bench(package=packed_anew(linear.with_spec(question=question), privacy=OF_RECORDS), config=field)
    bench.server.open_round(2)
    bench.until(lambda: bool(bench.server.declines))
    (decline,) = bench.server.declines
    assert decline.code == "error"
    assert "of a task whose unit of privacy is the device" in decline.reason
    assert (bench.server.updates, bench.store.ledger.entries()) == ([], [])


@pytest.mark.parametrize("question", [COUNTS, EVALUATION], ids=["counts", "evaluation"])
def test_a_question_has_its_own_noise_and_charge_whatever_the_unit_of_its_package_is(
    question: QuestionSpec,
    make_bench: MakeBench,
    linear: Package,
    field: DeviceConfig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A second guard, for a package that the first one lets through."""
    monkeypatch.setattr("hushfleet.wire.format.spec.require", lambda *_: None)
    bench = make_bench(package=packed_anew(linear.with_spec(question=question), privacy=OF_RECORDS), config=field)
    header, values = answered(bench, 2)
    (entry,) = bench.store.ledger.entries()
    assert entry.charge == Charge("device", DEVICE_ADJACENCY, "gaussian", 4.0)
    assert (header.noise_stds, header.clip_norms, header.multiplier_server) == ((4.0,), (1.0,), 4.0)
    assert np.abs(values).max() > 1, "an answer alone is shorter"


def test_no_plan_changes_the_noise_of_a_question(make_bench: MakeBench, linear: Package, field: DeviceConfig) -> None:
    """Neither by controls, nor by a division among strangers that the owner and the package would allow."""
    privacy = replace(linear.spec.privacy, accounting="as-published", noise_split=9)
    package = linear.with_spec(question=EVALUATION, privacy=privacy)
    trusting = replace(field, limits=replace(field.limits, accounting="as-published", noise_preference=0.5))
    bench = make_bench(package=package, config=trusting)
    cohort = dict.fromkeys([DEVICE, *"abcdefgh"], bench.server.initial_public().digest())
    controls = {"noise_multiplier": 0.01, "clip_norm": 100.0}
    header, _ = answered(bench, 2, controls=controls, noise_split=9, cohort=cohort)
    (entry,) = bench.store.ledger.entries()
    assert (entry.charge.noise_multiplier, entry.charge.noise_split) == (4.0, 1)
    assert (header.noise_stds, header.clip_norms) == ((4.0,), (1.0,))


def test_a_question_without_noise_is_refused_by_a_board_with_a_limit(
    make_bench: MakeBench, linear: Package, field: DeviceConfig
) -> None:
    package = linear.with_spec(question=replace(COUNTS, noise_multiplier=0.0))
    bench = make_bench(package=package, config=field)
    bench.server.open_round(1)
    bench.until(lambda: bool(bench.server.declines))
    assert [decline.code for decline in bench.server.declines] == ["budget"]
    assert bench.store.ledger.entries() == []


NEARLY_SILENT = 1e-4
"""A noise multiplier with which an answer can be read."""


@pytest.fixture
def talkative(field: DeviceConfig) -> DeviceConfig:
    """A board whose owner allows any epsilon."""
    return replace(field, limits=replace(field.limits, epsilon_server=math.inf))


@pytest.mark.parametrize("tell_drift", [False, True])
def test_drift_is_told_only_if_the_owner_allows_it(
    tell_drift: bool, make_bench: MakeBench, linear: Package, talkative: DeviceConfig
) -> None:
    board = replace(talkative, limits=replace(talkative.limits, tell_drift=tell_drift))
    bench = make_bench(package=linear.with_spec(question=QuestionSpec("drift", 1, NEARLY_SILENT)), config=board)
    for month, right in (("2026-01", 38), ("2026-02", 5)):
        note_test(bench.store.path.parent, HeldOutTest(month, right, 40))
    _, values = answered(bench)
    assert values * math.sqrt(2) == pytest.approx([float(tell_drift)] * 2, abs=0.01)
    assert bench.store.ledger.rounds_charged() == 1, "charged in both cases"


def test_samples_that_are_held_out_train_nothing(
    make_bench: MakeBench, linear: Package, talkative: DeviceConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither an update nor the heads of an evaluation, whose answer is the truth on the samples that are left."""
    trained: list[np.ndarray] = []
    train = DeviceRound.train

    def watched(round: DeviceRound, *arguments: Any, **more: Any) -> Any:
        trained.append(round.samples().images)
        return train(round, *arguments, **more)

    monkeypatch.setattr(DeviceRound, "train", watched)
    question = replace(EVALUATION, noise_multiplier=NEARLY_SILENT)
    task = linear.with_spec(question=question)
    bench = make_bench(package=task, config=talkative)
    take_part(bench)
    state = bench.store.load_state(TASK)
    assert state is not None
    _, values = answered(bench, 2, cohort={DEVICE: state.public.digest()})
    whole = load_arrays(Path(talkative.data.path), linear.spec.model)
    held_out = is_held_out(whole, 0.3)
    assert 5 < held_out.sum() < 25
    assert [each.tolist() for each in trained] == [whole.images[~held_out].tolist()]
    parts = (whole.take(np.flatnonzero(part)) for part in (~held_out, held_out))
    assert values == pytest.approx(evaluation_answer(task.spec, bench.server.global_params, *parts), abs=0.01)


def test_counts_tell_the_samples_that_are_left_out(
    make_bench: MakeBench, linear: Package, talkative: DeviceConfig
) -> None:
    """Those with labels of no class of the task: a fleet is asked for their number, and no board tells it otherwise."""
    with np.load(talkative.data.path) as data:
        images, labels = data["images"], np.arange(48) % 12
    np.savez(talkative.data.path, images=images, labels=labels)
    bench = make_bench(
        package=linear.with_spec(question=replace(COUNTS, noise_multiplier=NEARLY_SILENT)), config=talkative
    )
    _, values = answered(bench)
    assert values * COUNTS.most == pytest.approx([4.0] * 10 + [8.0], abs=0.1)


def test_a_board_without_data_answers_a_statistic_like_any_other(
    make_bench: MakeBench, linear: Package, talkative: DeviceConfig, tmp_path: Path
) -> None:
    """Also if the task's method would take no such board for a training: a decline is charged nothing."""
    board = replace(talkative, data=replace(talkative.data, path=str(tmp_path / "nothing.npz")))
    bench = make_bench(package=linear.with_spec(question=replace(COUNTS, noise_multiplier=NEARLY_SILENT)), config=board)
    _, values = answered(bench)
    assert values == pytest.approx(np.zeros(11), abs=0.01)
    assert bench.store.ledger.rounds_charged() == 1


@pytest.mark.parametrize("question", [COUNTS, EVALUATION], ids=["counts", "evaluation"])
def test_an_answer_that_fails_is_noise_alone_and_no_decline(
    question: QuestionSpec,
    make_bench: MakeBench,
    linear: Package,
    talkative: DeviceConfig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether it fails depends on the data, and a decline is charged nothing."""

    def fails(*_: object) -> None:
        raise ValueError("a sample is 42")

    for name in ("statistic_answer", "evaluation_answer"):
        monkeypatch.setattr(f"hushfleet.methods.answer.{name}", fails)
    task = linear.with_spec(question=replace(question, noise_multiplier=NEARLY_SILENT))
    bench = make_bench(package=task, config=talkative)
    _, values = answered(bench, 2)
    assert values == pytest.approx(np.zeros(len(values)), abs=0.01)
    assert [entry.charge.noise_multiplier for entry in bench.store.ledger.entries()] == [NEARLY_SILENT]
    assert "a sample is 42" in status(talkative, bench.store)["training"], "it is told on the board alone"


def test_a_question_is_charged_in_every_window_of_data(
    make_bench: MakeBench, linear: Package, field: DeviceConfig
) -> None:
    """An evaluation looks at the samples of all windows, a training round at those of its own."""
    task = linear.with_spec(question=EVALUATION, method="hush", method_config={}, data_window_s=86400)
    bench = make_bench(package=task, config=field)
    newcomer = method_of(task.spec).init_state().public
    bench.server.open_round(1, cohort={DEVICE: newcomer.digest()})
    bench.acked(1)
    state = bench.store.load_state(TASK)
    assert state is not None
    bench.loaded.trainer.arrived = lambda window: pytest.fail(f"it looks at {window} alone")
    answered(bench, 2, cohort={DEVICE: state.public.digest()})
    trained, asked = bench.store.ledger.entries()
    assert trained.window is not None
    assert asked.window is None
    another = Period(trained.window.stop, trained.window.stop + 86400)
    assert charges_on(another, [trained, asked]) == [asked.charge]
    assert charges_on(trained.window, [trained, asked]) == [trained.charge, asked.charge]
