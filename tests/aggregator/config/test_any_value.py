"""Any key of a task file with any value: a valid task, or an error in words that names the key, its value and what is
accepted."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from hushfleet.aggregator.config.notes import notes_of
from hushfleet.aggregator.config.sections import DataSection
from hushfleet.aggregator.config.task import Task, load_task, parse_task
from hushfleet.aggregator.payloads.prepare import prepare
from hushfleet.data.form import MOST_STEPS, OWN_DATA
from hushfleet.errors import BadInput, HushfleetError
from hushfleet.field_types import hints
from hushfleet.methods import METHODS, find_method
from hushfleet.toml_text import to_toml, toml_value
from hushfleet.wire.format.spec import ClassNames, ModelSpec, Shape, TaskSpec
from support.written_keys import Key, changed, changes, check_text, keys_of

ENTRY = {"devices": 1, "at_s": 1.0, "for_s": 1.0}
TABLES: dict[str, dict[str, Any]] = {
    "statistic": {"kind": "counts"},
    "season": {"every": "90d"},
    "scenario": {
        "late": [{"devices": 1, "at_s": 1.0}],
        "drop_out": [ENTRY],
        "crash": [{"process": "broker", "at_s": 1.0, "for_s": 1.0}],
        "outage": [{**ENTRY}],
        "day": [{"devices": 1, "period_s": 100.0, "share": 0.5}],
        "slow_disk": [{"devices": 1, "write_mb_s": 1.0}],
        "out_of_memory": [{"devices": 1, "memory_mib": 100}],
    },
}


def base(**sections: Any) -> dict[str, Any]:
    """Returns a task on `data.npz`, with the sections changed; None leaves a key out."""
    whole: dict[str, Any] = {
        "name": "any",
        "model": {"name": "linear"},
        "method": {"name": "dp-fedavg"},
        "privacy": {"noise_multiplier": 1.0},
        "data": {"name": "arrays", "path": "data.npz", "devices": 3},
        "round": {"rounds": 1},
    }
    for name, section in sections.items():
        whole[name] = {key: value for key, value in {**whole.get(name, {}), **section}.items() if value is not None}
    return whole


BASES = {
    "plain": base(),
    "epsilon": base(privacy={"noise_multiplier": None, "epsilon": 4.0}),
    "published": base(
        privacy={"accounting": "as-published", "noise_multiplier": None, "epsilon": 2, "reading": "client-sampling"}
    ),
    "record": base(privacy={"unit": "record"}),
    "secure": base(
        privacy={"accounting": "secure", "honest_fraction": 1.0, "noise_multiplier": None, "epsilon": 4.0},
        data={"devices": 5},
    ),
    "buffered": base(round={"mode": "buffered", "buffer_size": 2}),
    "window": base(method={"name": "hush"}, data={"window": "30d"}),
    "statistic": base(statistic={"kind": "mean", "column": "1"}),
    "field": base(data={"path": None, "class_names": ["a", "b", "c"], "input_shape": [1, 1, 5]}),
}
OF_CLASSES = {name: base(method={"name": name}) for name in METHODS if name != "fedavg"}
READ_ONLY = {
    **OF_CLASSES,
    "fedavg": base(method={"name": "fedavg"}, privacy={"noise_multiplier": None}),
    "regression": base(
        model={"loss": "squared", "tolerance": 0.2},
        data={"class_names": ["u", "v"], "target_mean": [0.5, 0.5], "target_std": [1.0, 1.0]},
    ),
    "reconstruction": base(model={"name": "autoencoder", "loss": "reconstruction"}),
    "features": base(method={"name": "hush"}, model={"features": "filters", "directions": 8}),
    "evaluation": base(method={"name": "hush"}, model={"features": "filters"}, evaluation={}),
    "head": base(model={"name": "digits-cnn", "share": "head"}),
    "folder": base(data={"name": "folder", "class_names": ["a", "b"], "input_shape": [1, 8, 8]}),
    "given": base(data={"partition": "given"}),
}
"""Tasks whose preparation takes seconds, or needs other data."""


@cache
def keys_with(method: str) -> list[Key]:
    """Returns all keys of a task file with this method."""
    kind = find_method(method).config
    of_method = [
        Key(("method", field.name), hints(kind)[field.name], tuple(field.metadata.values())) for field in fields(kind)
    ]
    return [*(key for key in keys_of(Task) if key.path[:2] != ("method", "settings")), *of_method]


Drawn = tuple[dict[str, Any], list[tuple[Key, Any]]]


def drawn_of(bases: dict[str, dict[str, Any]]) -> st.SearchStrategy[Drawn]:
    """Draws a task, and changes of one or two of its keys."""
    return st.sampled_from(sorted(bases)).flatmap(
        lambda name: st.tuples(st.just(bases[name]), changes(keys_with(bases[name]["method"]["name"])))
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("any")
    y = np.arange(90) % 3
    x = np.random.default_rng(0).random((90, 1, 1, 5), np.float32) + y[:, None, None, None]
    np.savez(path / "data.npz", train_x=x[:60], train_y=y[:60], test_x=x[60:], test_y=y[60:])
    return path


def in_dict(whole: dict[str, Any], drawn: list[tuple[Key, Any]], folder: Path) -> Task:
    return parse_task(changed(whole, drawn, TABLES))


def in_file(whole: dict[str, Any], drawn: list[tuple[Key, Any]], folder: Path) -> Task:
    try:
        text = to_toml(changed(whole, drawn, TABLES))
    except (BadInput, TypeError, ValueError):
        assume(False)  # TOML has no such value
    (folder / "task.toml").write_text(text, "utf-8")
    return load_task(folder / "task.toml")


def overridden(whole: dict[str, Any], drawn: list[tuple[Key, Any]], folder: Path) -> Task:
    """By `--set`, which writes sections and keys with dots."""
    assume(not any(0 in key.path or isinstance(value, dict) for key, value in drawn))
    file = folder / "task.toml"
    file.write_text(
        to_toml({**whole, **{each.path[0]: TABLES[each.path[0]] for each, _ in drawn if each.path[0] in TABLES}})
    )
    try:
        overrides = tuple(f"{key.name}={toml_value(value)}" for key, value in drawn)
    except (TypeError, ValueError):
        assume(False)
    return load_task(file, overrides)


@settings(max_examples=400, derandomize=True, suppress_health_check=[HealthCheck.filter_too_much])
@given(drawn_of(BASES | READ_ONLY), st.sampled_from([in_dict, in_file, overridden]))
def test_a_task_is_what_devices_read_or_the_key_is_named(folder: Path, drawn: Drawn, way: Callable[..., Task]) -> None:
    try:
        task = way(*drawn, folder)
        if drawn[0] in BASES.values() and task.data.name in OWN_DATA:  # others would be downloaded
            spec = prepare(task).spec
            assert TaskSpec.from_bytes(spec.to_bytes()) == spec
    except HushfleetError as error:
        check_text(str(error), drawn[1], keys_with(drawn[0]["method"]["name"]), str(folder), "data.npz")
        return
    notes_of(task)
    assert parse_task(json.loads(json.dumps(task.to_plain()))) == task


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("seed=" + "1" * 5000, "seed = '111.*expected an integer"),
        ("privacy.epsilon=" + "[" * 3000, "privacy.epsilon = '.*must be|privacy.epsilon = '.*expected a number"),
        ("x" * 100_000, "--set 'xxx.*write section.key=value"),
        ("name." + "x" * 100_000 + "=1", "--set 'name.xxx.*'name' is not a section"),
    ],
)
def test_an_override_of_any_length_is_refused_in_few_words(override: str, said: str) -> None:
    with pytest.raises(BadInput, match=said) as refused:
        parse_task(base(), (override,))
    assert len(str(refused.value)) < 500


@pytest.mark.parametrize("suffix", [".toml", ".json"])
def test_brackets_without_end_are_no_valid_file(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"task{suffix}"
    path.write_text(("a = " if suffix == ".toml" else "") + "[" * 5000 + "]" * 5000)
    with pytest.raises(BadInput, match="is not valid"):
        load_task(path)


@pytest.mark.parametrize("section", [{"path": "a\udcff"}, {"class_names": ["a\ud800", "b"]}])
def test_half_a_character_is_refused_where_it_stands(section: dict[str, Any]) -> None:
    """JSON and Python can write one; a file in UTF-8 and a task package cannot."""
    with pytest.raises(BadInput, match=r"data.(path|class_names\[0\]) = 'a.*' *: must have whole characters"):
        parse_task(base(data={"input_shape": [1, 1, 5], **section}))


def test_every_key_is_tried() -> None:
    """Sections, repeated tables, and the settings of each method."""
    names = {key.name for name in METHODS for key in keys_with(name)}
    assert names >= {"seed", "data.input_shape", "model.start", "method.clip_range", "scenario.late[0].devices"}
    for section, kind in hints(Task).items():
        assert any(name == section or name.startswith(f"{section}.") for name in names), (section, kind)


def test_task_file_and_package_have_the_same_limits() -> None:
    """One definition each, so that nothing which the file takes is refused by devices."""
    of_file, of_package = hints(DataSection), hints(ModelSpec)
    assert Shape in get_args(of_file["input_shape"])
    assert of_package["input_shape"] == Shape
    assert of_file["class_names"] == ClassNames
    assert of_package["class_names"].__metadata__[0] in ClassNames.__metadata__


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ((4096,), ""),
        ((4097,), r"data.input_shape\[0\] = 4097: must be a whole number from 1 to 4096.*"),
        ((1, 4097), ""),
        (
            (1, MOST_STEPS + 1),
            rf"data.input_shape\[2\] = {MOST_STEPS + 1}: must be a whole number from 1 to {MOST_STEPS}.*",
        ),
    ],
)
def test_a_sample_of_too_many_values_or_steps_is_refused_in_words(
    tmp_path: Path, shape: tuple[int, ...], said: str
) -> None:
    x, y = np.random.default_rng(0).random((3, *shape), np.float32), np.arange(3)
    np.savez(tmp_path / "data.npz", train_x=x, train_y=y, test_x=x, test_y=y)
    whole = base(data={"path": str(tmp_path / "data.npz")}, statistic={"kind": "counts"})
    if not said:
        assert prepare(parse_task(whole)).spec.model.input_shape == (shape[0], 1, math.prod(shape[1:]))
        return
    with pytest.raises(BadInput, match=rf"data.path = .*data.npz' gives {said}; cut long series into windows"):
        prepare(parse_task(whole))
    with pytest.raises(BadInput, match=r"data.input_shape\[0\] = 4097: must be a whole number from 1 to 4096"):
        parse_task(base(data={"input_shape": [4097, 1, 1]}))
    with pytest.raises(BadInput, match=r"data.input_shape\[2\] = 1048577: must be a whole number from 1 to 1048576"):
        parse_task(base(data={"input_shape": [1, 1, (1 << 20) + 1]}))


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"data": {"path": None, "class_names": ["a", "b"], "input_shape": [4096] * 3}}, "model.name = 'linear' has "
         "137438953474 parameters .*data.input_shape.* devices take at most 268435456"),
        ({"data": {"path": None, "class_names": ["x" * 2**20, "y", "z"], "input_shape": [1, 1, 5]}},
         "data.class_names: with 3 names the task package has .* devices take at most 1048576"),
        ({"privacy": {"unit": "record", "sample_rate": 1e-9}},
         "privacy.sample_rate = 1e-09 with method.local_epochs = 1: a round would have 1e.09 batches"),
        ({"method": {"name": "hush"}, "data": {"window": "9" * 300 + "d"}}, "data.window = '999.*up to 1000 years"),
        ({"method": {"name": "hush"}, "model": {"features": "filters"}, "evaluation": {"every": 1},
          "round": {"rounds": 600_000}}, "round.rounds = 600000: 1200000 with those that evaluate, .* at most 1000000"),
        ({"data": {"devices": 9000}, "round": {"cohort_size": 4097}}, "round.cohort_size = 4097: .* at most 4096"),
        ({"data": {"devices": 9000}, "round": {"min_updates": 4097}}, "round.min_updates = 4097: a round has 4096"),
        (
            {"privacy": {"accounting": "secure"}, "round": {"min_updates": 10**9}},
            "round.min_updates = 1000000000: a round has 3 devices",
        ),
        ({"method": {"name": "perfreezeclip", "max_norm": 2**64}}, "method.max_norm = 18446744073709551616: .*64 bits"),
        ({"model": {"start": "x" * 300}}, "model.start = .*is too long for a file"),
        ({"model": {"name": "linear"}, "method": {"name": 3}}, "method.name = 3: expected a text"),
    ],
)  # fmt: skip
def test_limits_that_only_devices_had_are_told_before(folder: Path, sections: dict[str, Any], said: str) -> None:
    """Bounds that two keys exceed together, and numbers and texts that no package or file can hold."""
    with pytest.raises(BadInput, match=said):
        prepare(in_file(base(**sections), [], folder))
