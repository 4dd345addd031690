"""Fixtures of a board that hears: a task whose model tells two tones from anything else, and sounds for it."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import wave
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hushfleet.data.form import SampleForm
from hushfleet.data.sound import write_clip
from hushfleet.edge_client.board.config import DeviceConfig, load_config
from hushfleet.edge_client.storage.kept import KeptModel
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.models import get_model
from hushfleet.models.export import export_graphs
from hushfleet.wire.format.spec import BlobRef
from support.edge import DEVICE, Package, device_file
from support.processes import ENVIRONMENT

RATE, LENGTH = 800, 200
NONE = "none of these"
CLASSES = ("buzz", NONE, "tone")
HZ = {"tone": 40, "buzz": 80}  # whole periods in a segment


def a_sound(*names: str, loud: float = 0.5) -> np.ndarray:
    """Segments one after the other, int16: a tone, a buzz, or for any other name faint noise.

    :param loud: the amplitude, 0 to 1.
    """
    rng, t = np.random.default_rng(len(names)), np.arange(LENGTH) / RATE
    parts = [loud * np.sin(2 * np.pi * HZ[name] * t) if name in HZ else rng.normal(0, 0.001, LENGTH) for name in names]
    return np.round(np.concatenate(parts) * 32767).astype(np.int16)


def a_clip(file: Path, *names: str, rate: int = RATE, at: float = 1e9, loud: float = 0.5) -> Path:
    """Writes a WAV file that looks as if it had been there since `at`."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_clip(file, a_sound(*names, loud=loud), rate)
    os.utime(file, (at, at))
    return file


def frames_of(file: Path) -> np.ndarray:
    """What is in a WAV file that the product wrote."""
    with wave.open(str(file)) as opened:
        assert (opened.getnchannels(), opened.getsampwidth(), opened.getframerate()) == (1, 2, RATE)
        return np.frombuffer(opened.readframes(opened.getnframes()), "<i2")


def listening(device_toml: Path, *more: str, **streams: int) -> subprocess.Popen[bytes]:
    """The command as a process."""
    command = [sys.executable, "-m", "hushfleet.edge_client", "listen", str(device_toml), *more]
    return subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **streams)


@pytest.fixture(scope="session")
def hearing(package: Package) -> Package:
    """A task of sound with a linear model that needs no training."""
    return hearing_task(package, CLASSES)


def hearing_task(package: Package, classes: Sequence[str], *, task: str = "sounds", hop_s: float = 0.0) -> Package:
    model = get_model("linear", input_shape=(1, 1, LENGTH), classes=len(classes))
    graphs = export_graphs(model)
    spec = replace(
        package.spec.model,
        name="linear",
        layout=model.layout,
        input_shape=(1, 1, LENGTH),
        class_names=tuple(classes),
        mean=(0.0,),
        std=(1.0,),
        dropout=(),
        gradient=BlobRef.of(graphs.gradient),
        inference=BlobRef.of(graphs.inference),
        form=SampleForm(sample_rate=RATE, segment_s=LENGTH / RATE, hop_s=hop_s),
    )
    weights, t = np.zeros((len(classes), LENGTH), np.float32), np.arange(LENGTH) / RATE
    for place, name in enumerate(classes):
        if name in HZ:
            weights[place] = np.sin(2 * np.pi * HZ[name] * t) / 10
    prior = np.array([2.0 if name == NONE else 0.0 for name in classes], np.float32)
    blobs = {hashlib.sha256(graph).digest(): graph for graph in (graphs.gradient, graphs.inference)}
    made = replace(package, blobs=blobs, initial=np.concatenate((weights.ravel(), prior)))
    return made.with_spec(model=spec, task=task)


def give_model(config: DeviceConfig, package: Package) -> None:
    """Makes the board predict with the task's initial model, as after a round."""
    model = package.initial.astype("<f4").tobytes()
    digest, task = hashlib.sha256(model).digest(), hashlib.sha256(package.data).digest()
    with DeviceStore(config.store_path, device=DEVICE, durable=False) as store:
        for key, blob in {**package.blobs, task: package.data, digest: model}.items():
            store.put_blob(key, blob)
        store.set_current(task_digest=task, global_digest=digest)
        store.keep_model(KeptModel(package.spec.task, digest, shared=model, package=task, round=1))


@pytest.fixture
def device_toml(tmp_path: Path) -> Iterator[Path]:
    """Of a board with an inbox and two class folders, whose client has not run yet; tests add to the file.

    The signals that a command takes in this process are given back.
    """
    taken = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    for name in ("inbox", "sounds/tone", "sounds/buzz"):
        (tmp_path / name).mkdir(parents=True)
    yield device_file(tmp_path / "device.toml", kind="sound", path="sounds", more="[listen]")
    for number, handler in taken.items():
        signal.signal(number, handler)


@pytest.fixture
def hears(device_toml: Path, hearing: Package) -> DeviceConfig:
    """The board has taken part in a round."""
    config = load_config(device_toml)
    give_model(config, hearing)
    return config
