"""Normal sound of machines, clip by clip: one sum of second moments in each engine, and on boards with files."""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.fft

import hushfleet as hf
from hushfleet.aggregator.config.task import parse_task
from hushfleet.aggregator.payloads.prepare import PreparedTask, prepare
from hushfleet.aggregator.storage.checkpoints import Checkpoints
from hushfleet.data.folder import load_folder_set
from hushfleet.data.sound import Segments, SoundForm, read_clip, write_clip
from hushfleet.edge_client.__main__ import main
from hushfleet.edge_client.board.config import OwnDataSection, load_config
from hushfleet.edge_client.listen.model_in_use import ModelInUse
from hushfleet.errors import BadInput
from hushfleet.learning.anomaly import Threshold
from hushfleet.methods.second_moments import GAIN
from hushfleet.simulator.run_folder import begin, go_on
from hushfleet.simulator.world.hub import LocalHub
from hushfleet.simulator.world.live import LiveFleet
from support.edge import device_file
from support.moments import errors_by, errors_left_out
from support.whole import Whole

MACHINES = Path(__file__).parents[2] / "examples" / "machines"
RATE, FRAMES, BOARDS, CLIPS = 4000, 1000, 4, 15
RECORD = {"unit": "record", "accounting": "strict", "noise_multiplier": 1.0, "clip_norm": 1.0, "delta": 0.01}
CLOSE = {"noise_multiplier": 1e-6}


def machine(path: Path, number: int, *, count: int, faults: int = 0, seed: int = 0) -> Path:
    """Writes clips of one machine, each with two segments; its loudness is that of the load, and a fault whistles."""
    rng, t = np.random.default_rng([number, seed]), np.arange(2 * FRAMES) / RATE
    for clip in range(count + faults):
        load = rng.uniform(0.5, 1.5)
        tone = load * np.sin(2 * np.pi * (200 + 40 * number) * t) + load * 0.2 * rng.standard_normal(len(t))
        tone += 0.3 * np.sin(2 * np.pi * 1500 * t) * (clip >= count)
        place = path / ("fault" if clip >= count else "normal")
        write_clip(place / f"{clip}.wav", (tone * 5000).astype(np.int16), RATE)
        os.utime(place / f"{clip}.wav", (1e9, 1e9))  # nobody is still writing it
    return path


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("machines")
    for number in range(BOARDS):
        machine(path / "train" / f"board-{number}", number, count=CLIPS, faults=1)
        machine(path / "test" / f"board-{number}", number, count=8, faults=8, seed=1)
    return path


def plain(clips: Path | None, privacy: dict[str, Any] | None = None, **sections: Any) -> dict[str, Any]:
    own = {} if clips is None else {"path": str(clips), "partition": "given"}
    tables: dict[str, Any] = {
        "model": {"name": "second-moments", "features": "sound:log-mel", "loss": "reconstruction"},
        "method": {"name": "second-moments", "directions": 2},
        "data": {"name": "sound", "sample_rate": RATE, "segment_s": FRAMES / RATE, "devices": BOARDS, **own},
        "round": {"rounds": 1},
    }
    merged = {name: {**table, **sections.get(name, {})} for name, table in tables.items()}
    return {"name": "machines", **merged, "privacy": {"accounting": "secure", **(privacy or CLOSE)}}


def spectra(prepared: PreparedTask, place: Path) -> list[np.ndarray]:
    """The clips of a folder, each as `[segment, frequency, band]`."""
    form = SoundForm(RATE, FRAMES)
    found = []
    for file in sorted(place.glob("*.wav")):
        dataset = prepared.dataset
        assert dataset is not None
        samples = dataset.train.take(slice(0, 0))
        segments = form.segments(file, FRAMES)
        samples = type(samples)(
            segments, np.zeros((len(segments), 1), np.float32), samples.mean, samples.std, samples.targets
        )
        assert prepared.features is not None
        values = prepared.features.of(samples).x[:, 0].astype(float)
        found.append(scipy.fft.dct(values, axis=-1, norm="ortho").transpose(0, 2, 1))
    return found


def test_a_folder_of_normal_sound_has_a_class_for_what_is_none(clips: Path) -> None:
    prepared = prepare(parse_task(plain(clips)), run_id="x")
    dataset = prepared.dataset
    assert dataset is not None
    assert (dataset.class_names, dataset.input_shape) == (("fault",), (1, 1, FRAMES))
    assert isinstance(dataset.train.images, Segments), "Speech Commands would take 3 GiB"
    assert prepared.spec.model.input_shape == (1, 20, 4)
    assert prepared.model.layout.size == 4 * 20**2
    labels = dataset.test.labels[dataset.test.records[0]]
    assert labels.dtype == np.float32
    assert (labels.sum(), len(labels)) == (8 * BOARDS, 16 * BOARDS)
    form: Any = {"input_shape": (1, 1, FRAMES), "mean": (0.0,), "std": (1.0,), "sound": SoundForm(RATE, FRAMES)}
    form |= {"class_names": ("click", "fault"), "targets": prepared.spec.model.targets}
    several = load_folder_set(clips, by_device=True, **form).test
    assert several.labels.sum(0).tolist() == [0, 2 * 8 * BOARDS]


def test_the_sum_and_what_a_device_says_are_their_formulas(clips: Path, tmp_path: Path) -> None:
    """All files are read here anew; every fifth normal clip trains nothing, and no fault."""
    run = hf.simulate(plain(clips), out=tmp_path / "run", workers=1, local_only=False, report=False, quiet=True)
    prepared = prepare(parse_task(plain(clips)), run_id="x")
    total = np.zeros((4, 20, 20))
    for number in range(BOARDS):
        normal = spectra(prepared, clips / "train" / f"board-{number}" / "normal")
        z = np.concatenate([clip for place, clip in enumerate(normal) if place % 5 < 4])
        z -= z.mean(0)
        moments = np.einsum("ntc,ntd->tcd", z, z)
        total += moments / np.linalg.norm(moments)
    found = []
    for frequency, block in enumerate(total):
        sizes, vectors = np.linalg.eigh(block)
        found += [(size, frequency, vector) for size, vector in zip(sizes, vectors.T, strict=True)]
    projector = np.zeros_like(total)
    for _, frequency, vector in sorted(found, key=lambda each: -each[0])[:2]:
        projector[frequency] += np.outer(vector, vector)
    params = Checkpoints(run.folder / "aggregator", prepared.model.layout, durable=False).read(1)
    np.testing.assert_allclose(params.reshape(total.shape) / GAIN, projector, atol=2e-3)

    for number in range(BOARDS):
        place = clips / "train" / f"board-{number}" / "normal"

        def rests(folder: Path) -> np.ndarray:
            found = np.concatenate(spectra(prepared, folder))
            return found - np.einsum("ntc,tcd->ntd", found, projector)

        def errors(folder: Path, home: Path = place) -> np.ndarray:
            return errors_by(rests(home), rests(folder))

        own = Threshold.fitted(errors_left_out(rests(place), records=CLIPS), 0.01).error
        tested = clips / "test" / f"board-{number}"
        row = run.devices.iloc[number]
        assert row.auroc_own_local > 0.95
        assert row.detected_own_local == pytest.approx((errors(tested / "fault") > own).mean(), abs=0.07)
        assert row.false_alarms_own_local == pytest.approx((errors(tested / "normal") > own).mean(), abs=0.07)


@pytest.mark.slow
def test_boards_with_files_learn_together_and_each_says_what_it_hears(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Real agents on a broker in memory, with a secret sum; then the commands of one of the boards."""
    hub, names = LocalHub(), [f"board-{number}" for number in range(8)]
    whole = Whole(tmp_path / "fleet", hub.link, accounting="secure")
    for number, name in enumerate(names):
        machine(tmp_path / name, number, count=CLIPS)
    asked = plain(
        None, {"noise_multiplier": 0.05}, data={"devices": 8}, round={"rounds": 1, "min_devices": 8, "min_updates": 5}
    )
    prepared = prepare(parse_task(asked), run_id="heard")
    whole.begin(prepared)
    for name in names:
        whole.board(name, data=OwnDataSection("sound", str(tmp_path / name)))
    assert whole.drive(lambda: whole.coordinator.engine.finished)
    final = whole.coordinator.engine.global_digest
    assert whole.drive(lambda: all(board.store.global_digest == final for board in whole.boards))
    assert whole.coordinator.store.refusals() == {}
    assert [row.metrics["participants"] for row in whole.coordinator.store.rounds()] == [8]
    whole.close()

    state, later = whole.boards[0].state_dir, machine(tmp_path / "later", 0, count=6, faults=6, seed=2)
    (tmp_path / "inbox").mkdir()
    more = f'held_out = "{later}"\n[listen]\nkeep_alarms = 9'
    toml = device_file(tmp_path / "device.toml", kind="sound", path=str(tmp_path / names[0]), more=more)
    toml.write_text(toml.read_text().replace('"state"', f'"{state}"').replace('"board-1"', f'"{names[0]}"'))
    heard: dict[str, list[float]] = {}
    for kind in ("normal", "fault"):
        assert main(["predict", str(toml), "--json", *map(str, sorted((later / kind).iterdir()))]) == 0
        lines = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
        assert [each["from_s"] for each in lines[0]["segments"]] == [0, FRAMES / RATE]
        assert lines[0]["threshold"]["held_out"] == 2 * CLIPS
        heard[kind] = [each["score"] for line in lines for each in line["segments"]]
        assert all(each["unusual"] == (each["score"] > 1) for line in lines for each in line["segments"])
    assert max(heard["normal"]) < 1 < min(heard["fault"])
    [fault, *_] = sorted((later / "fault").iterdir())
    assert main(["predict", str(toml), str(fault)]) == 0
    said = capfd.readouterr().out
    assert "2 of 2 segments are unusual" in said
    assert "from 0.25 s: " in said
    assert main(["listen", str(toml), "--from", str(fault)]) == 0
    listened = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert [each["score"] for each in listened] == [pytest.approx(score, abs=1e-3) for score in heard["fault"][:2]]
    assert [(each["alarm"], each["unusual"], "kept" in each) for each in listened] == [
        ("unusual", True, True), ("unusual", True, False),
    ]  # fmt: skip
    now = 0.0
    model = ModelInUse(load_config(toml), clock=lambda: now)
    segment = SoundForm(RATE, FRAMES).segments(fault, FRAMES)[0, 0, 0]
    assert model.score(segment) == pytest.approx(heard["fault"][0])
    for clip in range(4):
        (tmp_path / names[0] / "normal" / f"{clip}.wav").rename(tmp_path / "inbox" / f"own-{clip}.wav")
    model.look()
    assert model.score(segment) == pytest.approx(heard["fault"][0]), "it looks every ten seconds"
    now = 10.0
    model.look()
    assert main(["predict", str(toml), str(fault), "--json"]) == 0
    renewed = json.loads(capfd.readouterr().out)
    assert renewed["threshold"]["held_out"] == 2 * (CLIPS - 4)
    assert model.score(segment) == pytest.approx(renewed["segments"][0]["score"]) != heard["fault"][0]
    for clip in range(4):
        (tmp_path / "inbox" / f"own-{clip}.wav").rename(tmp_path / names[0] / "normal" / f"{clip}.wav")

    toml.write_text(toml.read_text().replace("keep_alarms = 9", 'keep = "unsure"'))
    pcm = np.concatenate([read_clip(file, RATE) for file in sorted(later.rglob("*.wav"))])
    write_clip(tmp_path / "all.wav", pcm, RATE)
    assert main(["listen", str(toml), "--from", str(tmp_path / "all.wav")]) == 0
    listened = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert [0.5 <= each["score"] <= 2 for each in listened] == ["kept" in each for each in listened]
    assert {"kept" in each for each in listened} == {True, False}
    assert main(["status", str(toml), "--json"]) == 0
    own = json.loads(capfd.readouterr().out)["model"]
    assert (own["right"], own["images"]) == (24, 24)
    assert main(["add", str(toml), "--label", "normal", str(later / "normal" / "0.wav")]) == 0
    assert (tmp_path / names[0] / "normal" / "0.wav").exists()
    assert main(["add", str(toml), "--label", "norml", str(later / "normal" / "0.wav")]) == 2
    assert "did you mean normal?" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (
            {"data": {"name": "esc-50", "path": None, "partition": "iid"}},
            "has classes; take 'arrays' or 'table', or for a reconstruction 'sound'",
        ),
        ({"model": {"loss": "squared", "tolerance": 1.0}}, "gives its input back"),
        ({"model": {"features": "sound:speech"}}, "features go with name = 'linear'"),
        ({"model": {"public": "FOLDER"}}, "keeps the form of a sample: leave model.public out"),
        ({"data": {"partition": "dirichlet-class", "alpha": 1.0}}, "take 'iid', or 'given' with your own"),
        ({"data": {"augment": "flip-crop"}}, "changes the input and not the target"),
        ({"data": {"segment_s": 0.02}}, "takes sound of at least 100 samples"),
        (
            {"model": {"features": None}, "data": {"segment_s": 1.0}},
            "not of 4,000; cut .* or set features = 'sound:log-mel'",
        ),
    ],
)
def test_what_is_not_possible_is_refused(clips: Path, changed: dict[str, Any], said: str) -> None:
    task = plain(clips, **changed)
    if "public" in task["model"]:
        task["model"]["public"] = str(clips / "test" / "board-0")
    if task["data"]["path"] is None:
        del task["data"]["path"]
    with pytest.raises(BadInput, match=said):
        prepare(parse_task(task), run_id="x")


@pytest.mark.slow
@pytest.mark.parametrize("privacy", [CLOSE, RECORD])
def test_engines_agree_and_a_run_goes_on(
    clips: Path, tmp_path: Path, runs: Any, finish: Any, audit: Any, privacy: dict[str, Any]
) -> None:
    asked = parse_task(plain(clips, privacy))
    fast = runs.fast(begin(asked, tmp_path / "fast", data_dir=None))
    train = fast.fleet.devices[0].train.samples
    assert len(train) == len(train.records[0]) * (1 if privacy == RECORD else 2)
    live = begin(asked, tmp_path / "live", data_dir=None)
    fleet = LiveFleet(live)
    with fleet.running():
        finish(fleet)
    assert audit.models(live) == audit.models(fast), "to the last bit"
    assert go_on(tmp_path / "fast", data_dir=None).prepared.spec == fast.prepared.spec


def test_each_fault_of_the_example_is_heard_where_its_physics_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(MACHINES)
    monkeypatch.delitem(sys.modules, "make_data", raising=False)
    made = runpy.run_path(str(MACHINES / "make_sound.py"))
    del sys.modules["make_data"]
    motor, around = made["Machine"].drawn(np.random.default_rng(0)), made["room"](np.random.default_rng(1))

    def decibels(fault: str, low: float, high: float) -> float:
        pcm = made["sounds"](motor, around, 20, np.random.default_rng(1), any_load=False, fault=fault)
        assert (pcm.dtype, pcm.shape, abs(pcm.astype(int)).max() < 32767) == (np.int16, (20, 8000), True)
        power = abs(np.fft.rfft(pcm)[:, int(low) : int(high)]) ** 2
        return float(10 * np.log10(power.sum(1)).mean())

    rings, blades = 3 * motor.resonance, 7 * motor.speed
    for fault, low, high, least in (
        ("bearing", rings - 100, rings + 100, 3),
        ("harmonic", blades, 1.25 * blades, 6),
        ("lubrication", 3000, 3900, 2),
    ):
        assert decibels(fault, low, high) > decibels("", low, high) + least
        assert decibels(fault, 10, 100) == pytest.approx(decibels("", 10, 100), abs=1)
    made["make"](tmp_path / "sound", machines=2, train=5)
    task = hf.task(MACHINES / "sound.toml", {"data.path": str(tmp_path / "sound"), "data.devices": 2})
    dataset = prepare(task).dataset
    assert dataset is not None
    assert (len(dataset.train), len(dataset.test), dataset.test.labels.mean()) == (10, 48, 0.5)
