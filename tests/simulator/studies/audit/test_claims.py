"""The epsilon that `hushfleet audit` claims for a task: what the ledgers of devices say after all of its rounds."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hushfleet.aggregator.commands.main import build_app
from hushfleet.aggregator.config.task import Task, parse_task
from hushfleet.methods import METHODS
from hushfleet.methods.heads import HeadFirstConfig
from hushfleet.privacy.ledger import LedgerEntry, epsilon_server_of
from hushfleet.simulator.run_folder import Simulation, begin
from hushfleet.simulator.studies.audit import game
from hushfleet.simulator.studies.audit.finding import WholeTask, whole_task
from hushfleet.simulator.studies.audit.games import Effort, findings, subject_of
from support.methods import WITH_RECORDS, with_norms

pytestmark = pytest.mark.slow

ROUNDS, DEVICES, NOISE, RATE, STEPS = 6, 3, 1.3, 0.25, 4
GRADIENTS = {**dict.fromkeys(("dp-fedsam", "feddpa", "fedaddp", "apfl"), 2), "pfedme": 5}
"""How many gradients of a batch a method takes, if not 1: a record pays n with 1 / sqrt(n) of the multiplier."""


@pytest.fixture(autouse=True)
def few_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(game, "MEASURED", 2)
    monkeypatch.setattr("hushfleet.simulator.studies.audit.games._LEAST_TRIALS", 1)


def task_of(name: str, unit: str = "device", **sections: Any) -> Task:
    lasts: dict[str, Any] = (
        {"local_epochs": 2} if issubclass(METHODS[name].config, HeadFirstConfig) else {"local_steps": STEPS}
    )
    noise = 0.0 if (name, unit) == ("fedavg", "device") else NOISE
    privacy: dict[str, Any] = {"unit": unit, "clip_norm": 0.01, "noise_multiplier": noise, "delta": 1e-3}
    usual = {
        "model": {"name": "digits-cnn"},
        "method": {"name": name, "optimizer": "sgd", "learning_rate": 0.1, "batch_size": 8, **lasts},
        "privacy": privacy | ({"sample_rate": RATE} if unit == "record" else {}),
        "data": {"name": "digits", "devices": DEVICES, "limit": 60, "partition": "iid"},
        "round": {"rounds": ROUNDS},
    }
    merged = {part: {**usual.get(part, {}), **sections.get(part, {})} for part in usual | sections}
    kept = {part: {key: v for key, v in table.items() if v is not None} for part, table in merged.items()}
    return parse_task(with_norms({"name": "claimed", "seed": 3 if unit == "device" else 5, **kept}))


def claimed_for(simulation: Simulation) -> WholeTask:
    """What the audit says of the task, by a game that is too short to show anything."""
    return whole_task(list(findings(subject_of(simulation.prepared, seed=0), Effort(20))))


def epsilon_of(simulation: Simulation, entries: Iterable[LedgerEntry]) -> float:
    privacy = simulation.prepared.spec.privacy
    charges = [entry.charge for entry in entries]
    return epsilon_server_of(charges, delta=privacy.delta, accountant=privacy.accountant)


def check(simulation: Simulation, audit: Any, *, rounds: int) -> list[LedgerEntry]:
    """Compares the claim with each device's ledger after the run; gives one of the ledgers."""
    whole = claimed_for(simulation)
    ledgers = [audit.ledger(simulation, each.name) for each in simulation.fleet.devices]
    assert [len(entries) for entries in ledgers] == [rounds] * len(ledgers)
    assert whole.rounds == rounds
    assert [epsilon_of(simulation, entries) for entries in ledgers] == [pytest.approx(whole.claimed, rel=1e-9)] * len(
        ledgers
    )
    assert whole.measured <= whole.claimed
    return ledgers[0]


def privacy_says(*words: object) -> float:
    done = CliRunner().invoke(build_app(), ["privacy", *map(str, words), "--json"])
    assert done.exit_code == 0, done.output
    (said,) = (each["epsilon"] for each in json.loads(done.stdout)["adversaries"] if each["adversary"] == "server")
    return math.inf if said is None else float(said)


@pytest.mark.parametrize(
    ("method", "unit"), [*((name, "device") for name in METHODS), *((name, "record") for name in WITH_RECORDS)]
)
def test_the_claim_is_the_ledgers(method: str, unit: str, runs: Any, audit: Any, tmp_path: Path) -> None:
    simulation = runs.fast(begin(task_of(method, unit), tmp_path / "run", data_dir=None))
    entries = check(simulation, audit, rounds=ROUNDS)
    spent = epsilon_of(simulation, entries)
    multipliers = [entry.charge.noise_multiplier for entry in entries]
    if method == "apdp-fl":  # the noise falls as training goes on, so `hushfleet privacy` cannot say what it costs
        assert multipliers[0] == pytest.approx(NOISE)
        assert multipliers[-1] < multipliers[0]
        return
    if (method, unit) == ("hush", "device"):
        assert len(set(multipliers)) > 1, "rounds differ, and all together cost what equal rounds would"
    if unit == "device":
        asked = privacy_says(
            "--noise-multiplier", 0 if method == "fedavg" else NOISE, "--rounds", ROUNDS, "--delta", 1e-3
        )
    else:
        noise = NOISE / math.sqrt(GRADIENTS.get(method, 1))
        steps = entries[0].charge.steps * ROUNDS
        words = ("--unit", "record", "--noise-multiplier", noise, "--rounds", steps, "--delta", 1e-3)
        asked = privacy_says(*words, "--sample-rate", RATE)
    assert spent == pytest.approx(asked, rel=1e-6)


def test_the_claim_about_divided_noise_is_the_ledgers(runs: Any, audit: Any, tmp_path: Path) -> None:
    task = task_of("dp-fedavg", privacy={"accounting": "as-published"})
    simulation = runs.fast(begin(task, tmp_path / "run", data_dir=None))
    spent = epsilon_of(simulation, check(simulation, audit, rounds=ROUNDS))
    words = ("--noise-multiplier", NOISE, "--rounds", ROUNDS, "--delta", 1e-3, "--noise-split", DEVICES)
    assert spent == pytest.approx(privacy_says(*words), rel=1e-6)


SUMS = {"accounting": "secure", "epsilon": 2.0, "noise_multiplier": None, "clip_norm": None, "delta": 1e-5}
FEATURES = {"name": "linear", "features": "filters"}


@pytest.mark.parametrize("accounting", ["secure", "strict"])
def test_a_tasks_own_evaluation_is_in_the_claim(accounting: str, runs: Any, audit: Any, tmp_path: Path) -> None:
    task = task_of(
        "hush",
        model=FEATURES,
        method={"local_steps": None},
        privacy={**SUMS, "accounting": accounting},
        data={"devices": 6, "limit": 120},
        evaluation={"every": 3},
    )
    simulation = runs.fast(begin(task, tmp_path / "run", data_dir=None))
    entries = check(simulation, audit, rounds=ROUNDS + 2)
    assert epsilon_of(simulation, entries) == pytest.approx(2.0, rel=1e-3)


@pytest.mark.parametrize("statistic", [{"kind": "counts"}, {"kind": "mean", "column": "3"}, {"kind": "drift"}])
@pytest.mark.parametrize("accounting", ["secure", "strict"])
def test_a_statistic_is_audited(
    accounting: str, statistic: dict[str, Any], runs: Any, audit: Any, tmp_path: Path
) -> None:
    task = task_of(
        "hush",
        model={"name": "linear"},
        method={"local_steps": None},
        privacy={**SUMS, "accounting": accounting, "clip_norm": 1.0},
        round={"rounds": 1},
        statistic=statistic,
    )
    simulation = runs.fast(begin(task, tmp_path / "run", data_dir=None))
    entries = check(simulation, audit, rounds=1)
    assert epsilon_of(simulation, entries) == pytest.approx(2.0, rel=1e-3)


def test_the_command_prints_the_claim_about_all_rounds(tmp_path: Path) -> None:
    """What was wrong: each round of `hush` counted as the first, which made 2.19 of 2.0."""
    task = Path(__file__).parents[4] / "tasks" / "digits-hush.toml"
    words = ["--trials", "60", "--json", "--set", "data.devices=12", "--set", "data.limit=144"]
    done = CliRunner().invoke(build_app(), ["audit", str(task), *words])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["rounds"] == 20
    assert found["claimed"] == pytest.approx(2.0, rel=1e-3)
    assert found["findings"][0]["claimed_round"] * 20 > found["claimed"]
