"""`hushfleet audit` on sound code, whose claims hold, and on code with planted faults, each of which it finds."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from hushfleet.aggregator.commands.main import build_app
from hushfleet.edge_client.storage.round_commit import OutboxEntry
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.methods import METHODS, privatize
from hushfleet.methods.cost import RoundTerms
from hushfleet.methods.privatize import privatized
from hushfleet.methods.question import RoundRules, rules_of
from hushfleet.params import PRIOR, WEIGHT, ParamLayout
from hushfleet.privacy.mechanism import GaussianMechanism
from hushfleet.privacy.record import RecordMechanism
from hushfleet.simulator.studies.audit import game
from hushfleet.simulator.studies.audit.finding import Finding, whole_task
from hushfleet.simulator.studies.audit.games import Effort, findings
from hushfleet.simulator.studies.audit.subject import Subject
from hushfleet.wire.format.question import QuestionSpec
from support.methods import WITH_RECORDS

pytestmark = pytest.mark.slow

MakeSubject = Callable[..., Subject]
RECORD = {"unit": "record", "noise_multiplier": 1.0, "sample_rate": 0.5, "batches": 3}


def of_device(subject: Subject, trials: int) -> Finding:
    return next(findings(subject, Effort(trials)))


def of_gradients(subject: Subject, trials: int = 1000) -> Finding:
    return next(findings(subject, Effort(trials)))


@pytest.fixture(autouse=True)
def few_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(game, "MEASURED", 16)


@pytest.mark.parametrize("name", METHODS)
def test_the_claims_of_all_methods_hold_for_a_device(name: str, audited: MakeSubject) -> None:
    found = of_device(audited(name), 50)
    if name == "fedavg":
        assert found.verdict == "no claim"
        assert found.measured_round > 1.5
        return
    assert found.verdict == "holds"
    assert 0 <= found.measured_round < found.claimed_round


@pytest.mark.parametrize("name", WITH_RECORDS)
def test_the_claims_of_all_methods_hold_for_a_record(name: str, audited: MakeSubject) -> None:
    found, update = findings(audited(name, **RECORD), Effort(100))
    assert found.verdict == update.verdict == "holds"
    assert 0 <= found.measured_round < found.claimed_round


def test_what_is_measured_comes_near_the_claim_with_trials(audited: MakeSubject) -> None:
    found = of_gradients(audited("dp-fedavg", **RECORD), 3000)
    assert found.claimed_round / 2 < found.measured_round_of_form < found.claimed_round


def test_an_audit_is_repeatable_by_its_seed(audited: MakeSubject) -> None:
    one, same, other = (of_device(audited("fedper", seed=seed), 40) for seed in (3, 3, 4))
    np.testing.assert_array_equal(one.scores.inside, same.scores.inside)
    np.testing.assert_array_equal(one.scores.outside, same.scores.outside)
    assert one.points == same.points
    assert not np.array_equal(one.scores.inside, other.scores.inside)


def test_field_noise_holds_as_well(audited: MakeSubject) -> None:
    subject = audited()
    found = of_device(Subject(subject.spec, subject.initial, subject.cohort, field_noise=True), 60)
    assert found.verdict == "holds"


def less_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    add_noise = GaussianMechanism.add_noise
    half = lambda self, x, stds, *rest, **named: add_noise(self, x, np.asarray(stds) / 2, *rest, **named)  # noqa: E731
    monkeypatch.setattr(GaussianMechanism, "add_noise", half)


def no_clipping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(privatize, "clip", lambda x, clip_norm: x)


def noise_drawn_for_each_asking(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that forgets what it committed: the round is trained, noised and charged anew."""

    def forgetful(self: DeviceStore, commit: Any) -> OutboxEntry:
        return OutboxEntry(commit.task, commit.round, commit.update, bytes(32), commit.public_before, "pending")

    monkeypatch.setattr(DeviceStore, "commit_round", forgetful)


def raw(entries: slice) -> Callable[[pytest.MonkeyPatch], None]:
    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        add_noise = GaussianMechanism.add_noise

        def leaking(self: GaussianMechanism, x: Any, *rest: Any, **named: Any) -> Any:
            noised = add_noise(self, x, *rest, **named)
            noised[entries] = x[entries]
            return noised

        monkeypatch.setattr(GaussianMechanism, "add_noise", leaking)

    return plant


@pytest.mark.parametrize(
    ("name", "trials", "plant"),
    [
        pytest.param("dp-fedavg", 120, less_noise, id="noise halved"),
        pytest.param("dp-fedavg", 60, no_clipping, id="clip skipped"),
        pytest.param("dp-fedavg", 300, noise_drawn_for_each_asking, id="noise twice"),
        pytest.param("fedglp-adp", 60, raw(slice(0, 108)), id="a layer without noise"),
        pytest.param("dp-fedavg", 60, raw(slice(40, 43)), id="raw entries below the mask"),
    ],
)
def test_a_planted_fault_is_found_for_a_device(
    name: str,
    trials: int,
    plant: Callable[[pytest.MonkeyPatch], None],
    audited: MakeSubject,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch)
    found = of_device(replace(audited(name, codec="float32", noise_multiplier=0.6), seed=2), trials)
    assert found.verdict == "VIOLATED"
    assert found.noise_measured < found.noise_claimed


@pytest.fixture
def evaluates(audited: MakeSubject) -> Callable[..., Subject]:
    """Makes a task that trains a linear model of classes, and evaluates it in every other round."""

    def make(noise_multiplier: float = 0.7) -> Subject:
        subject = audited(codec="float32", noise_multiplier=0.7)
        layout = ParamLayout((WEIGHT, PRIOR), ((10, 36), (10,)))
        question = QuestionSpec("evaluation", every=2, noise_multiplier=noise_multiplier)
        spec = replace(subject.spec, model=replace(subject.spec.model, layout=layout), question=question)
        return replace(subject, spec=spec, initial=np.resize(subject.initial, layout.size))

    return make


def test_a_task_that_asks_is_audited_with_its_answers(evaluates: Callable[..., Subject]) -> None:
    trained, answered = findings(evaluates(noise_multiplier=0.8), Effort(200))
    assert (trained.asks, answered.asks) == (False, True)
    assert (trained.rounds, answered.rounds) == (5, 5)
    assert [trained.verdict, answered.verdict] == ["holds", "holds"]
    assert [trained.noise_claimed, answered.noise_claimed] == [0.7, 0.8]
    for found in (trained, answered):
        assert found.claimed_round / 3 < found.measured_round_of_form < found.claimed_round
    whole = whole_task([trained, answered])
    assert whole.claimed > max(trained.claimed, answered.claimed)
    assert max(trained.measured, answered.measured) < whole.measured < whole.claimed
    assert whole.rounds == 10


def of_answers(fault: Callable[[Any], None]) -> Callable[[pytest.MonkeyPatch], None]:
    """Plants a fault in the method of questions alone."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        def faulty(*arguments: Any) -> RoundRules:
            rules = rules_of(*arguments)
            if rules.method.name == "question":
                fault(rules.method)
            return rules

        monkeypatch.setattr("hushfleet.methods.question.rules_of", faulty)

    return plant


def half_of_the_noise(method: Any) -> None:
    method.privatize = lambda context, update, noise, release: privatized(
        method.parts.stages,
        replace(context, setting=replace(context.setting, terms=RoundTerms(controls={"noise_multiplier": 0.35}))),
        update,
        noise,
        method.charge(RoundTerms()),
    )


def no_bound(method: Any) -> None:
    privatize = method.privatize
    method.privatize = lambda context, update, noise, release: replace(
        out := privatize(context, update, noise), values=out.values + update * np.float32(1e-3)
    )


@pytest.mark.parametrize("fault", [half_of_the_noise, no_bound])
def test_a_fault_in_answers_alone_is_found(
    fault: Callable[[Any], None], evaluates: Callable[..., Subject], monkeypatch: pytest.MonkeyPatch
) -> None:
    of_answers(fault)(monkeypatch)
    trained, answered = findings(evaluates(), Effort(150))
    assert [trained.verdict, answered.verdict] == ["holds", "VIOLATED"]


def test_rounds_are_audited_with_their_own_controls(audited: MakeSubject, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that charges the noise of the plan, and adds the task's: the costliest round's, so no epsilon of a round
    is exceeded, but that of the others is claimed to be less."""
    controls = {
        number: {"noise_multiplier": 0.6 if number % 2 else 2.0, "clip_norm": 1 / number} for number in range(1, 11)
    }
    subject = replace(audited(codec="float32", noise_multiplier=0.6), simulated=controls, seed=2)
    sound = of_device(subject, 300)
    assert sound.verdict == "holds"
    assert 0.2 * sound.claimed < sound.measured < sound.claimed
    add_noise = GaussianMechanism.add_noise

    def of_the_task(self: GaussianMechanism, x: Any, stds: Any, *rest: Any, **named: Any) -> Any:
        return add_noise(self, x, np.asarray(stds) * (0.6 / self.noise_multiplier), *rest, **named)

    monkeypatch.setattr(GaussianMechanism, "add_noise", of_the_task)
    found = of_device(subject, 300)
    assert found.verdict == "VIOLATED"
    assert found.measured_round < found.claimed_round


def less_noise_on_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    noised_mean = RecordMechanism.noised_mean

    def less(self: RecordMechanism, total: Any, noise: Any) -> Any:
        values = {each.name: getattr(self, each.name) for each in fields(RecordMechanism)}
        return noised_mean(RecordMechanism(**{**values, "noise_multiplier": self.noise_multiplier / 2}), total, noise)

    monkeypatch.setattr(RecordMechanism, "noised_mean", less)


def no_clipping_of_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hushfleet.privacy.clipping.clip", lambda x, clip_norm, drop: x)


@pytest.mark.parametrize("plant", [less_noise_on_gradients, no_clipping_of_gradients])
def test_a_planted_fault_is_found_for_a_record(
    plant: Callable[[pytest.MonkeyPatch], None], audited: MakeSubject, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    assert of_gradients(audited("dp-fedavg", **RECORD)).verdict == "VIOLATED"


def test_two_gradients_of_a_batch_that_are_charged_as_independent_are_found(
    audited: MakeSubject, monkeypatch: pytest.MonkeyPatch
) -> None:
    privacy = {"unit": "record", "noise_multiplier": 0.5, "sample_rate": 0.02, "batches": 60}
    assert of_gradients(audited("feddpa", **privacy), 1500).verdict == "holds"
    charge = RecordMechanism.charge

    def as_independent(self: RecordMechanism) -> Any:
        pair = charge(self)
        values = {each.name: getattr(pair, each.name) for each in fields(pair)}
        steps = self.batches * self.gradients_per_batch
        return type(pair)(**{**values, "noise_multiplier": self.noise_multiplier, "steps": steps})

    monkeypatch.setattr(RecordMechanism, "charge", as_independent)
    assert of_gradients(audited("feddpa", **privacy), 1500).verdict == "VIOLATED"


RECORD_TASK = Path(__file__).parents[4] / "tasks" / "digits-record.toml"


def test_the_command_prints_claim_and_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault makes it exit with 1."""
    words = ["audit", str(RECORD_TASK), "--trials", "300", "--set", "round.rounds=2", "--set", "data.limit=200"]
    words += ["--set", "privacy.sample_rate=0.25", "--set", "privacy.delta=0.001"]
    done = CliRunner().invoke(build_app(), [*words, "--json", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "audit.json").read_text("utf-8"))
    assert "below the claim" in (tmp_path / "audit.html").read_text("utf-8")
    assert [each["verdict"] for each in found["findings"]] == ["holds"] * 2
    gradients, _ = found["findings"]
    assert 0 < gradients["measured_round_of_form"] < gradients["claimed_round"] < gradients["claimed"]
    assert gradients["measured"] <= gradients["claimed"] == pytest.approx(8)
    less_noise_on_gradients(monkeypatch)
    done = CliRunner().invoke(build_app(), [*words, "--trials", "1000"])
    assert done.exit_code == 1
    assert "VIOLATED" in done.output


def test_the_command_refuses_what_it_cannot_do(tmp_path: Path) -> None:
    for words in (["--trials", "3"], ["--no-one-run"], ["--set", "privacy.nose=1"], ["--unit", "planet"]):
        assert CliRunner().invoke(build_app(), ["audit", str(RECORD_TASK), *words]).exit_code != 0
    assert CliRunner().invoke(build_app(), ["audit", str(tmp_path / "none.toml")]).exit_code != 0
