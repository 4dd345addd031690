"""Measures the gain table of one fleet on public images, or clips of sound, similar to the user's own, for `hushfleet
plan --data`."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from onnxruntime import InferenceSession

from hushfleet.aggregator.payloads.public_data import LEAST as LEAST_PUBLIC
from hushfleet.aggregator.planning.advice import Question
from hushfleet.aggregator.planning.gain_table import GainTable, PublicGain
from hushfleet.data.folder import FileForm, class_places, joined, load_folder
from hushfleet.data.form import SAMPLE_RATE, SEGMENT_S
from hushfleet.data.partition import stratified_choice
from hushfleet.data.samples import Samples
from hushfleet.data.sets import SOURCES, load
from hushfleet.data.sound import SoundForm
from hushfleet.data.walk import SOUND_ENDINGS, files_below
from hushfleet.errors import BadInput, GraphRefused
from hushfleet.learning.graph_session import open_session
from hushfleet.methods.hush_rule import signal
from hushfleet.models.features import get_features
from hushfleet.models.features.public import PublicDirections
from hushfleet.progress import doing
from hushfleet.simulator.studies.plan.simulated import Dealt, Figures, Images, SimulatedFleet, deal, over_seeds

SEEDS = (0, 1, 2)
TIMES = (0.25, 0.5, 1.0, 2.0, 4.0)
"""The measured epsilons, as multiples of the requested one; the answer changes somewhere between them."""
MOST_TRAIN, MOST_TEST, TEST_SHARE = 6000, 1000, 0.25
TIMED = 50  # images whose features are computed one by one, which tells what a board needs
LEAST_DEVICES = 8
MOST_PUBLIC = 300
_CHOICE_SEED = 0


@dataclass(frozen=True)
class OwnImages:
    """Public images, or segments of clips, with labels, to train on and to test with.

    :param name: text that names their source.
    :param class_names: names of a folder's sub-folders; empty for a data set, which stands for images of other classes.
    :param stand_in: the folder, if it has the class folders itself; else empty.
    """

    name: str
    classes: int
    train: Samples
    test: Samples
    class_names: tuple[str, ...] = ()
    stand_in: str = ""


def own_images(data: str, shape: tuple[int, int, int], *, data_dir: Path | None) -> OwnImages:
    """Reads a data set by its name, or a folder with one sub-folder of images, or of sound, for each class.

    :param shape: images of a folder are resized to this shape. (1, 1, T): a clip gives its loudest T values at 16 kHz;
        for another shape, its loudest second.
    :raises BadInput: there are no such images, or fewer than two classes, or a class of one image.
    """
    names, stand_in = list[str](), ""
    if data in SOURCES:
        found = load(data, data_dir=data_dir)
        classes, train, test = len(found.class_names), found.train, found.test
    else:
        path = Path(data)
        places, names = class_places(path)
        stand_in = str(path.absolute()) if places == [path] else ""
        if len(names) < 2:
            raise BadInput(
                f"--data {data}: neither a folder with a sub-folder of images for each class, or of sound, two or "
                f"more, nor one of {', '.join(SOURCES)}"
            )
        sound = None
        if any(file.lower().endswith(SOUND_ENDINGS) for file in files_below(path, data=path)):
            shape = shape if shape[:2] == (1, 1) else (1, 1, round(SEGMENT_S * SAMPLE_RATE))
            sound = SoundForm(SAMPLE_RATE, shape[2], one_a_clip=True)
        zeros, ones = (0.0,) * shape[0], (1.0,) * shape[0]
        form: FileForm = {"input_shape": shape, "class_names": names, "mean": zeros, "std": ones, "sound": sound}
        whole = joined([load_folder(place, **form) for place in places])
        classes, held = len(names), stratified_choice(whole.y, round(TEST_SHARE * len(whole)), _rng())
        train, test = whole.take(np.setdiff1d(np.arange(len(whole)), held)), whole.take(held)
    train, test = _some(train, MOST_TRAIN), _some(test, MOST_TEST)
    for part in (train, test):
        if (np.bincount(part.y, minlength=classes) == 0).any():
            raise BadInput(f"--data {data}: a class has too few images to train on some and to test with others")
    return OwnImages(data, classes, train, test, tuple(names), stand_in)


def measured_table(asked: Question, own: OwnImages) -> GainTable:
    """Simulates the fleet of a question with the available images. Raises `BadInput` if there are too few.

    A gain depends on r, and very little on the number of devices. So if there are too few images for a fleet, a smaller
    fleet with the same r is simulated.
    """
    devices, least = min(asked.devices, len(own.train) // asked.images), min(LEAST_DEVICES, asked.devices)
    what = "clips" if own.train.images.dtype == np.int16 else "images"
    if devices < least:
        raise BadInput(
            f"--data {own.name}: {len(own.train)} {what} to train on are too few: at least {least} devices are needed, "
            f"with {asked.images} each; give more of them, or fewer to a device (--images)"
        )
    given = _some(own.train, 2 * devices * asked.images)  # enough for different images with each seed
    extractor = get_features(asked.features, given.images.shape[1:])
    session, timed = open_session(extractor.graph), given.take(slice(0, TIMED))
    began = time.process_time()
    features_of(session, timed, batch=1)  # as a board computes them
    image_s = (time.process_time() - began) / len(timed)
    images = Images(features_of(session, given), given.y, features_of(session, own.test), own.test.y)
    signals = {
        asked.epsilon * times: signal(devices=asked.counted, epsilon=asked.epsilon * times, delta=asked.delta)
        for times in TIMES
    }
    lines: list[Figures] = []
    with doing(f"simulating {devices} devices", total=len(SEEDS) * len(TIMES)) as work:
        for seed in SEEDS:
            dealt = deal(images, devices=devices, each=asked.images, seed=seed, alpha=asked.alpha)
            fleet = SimulatedFleet(images, dealt, seed, asked.have_order)
            lines.append({"alone": fleet.alone, "epsilon": {}})
            for epsilon, r in signals.items():
                lines[-1]["epsilon"][epsilon] = fleet.at(r)
                work.count()
    gain = public_gain(asked, own, session)
    name = asked.measured_as
    who = {"features": name, "classes": own.classes, "devices": asked.counted, "images": asked.images}
    plain = {
        "made_by": "hushfleet plan --data",
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "seeds": SEEDS,
        "delta": asked.delta,
        "features": {name: {"count": extractor.count, "graph_bytes": len(extractor.graph), "image_s": image_s}},
        "fleets": [who | {"alpha": asked.alpha, "honest": 1.0} | over_seeds(lines)],
    }
    few = f"there are {what} for {devices} devices of {asked.devices}; they were simulated with the noise of all"
    return GainTable(
        plain,
        public=gain,
        measured_on=f"{len(given):,} {what} of {own.name}, and {len(own.test):,} others to test",
        notes=() if devices == asked.devices else (few,),
    )


def public_gain(asked: Question, own: OwnImages, session: InferenceSession) -> PublicGain | None:
    """Simulates the fleet with some of the images as public samples, and without; None if there are too few images.

    The others are dealt to as many devices as they suffice for, with the same r.
    """
    count = min(MOST_PUBLIC, len(own.train) // 5)
    held = stratified_choice(own.train.y, count, _rng())
    public, rest = own.train.take(held), own.train.take(np.setdiff1d(np.arange(len(own.train)), held))
    devices = min(asked.devices, len(rest) // asked.images)
    if count < LEAST_PUBLIC or devices < min(LEAST_DEVICES, asked.devices):
        return None
    rest = _some(rest, 2 * devices * asked.images)
    x, test_x, shown = (features_of(session, each) for each in (rest, own.test, public))
    known, test_y = PublicDirections.of(shown), own.test.y
    plain = Images(x, rest.y, test_x, test_y)
    ways: tuple[tuple[Images, PublicDirections | None], ...] = (
        (plain, None),
        (Images(known.own(x), rest.y, known.own(test_x), test_y), known),
    )
    r, found = signal(devices=asked.counted, epsilon=asked.epsilon, delta=asked.delta), list[list[float]]()
    with doing("simulating devices with public samples", total=len(SEEDS)) as work:
        for seed in SEEDS:
            dealt = [deal(each, devices=devices, each=asked.images, seed=seed, alpha=asked.alpha) for each, _ in ways]
            fleets = [
                SimulatedFleet(images, own_dealt, seed, asked.have_order, by)
                for (images, by), own_dealt in zip(ways, dealt, strict=True)
            ]
            found.append([fleet.at(r)["chosen"]["own"] for fleet in fleets])
            work.count()
    labelled = SimulatedFleet(plain, Dealt(shown[None], public.y[None], np.full((1, own.classes), 1 / own.classes)), 0)
    without, given = np.mean(found, axis=0).tolist()
    return PublicGain(count, without, given, labelled.alone["common"])


def features_of(session: InferenceSession, samples: Samples, *, batch: int = 32) -> np.ndarray:
    """Returns features float32 `[n, F]` of pixels in [0, 1]. Raises `GraphRefused` if ONNX Runtime fails."""
    channels, found = len(samples.mean), list[np.ndarray]()
    raw = replace(samples, mean=(0.0,) * channels, std=(1.0,) * channels)
    with doing("features of images", total=len(raw)) as work:
        for first in range(0, len(raw), batch):
            part = raw.take(slice(first, first + batch))
            try:
                found += session.run(["features"], {"x": part.x})
            except Exception as error:  # the binding raises its own class for every kind of failure
                raise GraphRefused(f"ONNX Runtime cannot compute features: {error}") from error
            work.count(len(part))
    features = np.concatenate(found)
    if not np.isfinite(features).all():
        raise GraphRefused("the graph makes features that are not finite numbers")
    return features


def _some(samples: Samples, most: int) -> Samples:
    return samples if len(samples) <= most else samples.take(stratified_choice(samples.y, most, _rng()))


def _rng() -> np.random.Generator:
    return np.random.default_rng(_CHOICE_SEED)
