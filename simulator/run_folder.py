"""Defines a simulation's run folder: the inputs and results of all engines.

task.json, boards.json   the task and boards of the run, for --resume
digests.json             digests of data and method's file: a resumed run needs the same ones
clock.json               the costs of the task's work, if the run has a virtual clock
scenario.jsonl           the actions of the scenario
package.bin, graphs/     the files that a device receives
roster.bin               for secure aggregation in the fast engine: the devices and their keys
data_dir.txt             the folder of public data sets, if one was named
runtime.txt              the runtime that computes gradients, if the simulator chose it
aggregator/              the aggregator's store, and events.jsonl: the events of the run, written as they happen
devices/                 in the fast engine: cohort.bin and states/, what all devices keep, and metrics.jsonl
devices/NAME/            with own data or the live engine: train.npz, local_test.npz; of the live engine store.sqlite,
                         metrics.jsonl, log.txt
common_test.npz          likewise: the test set that all devices share
features/                features of images, by digest of their inputs, if the task trains on features
data.npz                 own data of a Python program; .data.sha256: their digest
models/                  the global model and each device's own, as ONNX
result.json, report.html
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np

from hushfleet.aggregator.config.task import Task, load_task
from hushfleet.aggregator.payloads.public_data import load_public
from hushfleet.atomic_file import write_whole
from hushfleet.data.form import OWN_DATA, PUBLIC_DATA
from hushfleet.errors import BadInput
from hushfleet.paths import features_folder
from hushfleet.progress import counted
from hushfleet.simulator.boards import FleetMix
from hushfleet.simulator.cohort_store import CohortStore, index_of
from hushfleet.simulator.fleet import Fleet, SimulatedDevice, make_fleet, save_device, save_samples
from hushfleet.simulator.schedule import schedule_of
from hushfleet.toml_text import dotted
from hushfleet.user_files import checked_folder, refuse_others

if TYPE_CHECKING:
    from hushfleet.aggregator.payloads.prepare import PreparedTask
    from hushfleet.data.arrays import Data


_RESIDENT: WeakValueDictionary[Path, Fleet] = WeakValueDictionary()
"""The fleets of this process's simulations, by run folder: their data sets are in memory already."""
MOST_SHOWN = 50
"""Number of devices, the first that took part, whose personalized models are written and shown: nobody looks at
10,000."""
MOST_TESTED = 500
"""Number of devices, drawn at random from a larger fleet, whose personalized heads and models trained alone are
tested: the standard error of a mean over so many is small."""
_TESTED_STREAM = 0x54455354


class DeviceFolder:
    """The files of one simulated device."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.train = path / "train.npz"
        self.local_test = path / "local_test.npz"
        self.unlabelled = path / "unlabelled.npz"
        self.store = path / "store.sqlite"
        self.metrics = path / "metrics.jsonl"
        self.log = path / "log.txt"


class RunFolder:
    """Paths of a run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.task = path / "task.json"
        self.boards = path / "boards.json"
        self.digests = path / "digests.json"
        self.runtime = path / "runtime.txt"
        self.data_dir = path / "data_dir.txt"
        self.package = path / "package.bin"
        self.graphs = path / "graphs"
        self.membership_list = path / "roster.bin"
        self.devices = path / "devices"
        self.cohort = self.devices / "cohort.bin"
        self.states = self.devices / "states"
        self.metrics = self.devices / "metrics.jsonl"
        self.scenario = path / "scenario.jsonl"
        self.clock = path / "clock.json"
        self.aggregator = path / "aggregator"
        self.events = self.aggregator / "events.jsonl"
        self.common_test = path / "common_test.npz"
        self.features = features_folder(path)
        self.data = path / "data.npz"
        self.data_digest = path / ".data.sha256"
        self.models = path / "models"
        self.result = path / "result.json"
        self.report = path / "report.html"

    def device(self, name: str) -> DeviceFolder:
        return DeviceFolder(self.devices / name)

    def has_store(self, device: str) -> bool:
        """Returns whether a device has a store: with the fast engine, whether it has taken part."""
        return bool(self.with_store([device]))

    def with_store(self, devices: Iterable[str]) -> list[str]:
        """Returns those of the devices that have a store; the fast engine's file is read once."""
        cohort = CohortStore.read(self.cohort) if self.cohort.exists() else None
        return [
            name
            for name in devices
            if (cohort is not None and cohort.has(index_of(name))) or self.device(name).store.exists()
        ]

    def of_seed(self, seed: int) -> RunFolder:
        """Returns the folder of the same run with another seed."""
        return RunFolder(self.path / "seeds" / str(seed))


@dataclass(frozen=True, eq=False)
class Simulation:
    """A run that is ready to start or to continue.

    :param mix: the board of each device.
    """

    folder: RunFolder
    prepared: PreparedTask
    fleet: Fleet
    data_dir: Path | None
    mix: FleetMix

    @property
    def task(self) -> Task:
        return self.prepared.task

    @property
    def seed(self) -> int:
        return self.prepared.task.seed

    def __post_init__(self) -> None:
        _RESIDENT[self.folder.path.absolute()] = self.fleet

    def write_samples(self) -> None:
        """Writes the samples of each device into its folder, as a board reads them, and the common test."""
        devices = self.fleet.devices
        for device in counted(devices, "writing the devices' data", total=len(devices)):
            files = self.folder.device(device.name)
            files.path.mkdir(parents=True, exist_ok=True)
            paths = {"train": files.train, "local_test": files.local_test, "unlabelled": files.unlabelled}
            save_device(device, self.fleet, **paths)
        save_samples(self.fleet.common_test, self.folder.common_test)

    @property
    def tested(self) -> tuple[SimulatedDevice, ...]:
        """The devices that are tested after the last round, in the fleet's order; the same for the same seed."""
        devices = self.fleet.devices
        rng = np.random.default_rng(np.random.SeedSequence(self.seed, spawn_key=(_TESTED_STREAM,)))
        drawn = rng.permutation(len(devices))[:MOST_TESTED] if len(devices) > MOST_TESTED else range(len(devices))
        return tuple(devices[place] for place in sorted(drawn))

    @property
    def took_part(self) -> list[str]:
        """The devices that have a store, in the fleet's order."""
        return self.folder.with_store(device.name for device in self.fleet.devices)


def public_fleet(folder: RunFolder) -> Fleet:
    """Returns the devices of a run on public data, with their samples; in the main process the same object again."""
    if (resident := _RESIDENT.get(folder.path.absolute())) is not None:
        return resident
    task, named = load_task(folder.task), folder.data_dir.read_text()
    return make_fleet(task, load_public(task, Path(named) if named else None))


def run_path(out: Path | None, name: str) -> Path:
    """Returns `out`, or a run folder that no other process uses. Raises `BadInput` if it cannot be a folder."""
    if out is not None:
        return checked_folder(out)
    stem = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    names = (stem if number == 1 else f"{stem}-{number}" for number in count(1))
    return checked_folder(next(folder for each in names if not (folder := Path("runs") / each).exists()))


def open_simulation(
    task: Task, folder: Path, *, data_dir: Path | None, mix: FleetMix | None, resume: bool
) -> Simulation:
    """Opens a new run, or with `resume` the run in `folder`. Raises `BadInput`, also if its task or fleet differs."""
    if not resume:
        return begin(task, folder, data_dir=data_dir, mix=mix)
    simulation = go_on(folder, data_dir=data_dir)
    if simulation.mix != (mix or FleetMix.in_turn((), task.data.devices)):
        raise BadInput(
            f"the run in {folder} was begun with other boards; give --resume the same --boards, or another --out"
        )
    here, there = dotted(task.to_plain()), dotted(simulation.task.to_plain())
    changed = [
        f"{key} = {there.get(key)}, not {here.get(key)}" for key in here | there if here.get(key) != there.get(key)
    ]
    if changed:
        raise BadInput(
            f"the run in {folder} was begun with {'; '.join(changed)}. Give --resume the task and the --set options "
            "that it was begun with, or choose another --out"
        )
    return simulation


def repeated(simulation: Simulation, task: Task, folder: RunFolder) -> Simulation:
    """Opens the same run with another task, in a folder of its own: started, or continued.

    Under the virtual clock its boards are as fast as in the first run. It shares the files of features.
    """
    with suppress(OSError):  # where there are no links, or they are there already
        shutil.copytree(simulation.folder.features, folder.features, copy_function=os.link)
    how: dict[str, Any] = {"data_dir": simulation.data_dir, "mix": simulation.mix}
    again = open_simulation(task, folder.path, **how, resume=folder.task.exists())
    first = simulation.folder.clock
    if first.exists() and not folder.clock.exists():
        write_whole(folder.clock, first.read_bytes(), durable=False)
    return again


def begin(task: Task, out: Path, *, data_dir: Path | None, mix: FleetMix | None = None) -> Simulation:
    """Makes the run folder of a new simulation. Raises `BadInput` if it already contains a run or other files.

    :param mix: generic boards by default.
    """
    folder = RunFolder(out)
    check_new(folder)
    mix = mix or FleetMix.in_turn((), task.data.devices)
    simulation = _simulation(task, folder, data_dir, mix)
    schedule_of(task, [device.name for device in simulation.fleet.devices])  # raises for a scenario of other devices
    prepared = simulation.prepared
    folder.graphs.mkdir(parents=True, exist_ok=True)
    folder.package.write_bytes(prepared.blobs[prepared.spec_ref.digest])
    for digest, data in prepared.blobs.items():
        if digest != prepared.spec_ref.digest:
            (folder.graphs / f"{digest.hex()}.onnx").write_bytes(data)
    folder.devices.mkdir(exist_ok=True)
    note_data_dir(folder, data_dir)
    if task.data.name not in PUBLIC_DATA:  # each worker divides a public data set itself
        simulation.write_samples()
    if prepared.features is not None:
        prepared.features.of(simulation.fleet.common_test)  # computes them once, before many processes need them
    folder.boards.write_text(json.dumps(mix.to_plain()))
    folder.digests.write_text(json.dumps(_digests(prepared)))
    # Written last, so that a folder with a task is complete.
    write_whole(folder.task, json.dumps(task.to_plain(), indent=1).encode(), durable=False)
    return simulation


def note_data_dir(folder: RunFolder, data_dir: Path | None) -> None:
    """Tells the workers of a run where public data sets are."""
    folder.data_dir.write_text("" if data_dir is None else str(data_dir.absolute()))


def check_new(folder: RunFolder) -> None:
    """Raises `BadInput` if the folder already contains a run, or files that are not from the start of a run."""
    if folder.task.exists():
        raise BadInput(f"{folder.path} holds a run already; go on with it by --resume, or choose another --out")
    left = {folder.features.name}  # files of a start that was interrupted before it wrote a task
    if folder.data.exists() and folder.data_digest.exists() and _sha256(folder.data) == folder.data_digest.read_text():
        left.add(folder.data.name)
    if folder.package.exists():
        begun = (folder.package, folder.graphs, folder.common_test, folder.boards, folder.digests, folder.data_dir)
        left |= {each.name for each in begun}
        left |= {folder.devices.name, f"{folder.task.name}.part"}
    refuse_others(folder.path, left)


def save_data(data: Data, folder: RunFolder) -> None:
    """Writes a program's own data to the place from which its new run reads them. Raises `BadInput` as `check_new`.

    The digest distinguishes them from a user's file. It is written first, so it exists whenever the process dies.
    """
    check_new(folder)
    folder.path.mkdir(parents=True, exist_ok=True)
    part = folder.data.with_name(".data.part.npz")
    data.save(part)
    folder.data.unlink(missing_ok=True)  # from an interrupted start
    folder.data_digest.write_text(_sha256(part))
    part.replace(folder.data)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def go_on(out: Path, *, data_dir: Path | None) -> Simulation:
    """Opens the run folder of an interrupted simulation. Raises `BadInput`, also if its data have changed."""
    folder = RunFolder(out)
    if not folder.task.exists():
        raise BadInput(
            f"there is no run to resume in {out}: it has no {folder.task.name}; name the run's folder by --out, or "
            "leave --resume out to begin one"
        )
    task = load_task(folder.task)
    simulation = _simulation(task, folder, data_dir, FleetMix.from_plain(json.loads(folder.boards.read_text())))
    note_data_dir(folder, data_dir)
    kept = json.loads(folder.digests.read_text()) if folder.digests.exists() else {}  # earlier versions kept none
    now = _digests(simulation.prepared)
    if changed := [name for name, digest in kept.items() if now.get(name) != digest]:
        parts = " and ".join(changed).replace("images", "samples")
        raise BadInput(
            f"since the run in {out} was begun, its {parts} have changed; put back what they were, or "
            "choose another --out"
        )
    return simulation


def _digests(prepared: PreparedTask) -> dict[str, str]:
    from hushfleet.aggregator.results.rerun import input_digests  # imports PyTorch, as below

    return input_digests(prepared)


def _simulation(task: Task, folder: RunFolder, data_dir: Path | None, mix: FleetMix) -> Simulation:
    from hushfleet.aggregator.payloads.prepare import prepare  # workers need only the folder, and start without PyTorch

    missing = BadInput(
        f"a simulation needs training data: data.name = {task.data.name!r} needs data.path with a training part "
        "(docs/own.md)"
    )
    if task.data.name in OWN_DATA and task.data.path is None:  # before the feature graph is made
        raise missing
    # The task's id is made from the seed: dither and signatures depend on it, and must be the same in all engines.
    prepared = prepare(task, data_dir=data_dir, run_id=f"seed{task.seed}", features_cache=folder.features)
    if prepared.dataset is None or not len(prepared.dataset.train):
        raise missing
    fleet = make_fleet(task, prepared.dataset, boards=mix.profiles)
    return Simulation(folder, prepared, fleet, data_dir, mix)
