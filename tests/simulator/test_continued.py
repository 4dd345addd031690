"""A task that goes on from an earlier run's model: its first model, its devices' own parts, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hushfleet as hf
from hushfleet.aggregator.payloads.prepare import prepare
from hushfleet.aggregator.payloads.start import EarlierModel
from hushfleet.aggregator.storage.checkpoints import Checkpoints
from hushfleet.data.form import SampleForm
from hushfleet.data.targets import Targets
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.edge_client.worker.trainer import DeviceRound
from hushfleet.errors import BadInput
from hushfleet.methods import method_of
from hushfleet.methods.hush import TailMean
from hushfleet.methods.state import DeviceState, PublicState
from hushfleet.simulator.run_folder import Simulation, go_on
from hushfleet.wire.format.spec import EarlierTask, PrivacySpec, TaskSpec


def final_of(run: Simulation) -> np.ndarray:
    spec = run.prepared.spec
    return Checkpoints(run.folder.aggregator, spec.model.layout, durable=False).read(spec.rounds)


def test_the_next_task_begins_with_the_last_model_and_names_it_to_devices(calm: Simulation) -> None:
    before = calm.prepared
    for start in (calm.folder.path, calm.folder.aggregator / f"global-{before.spec.rounds}.safetensors"):
        task = replace(before.task, name="next", model=replace(before.task.model, start=str(start)))
        following = prepare(task)
        np.testing.assert_array_equal(following.initial, final_of(calm))
        assert following.spec.continues is not None
        assert following.spec.continues.task == before.spec.task
        assert following.spec.continues.class_names == before.spec.model.class_names


def test_a_new_class_gets_outputs_and_the_others_keep_theirs(calm: Simulation) -> None:
    model, final = calm.prepared.spec.model, final_of(calm)
    names = ("new", *model.class_names[::-1])
    grown = calm.prepared.model.layout
    shapes = tuple(
        (len(names), *shape[1:]) if name.startswith(grown.layers[-1].name) else shape
        for name, shape in zip(grown.names, grown.shapes, strict=True)
    )
    wider = replace(model, layout=type(grown)(grown.names, shapes), class_names=names)
    tensors = wider.layout.unflatten(EarlierModel.read(calm.folder.path).vector(wider))
    old = model.layout.unflatten(final)
    for name, tensor in tensors.items():
        same = not name.startswith(grown.layers[-1].name)
        np.testing.assert_array_equal(tensor if same else tensor[1:], old[name] if same else old[name][::-1])


def begins_with(spec: TaskSpec, earlier: str, own: np.ndarray) -> DeviceRound:
    """The round of a newcomer whose store has `own` of the task `earlier` alone."""

    class Kept:
        def load_state(self, task: str) -> DeviceState | None:
            return DeviceState(PublicState.initial(own.size), own) if task == earlier else None

    round = DeviceRound.__new__(DeviceRound)
    round.spec, round.method, round.asks = spec, method_of(spec), False
    round.trainer = type("Trainer", (), {"method": round.method})()
    round.plan = type("Plan", (), {"task": spec.task})()
    round.store = Kept()
    return round


def test_a_device_keeps_its_own_parts_and_a_newcomer_has_none(calm: Simulation, tmp_path: Path) -> None:
    before = calm.prepared
    task = replace(before.task, name="next", model=replace(before.task.model, start=str(calm.folder.path)))
    spec, own = prepare(task).spec, np.arange(before.spec.model.layout.size, dtype=np.float32)
    round = begins_with(spec, before.spec.task, own)
    assert np.array_equal(round.state().own, own)
    with DeviceStore(tmp_path / "newcomer", device="new") as round.store:
        assert round.state().own is None


def test_the_outputs_of_an_autoencoder_are_no_classes(calm: Simulation) -> None:
    spec = calm.prepared.spec
    model = replace(spec.model, class_names=("fault",), targets=Targets("reconstruction", false_alarms=0.1))
    spec = replace(
        spec, model=model, method="fedavg", method_config={}, continues=EarlierTask("earlier-1", ("broken",))
    )
    own = np.arange(model.layout.size, dtype=np.float32)
    assert np.array_equal(begins_with(spec, "earlier-1", own).state().own, own)


@pytest.mark.parametrize(("method", "keeps"), [("fedper", False), ("ditto", True)])
def test_with_the_unit_record_no_gradient_is_computed_of_own_parts_of_an_earlier_task(
    calm: Simulation, method: str, keeps: bool
) -> None:
    """It may have trained them without noise, and one record of then would change the gradients of all records.

    The personalized model of `ditto` is trained apart: no gradient that is sent is computed of it.
    """
    spec, privacy = calm.prepared.spec, PrivacySpec("record", "strict", 1.0, 1.0, 1e-5, sample_rate=0.5, batches=2)
    continued = EarlierTask("earlier-1", spec.model.class_names)
    spec = replace(spec, method=method, method_config={}, privacy=privacy, continues=continued)
    own = np.arange(spec.model.layout.size, dtype=np.float32)
    assert (begins_with(spec, "earlier-1", own).state().own is not None) == keeps


def test_a_model_goes_on_with_values_as_it_knows_them(calm: Simulation, caplog: pytest.LogCaptureFixture) -> None:
    """Otherwise it would be given other numbers for the same images without a word."""
    model = calm.prepared.spec.model
    earlier = EarlierModel.read(calm.folder.aggregator)
    earlier.vector(model)
    other = replace(model, std=tuple(2 * value for value in model.std))
    with pytest.raises(BadInput, match=r"was trained with data\.mean = \[.* give this task the same"):
        earlier.vector(other)
    assert not caplog.records
    replace(earlier, normalisation=None).vector(other)
    assert "does not say which numbers its network was given. Up to version 0.3.0 data.mean and" in caplog.text


def test_a_model_goes_on_with_the_columns_that_it_knows_in_their_order(calm: Simulation) -> None:
    model = calm.prepared.spec.model
    earlier = replace(EarlierModel.read(calm.folder.aggregator), columns=("ax", "ay"))
    for columns in ((), ("ax", "ay")):
        earlier.vector(replace(model, form=SampleForm(columns)))
    with pytest.raises(BadInput, match=r"takes the columns ax, ay, and this task ay, ax; give it the same"):
        earlier.vector(replace(model, form=SampleForm(("ay", "ax"))))


@pytest.mark.parametrize("damage", ["truncated", "another network", "nan", "no closed round"])
def test_what_is_no_such_model_is_refused_by_name(calm: Simulation, tmp_path: Path, damage: str) -> None:
    before, spec = calm.prepared, calm.prepared.spec
    path = tmp_path / "global-3.safetensors"
    path.write_bytes((calm.folder.aggregator / f"global-{spec.rounds}.safetensors").read_bytes())
    words, model = "cannot be read", spec.model
    if damage == "truncated":
        path.write_bytes(path.read_bytes()[:-5])
    elif damage == "nan":
        Checkpoints(tmp_path, model.layout).write(3, np.full(model.layout.size, np.nan, np.float32))
        words = "not finite"
    elif damage == "another network":
        layout, words = type(model.layout)(("other.weight",), ((3,),)), "is not a"
        Checkpoints(tmp_path, layout).write(3, np.zeros(3, np.float32))
    else:
        path.rename(tmp_path / "global-0.safetensors")
        path, words = tmp_path, "no round of that run is closed"
    task = replace(before.task, model=replace(before.task.model, start=str(path)))
    with pytest.raises(BadInput, match=words):
        prepare(task)


def hush_run(folder: Path, name: str, **changes: Any) -> Simulation:
    """Runs a task of `hush` on digits as vectors, with noise; the task named `stopped` in two parts."""
    privacy = {"accounting": "secure", "noise_multiplier": 5.0, "clip_norm": 1.0, "honest_fraction": 1.0}
    task = {"name": "t", "model": {"name": "linear"}, "method": {"name": "hush"}, "privacy": privacy}
    task |= {"data": {"name": "digits", "devices": 5, "limit": 100}, "round": {"rounds": 4, "min_updates": 5}}
    how: dict[str, Any] = {"out": folder / name, "quiet": True, "report": False, "workers": 1}

    def stop(closed: Any) -> None:
        if closed.number == 3:
            raise KeyboardInterrupt

    if name == "stopped":
        with pytest.raises(KeyboardInterrupt):
            hf.simulate(task, changes, on_round=stop, **how)
        how["resume"] = True
    hf.simulate(task, changes, **how)
    return go_on(folder / name, data_dir=None)


def test_the_next_period_of_hush_takes_a_smaller_step_with_its_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H_old + (H_new - H_old) / sqrt(p), also where the run is resumed."""
    first = hush_run(tmp_path, "first")
    then = {"model.start": str(first.folder.path), "seed": 1}
    second, stopped = (hush_run(tmp_path, name, **then) for name in ("second", "stopped"))
    third = hush_run(tmp_path, "third", **{"model.start": str(second.folder.path)})
    monkeypatch.setattr(TailMean, "averages_periods", False)
    whole = hush_run(tmp_path, "whole", **then)
    old, new, found = map(final_of, (first, whole, second))
    step = 0.5 * 5.0 / 5  # of the rounding to half the noise of a mean, of both
    np.testing.assert_allclose(found, old + (new - old) / np.sqrt(2), atol=step)
    assert (found - old) @ (new - old) / np.square(new - old).sum() == pytest.approx(1 / np.sqrt(2), abs=0.03)
    np.testing.assert_array_equal(final_of(stopped), found)
    assert [each.prepared.period for each in (first, second, stopped, third)] == [1, 2, 2, 3]
    earlier = EarlierModel.read(third.folder.path)
    assert [earlier.next_period(names) for names in (earlier.class_names, ("new", *earlier.class_names))] == [4, 1]


def test_without_noise_a_period_takes_its_whole_step() -> None:
    assert TailMean(4, noise_multiplier=1.0).averages_periods
    assert not TailMean(4).averages_periods
