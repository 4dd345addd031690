"""Each rule between the settings of a task file or of a method: its code, by an example that breaks it; its words."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from hushfleet.aggregator.config import rules
from hushfleet.aggregator.config.task import parse_task
from hushfleet.data.form import SOUND_KEYS
from hushfleet.errors import BadInput
from hushfleet.methods import METHODS
from hushfleet.rules import BrokenRule, check_rules
from support.written_keys import ACCEPTS

WORDS = Path(__file__).parent / "rules.txt"
OF_METHODS = {code for method in METHODS.values() for code in method.config.rules}
TABLES = [
    table for name, table in vars(rules).items() if name.isupper() and name != "LOSSES" and isinstance(table, dict)
]
SECURE = {"privacy.accounting": "secure", "privacy.epsilon": 2.0, "method.name": "dp-fedavg", "data.devices": 100}
BUFFERED = {
    "round.mode": "buffered",
    "round.buffer_size": 4,
    "method.name": "dp-fedavg",
    "privacy.noise_multiplier": 1.0,
}
NUMBERS = {"model.name": "linear", "model.loss": "squared", "model.tolerance": 0.5, "method.name": "dp-fedavg"}
INPUTS = {"model.name": "autoencoder", "model.loss": "reconstruction", "method.name": "dp-fedavg"}
_COLUMNS = ("label", "device", "time", "record")
ARRAYS = {"data.name": "arrays", "data.path": "mine.npz"}
ASKS = {"model.name": "linear", "method.name": "dp-fedavg", "privacy.epsilon": 1.0, "round.rounds": 1}
MEAN = {**ASKS, "statistic.kind": "mean", "statistic.column": "0"}
BREAKS: dict[str, dict[str, Any]] = {
    "model.features-need-linear": {"model.features": "scattering"},
    "model.log-mel-needs-network": {"model.name": "linear", "model.features": "sound:log-mel"},
    "model.directions-need-features": {"model.name": "linear", "model.directions": 3},
    "model.classes-need-public": {"model.public_classes": True},
    "model.head-needs-layers": {"model.name": "linear", "model.share": "head"},
    "model.weights-need-fixed-layers": {"model.weights": "layers.safetensors"},
    "model.targets-need-own-loss": {"model.targets": "numbers"},
    "model.tolerance-needs-numbers": {"model.loss": "huber"},
    "model.false-alarms-need-reconstruction": {"model.false_alarms": 0.1},
    "model.reconstruction-needs-layers": {"model.name": "linear", "model.loss": "reconstruction"},
    "model.autoencoder-needs-reconstruction": {"model.name": "autoencoder"},
    "task.moments-are-summed-once": {**INPUTS, **ARRAYS, "model.name": "second-moments"},
    "method.momentum-needs-sgd": {"method.momentum": 0.5},
    "method.adamw-needs-decay": {"method.optimizer": "adamw"},
    "method.step-rounds-need-step": {"method.schedule": "step"},
    "task.warmup-below-rounds": {"method.warmup_rounds": 5, "round.rounds": 5},
    "task.own-loss-needs-no-teacher": {"model.loss": "/focal.py:focal", "method.name": "pfedsd"},
    "task.accumulate-needs-device": {"method.accumulate": 2, "privacy.unit": "record"},
    "method.personal-epochs-below-local": {"method.name": "feddpa", "method.personal_epochs": 1},
    "method.head-needs-whole-epochs": {"method.name": "fedrep", "method.local_steps": 5},
    "method.head-epochs-below-local": {"method.name": "fedrep", "method.head_epochs": 2},
    "method.freeze-ratio-trains-head": {
        "method.name": "perfreezeclip",
        "method.freeze_ratio": 0.1,
        "method.local_epochs": 2,
    },
    "method.steps-are-plain": {"method.name": "apfl", "method.schedule": "cosine"},
    "method.steps-are-counted": {"method.name": "scaffold", "method.local_epochs": 2},
    "method.pull-shorter-than-step": {"method.name": "fednova", "method.learning_rate": 0.5, "method.mu": 2.0},
    "privacy.noise-twice": {"privacy.noise_multiplier": 1.0, "privacy.epsilon": 2.0},
    "privacy.sample-rate-needs-record": {"privacy.sample_rate": 0.1},
    "privacy.reading-needs-device": {"privacy.reading": "client-sampling", "privacy.unit": "record"},
    "privacy.reading-needs-as-published": {"privacy.reading": "client-sampling"},
    "privacy.noise-needs-clip-norm": {"privacy.clip_norm": math.inf, "privacy.epsilon": 2.0},
    "privacy.clip-norm-range": {"privacy.clip_norm": 1e-40},
    "privacy.noise-multiplier-range": {"privacy.noise_multiplier": 1e-40},
    "plan.simulation-incomplete": {"plan.measured_on": "digits"},
    "data.window-too-short": {"data.window": "30min"},
    "data.dirichlet-needs-alpha": {"data.partition": "dirichlet-class"},
    "data.pathological-needs-classes": {"data.partition": "pathological"},
    "data.class-names-differ": {**ARRAYS, "data.class_names": ["a", "a"]},
    "data.folder-needs-form": {"data.name": "folder", "data.class_names": ["a", "b"]},
    "data.path-needs-own-data": {"data.path": "images"},
    "data.mean-needs-std": {**ARRAYS, "data.mean": [0.5]},
    "data.tokens-need-vocabulary": {**ARRAYS, "data.values": "tokens"},
    "data.tokens-without-mean": {
        **ARRAYS,
        "data.values": "tokens",
        "data.vocabulary": 9,
        "data.mean": [1.0],
        "data.std": [1.0],
    },
    "data.target-mean-needs-std": {**ARRAYS, "data.target_mean": [0.5]},
    "data.target-mean-per-output": {
        **ARRAYS,
        "data.class_names": ["a", "b"],
        "data.target_mean": [0.5],
        "data.target_std": [1.0],
    },
    "data.given-needs-owners": {"data.partition": "given"},
    "data.columns-not-used": {**ARRAYS, "data.columns": ["a"]},
    "data.decimal-not-used": {**ARRAYS, "data.decimal": ","},
    **{f"data.{key}_column-not-used": {**ARRAYS, f"data.{key}_column": "a"} for key in _COLUMNS},
    "data.layout-not-used": {"data.layout": "channels-last"},
    "data.bit_depth-not-used": {"data.bit_depth": 12},
    **{f"data.{key}-not-used": {f"data.{key}": 1} for key in SOUND_KEYS},
    "data.sound-has-its-shape": {"data.name": "sound", "data.input_shape": [1, 1, 8000]},
    "data.labels-not-used": {"data.labels": "names"},
    "data.values-not-used": {"data.values": "pixels"},
    "round.trim-needs-trimmed-mean": {"round.trim": 0.1},
    "round.buffered-needs-size": {"round.mode": "buffered"},
    "round.buffered-without-cohort-size": {**BUFFERED, "round.cohort_size": 3},
    "round.buffered-without-quorum": {**BUFFERED, "round.quorum": 0.5},
    "round.buffered-without-min-updates": {**BUFFERED, "round.min_updates": 3},
    "round.buffered-needs-mean": {**BUFFERED, "round.aggregation": "median"},
    "round.buffer-needs-buffered": {"round.buffer_size": 3},
    "round.patience-below-rounds": {"round.patience": 20},
    "schedule.days-differ": {"schedule.days": ["sat", "sat"]},
    "season.number-needs-first": {"season.every": "90d", "season.number": 2},
    "evaluation.held-out-zero": {"evaluation.held_out": 0.0},
    "statistic.low-below-high": {"statistic.kind": "counts", "statistic.low": 1.0},
    "statistic.range-finite": {"statistic.kind": "counts", "statistic.low": -1e308, "statistic.high": 1e308},
    "statistic.needs-column": {"statistic.kind": "mean"},
    "task.season-needs-no-until": {"season.every": "90d", "schedule.until": "2027-06-30"},
    "task.season-number-in-name": {"season.every": "90d", "season.number": 2, "season.first": 1e9},
    "task.season-epsilon-twice": {"season.every": "90d", "season.epsilon": 2.0, "privacy.epsilon": 1.0},
    "task.buffered-not-secure": {**BUFFERED, "privacy.accounting": "secure"},
    "task.buffered-not-as-published": {**BUFFERED, "privacy.accounting": "as-published"},
    "task.buffered-method": {**BUFFERED, "method.name": "dp-fedsim"},
    "task.masked-needs-secure": {"wire.codec": "masked"},
    "task.secure-codec": {**SECURE, "wire.codec": "float16"},
    "task.secure-needs-mean": {**SECURE, "round.aggregation": "median"},
    "task.secure-reading": {**SECURE, "privacy.reading": "client-sampling"},
    "task.secure-needs-clip-norm": {
        "privacy.accounting": "secure",
        "privacy.clip_norm": math.inf,
        "method.name": "dp-fedavg",
    },
    "task.min-updates-above-cohort": {"data.devices": 8, "round.min_updates": 9},
    "task.secure-method": {**SECURE, "method.name": "fedglp-adp"},
    "task.cohort-too-large-for-plan": {"data.devices": 100_000, "round.cohort_size": 100_000},
    "task.buffer-above-devices": {**BUFFERED, "data.devices": 3},
    "task.cohort-above-devices": {"data.devices": 8, "round.cohort_size": 9},
    "task.committee-corrupt": {
        **SECURE,
        "data.devices": 300,
        "privacy.honest_fraction": 0.2,
        "round.min_updates": 300,
    },
    "task.min-devices-above-devices": {"data.devices": 8, "round.min_devices": 9},
    "task.min-devices-below-min-updates": {"data.devices": 8, "round.min_devices": 3, "round.min_updates": 4},
    "task.no-noise-for-epsilon": {"method.name": "fedavg", "privacy.epsilon": 2.0},
    "task.no-noise-for-noise-multiplier": {"method.name": "fedavg", "privacy.noise_multiplier": 1.0},
    "task.target-mean-needs-numbers": {**ARRAYS, "data.target_mean": [0.5], "data.target_std": [1.0]},
    "task.loss-data-with-classes": NUMBERS,
    "task.loss-partition-by-classes": {**NUMBERS, **ARRAYS, "data.partition": "dirichlet-class", "data.alpha": 1.0},
    "task.loss-unlabelled": {**NUMBERS, **ARRAYS, "data.unlabelled": 3},
    "task.normal-is-no-fault": {**INPUTS, "data.name": "sound", "data.class_names": ["normal", "fault"]},
    "task.loss-augmented-input": {**INPUTS, **ARRAYS, "data.augment": "flip-crop"},
    "task.loss-method-of-classes": {**NUMBERS, **ARRAYS, "method.name": "pfedsd"},
    "task.public-needs-features": {"model.name": "linear", "model.public": "/photos"},
    "task.augment-needs-images": {"model.share": "head", "data.augment": "flip-crop"},
    "task.window-needs-noise-of-empty": {"data.window": "30d", "method.name": "dp-fedavg"},
    "task.preferences-need-method": {"privacy.preference_std": 1.0},
    "task.codec-needs-noise": {"wire.codec": "one-bit", "privacy.noise_multiplier": 0.0},
    "task.aggregation-of-method": {"round.aggregation": "median", "method.name": "apdp-fl"},
    "task.aggregation-of-equals": {"round.aggregation": "median", "method.name": "dp-fedsim"},
    "task.patience-of-method": {"round.patience": 3, "method.name": "hush", "model.name": "linear"},
    "task.delta-too-large": {"privacy.epsilon": 2.0, "privacy.delta": 0.2},
    "task.two-questions": {**MEAN, "evaluation.share": 0.1},
    "task.question-needs-device": {**MEAN, "privacy.accounting": "as-published"},
    "task.question-not-buffered": {**BUFFERED, "evaluation.share": 0.1},
    "task.statistic-has-one-round": {**MEAN, "round.rounds": 2},
    "task.statistic-trains-none": {**MEAN, "model.name": "digits-cnn"},
    "task.evaluation-needs-heads": {"evaluation.share": 0.1},
    "task.evaluation-needs-all-rounds": {"model.share": "head", "evaluation.share": 0.1, "round.patience": 3},
    "task.evaluation-rounds": {"model.share": "head", "evaluation.every": 1, "round.rounds": 600_000},
}


def refused(keys: dict[str, Any]) -> BadInput:
    """Reads a small task file with these keys changed, and returns the error."""
    plain: dict[str, Any] = {"name": "try"}
    defaults = {"model.name": "digits-cnn", "method.name": "fedglp-adp", "data.name": "digits"}
    for key, value in {**defaults, **keys}.items():
        section, _, name = key.partition(".")
        plain.setdefault(section, {})[name] = value
    with pytest.raises(BadInput) as caught:
        parse_task(plain, where="try.toml")
    return caught.value


def test_every_rule_has_an_example_here() -> None:
    assert {code for table in TABLES for code in table} | OF_METHODS == set(BREAKS)


@pytest.mark.parametrize("code", BREAKS)
def test_an_error_has_the_code_of_the_broken_rule_and_tells_what_would_be_right(code: str) -> None:
    error = refused(BREAKS[code])
    assert error.code == code
    assert ACCEPTS.search(str(error)), error


def test_the_words_of_all_rules_are_as_people_have_read_them() -> None:
    """After a change on purpose, write what this test shows into the file."""
    said = [f"{code}: {str(refused(keys)).removeprefix('try.toml: ')}\n" for code, keys in BREAKS.items()]
    assert "".join(said) == WORDS.read_text()


def test_an_error_of_a_file_has_the_codes_of_all_rules_in_it() -> None:
    error = refused({**BREAKS["model.weights-need-fixed-layers"], **BREAKS["round.trim-needs-trimmed-mean"]})
    assert error.code == "model.weights-need-fixed-layers round.trim-needs-trimmed-mean"


def test_a_condition_may_have_more_values_for_the_sentence() -> None:
    with pytest.raises(BrokenRule, match=r"^3 of 2: too many$") as caught:
        check_rules(SimpleSettings(), {"a.rule": (lambda each: {"most": 2}, "{size} of {most}: too many")})
    assert caught.value.code == "a.rule"
    check_rules(SimpleSettings(), {"a.rule": (lambda each: {}, "never shown")})


class SimpleSettings:
    size = 3
