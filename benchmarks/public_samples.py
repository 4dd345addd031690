"""Measures what public samples without labels, and continuing, bring to `hush`, by the product's fast engine.

    python -m benchmarks.public_samples --kept FILE [--data-dir DIR] [--only A,B] [--network WHEEL] [--json FILE]

Unit device, secure sums, epsilon 2, delta 1e-5, every device honest and in every round, iid; seeds 0 to 2. Devices'
images, public ones and the test set (5,000 images of Fashion-MNIST, 397 digits) are drawn by the seed, and have no
image in common. Each run is a line of --kept, so that an interrupted measurement continues.

- `images`: with and without 100 or 300 public images (`model.public`), on the package's features;
- `vectors`: the same with digits as 64 values, and 512 random features of Fashion-MNIST, as samples: through an ONNX
  file that returns them unchanged, without features (`unit-norm`), and with public samples too;
- `backbone`: digits with a recogniser of text as features (`ocr-inner`: cut at its classifier's input), made by
  `hushfleet features make` of --network, which is
  `rapidocr_onnxruntime-1.4.4-py3-none-any.whl:rec_infer.onnx`;
- `periods`: a task of 30 devices and three that continue it (`model.start`), each with other images; `whole-steps`: as
  before, without the factor 1 / sqrt(p).
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnx
from onnx import helper

import hushfleet as hf
from benchmarks.common import Figures, make_parser, names_option, table, write
from hushfleet.data.arrays import Data
from hushfleet.data.sets import load
from hushfleet.methods.hush import TailMean
from hushfleet.models.features.make import find_source, make

SEEDS = (0, 1, 2)
FEATURES = {"digits": "filters", "fashion-mnist": "scattering"}
EACH, PERIODS, VALUES = 20, 4, 512
TEST = {"digits": 397, "fashion-mnist": 5000}


@dataclass(frozen=True)
class PublicRun:
    """One run.

    :param way: `features`, the package's; `file`, `unit-norm` or `scaled` (with mean and deviation) for vectors;
        `whole-steps`: see `periods`.
    :param public: number of public samples.
    :param periods: number of tasks, each of which continues the one before.
    """

    part: str
    data: str
    devices: int
    way: str
    public: int
    seed: int
    periods: int = 1


def cells() -> Iterator[PublicRun]:
    for seed in SEEDS:
        for devices in (30, 50, 100):
            yield from (PublicRun("images", "fashion-mnist", devices, "features", n, seed) for n in (0, 300))
        yield from (
            PublicRun("images", "digits", devices, "features", n, seed) for devices in (30, 50) for n in (0, 100)
        )
        yield from (
            PublicRun("backbone", "digits", devices, way, n, seed)
            for devices in (30, 50)
            for way, n in (("ocr", 0), ("ocr-inner", 100))
        )
        for data, public in (("digits", 100), ("fashion-mnist", 300)):
            yield from (PublicRun("vectors", data, 30, way, 0, seed) for way in ("file", "unit-norm", "scaled"))
            yield from (PublicRun("vectors", data, 30, way, public, seed) for way in ("unit-norm", "scaled"))
        yield from (PublicRun("periods", "fashion-mnist", 30, w, 0, seed, PERIODS) for w in ("features", "whole-steps"))


def measure(cell: PublicRun, folder: Path, *, data_dir: Path | None, network: str = "") -> Figures:
    """Returns accuracies after the last round: shared head, personalized heads, alone; and an update's bytes."""
    began = time.process_time()
    x, y = images_of(cell, data_dir=data_dir)
    order, size = np.random.default_rng([cell.seed, 7]).permutation(len(x)), cell.devices * EACH
    test, rest = np.split(order, [TEST[cell.data]])
    public, rest = np.split(rest, [cell.public])
    changes: dict[str, Any] = {"data.devices": cell.devices, "round.min_updates": cell.devices}
    if cell.way in ("features", "whole-steps"):
        changes["model.features"] = FEATURES[cell.data]
    elif cell.way == "file":
        changes["model.features"] = str(unchanged(folder, x.shape[1]))
        x = x.reshape(len(x), 1, 1, -1)
    elif cell.way.startswith("ocr"):
        shapes: dict[str, Any] = {"network_shape": (3, 48, 48), "image_shape": (1, 8, 8), "border": 2}
        shapes["cut"] = "transpose_51.tmp_0" if cell.way == "ocr-inner" else None  # the input of its classifier
        (folder / "ocr.onnx").write_bytes(make(find_source(network).data, **shapes, mean=[0.5], std=[0.5]).data)
        changes["model.features"] = str(folder / "ocr.onnx")
    elif cell.way == "scaled":
        count = x.shape[1]  # one mean and deviation for all, as an owner knows them from the sensor's data sheet
        changes |= {"data.mean": [float(x.mean())] * count, "data.std": [float(x.std())] * count}
    if cell.public:
        np.savez(folder / "public.npz", train_x=x[public])
        changes["model.public"] = str(folder / "public.npz")
    found = []
    for period in range(cell.periods):
        dealt = rest[period * size : (period + 1) * size]
        data = Data(train_x=x[dealt], train_y=y[dealt], test_x=x[test], test_y=y[test])
        changes["seed"] = cell.seed + 1000 * period  # with the same seed a simulation draws the same noise again
        if period:
            changes["model.start"] = str(folder / f"{period - 1}")
        how: dict[str, Any] = {"out": folder / f"{period}", "report": False, "quiet": True, "evaluate_every": 20}
        with mock.patch.object(TailMean, "averages_periods", cell.way != "whole-steps"):
            result = hf.simulate(TASK, changes, data=data, workers=1, **how).result
        row, alone = result.rounds[-1], result.local_only
        found.append(
            {
                "shared": row.accuracy_global,
                "own": row.accuracy_own_common,
                "alone": None if alone is None else alone.accuracy_own_common,
                "update_bytes": row.uplink_bytes / cell.devices,
                "values": result.model.parameters,
            }
        )
    return {"periods": found, "cpu_s": round(time.process_time() - began, 1)}


TASK = {
    "name": "public-samples",
    "model": {"name": "linear"},
    "method": {"name": "hush"},
    "privacy": {"accounting": "secure", "epsilon": 2.0, "delta": 1e-5, "honest_fraction": 1.0},
    "data": {"name": "arrays", "devices": 30, "partition": "iid", "test_fraction": 0},
    "round": {},
}


def images_of(cell: PublicRun, *, data_dir: Path | None) -> tuple[np.ndarray, np.ndarray]:
    """Returns all samples of a data set, as images or as vectors, and their labels."""
    dataset = load(cell.data, data_dir=data_dir)
    parts = [dataset.train, dataset.test]
    x, y = (np.concatenate([getattr(each, name) for each in parts]) for name in ("images", "y"))
    if cell.part != "vectors":
        return x, y
    x, y = x[:20_000].reshape(min(20_000, len(x)), -1).astype(np.float32) / 255, y[:20_000]
    if cell.data != "digits":  # rectified random projections of the pixels
        weights = np.random.default_rng(3).standard_normal((x.shape[1], VALUES)) / np.sqrt(x.shape[1])
        x = np.maximum(x @ weights.astype(np.float32), 0)
    return x, y


def unchanged(folder: Path, count: int) -> Path:
    """Writes an ONNX file that returns its input."""
    nodes = [helper.make_node("Flatten", ["x"], ["f"])]
    ends = [
        helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)
        for name, shape in (("x", ["b", 1, 1, count]), ("f", ["b", count]))
    ]
    graph = helper.make_graph(nodes, "unchanged", ends[:1], ends[1:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), folder / "same.onnx")
    return folder / "same.onnx"


def main() -> None:
    parser = make_parser(__doc__ or "")
    parser.add_argument("--kept", type=Path, required=True, metavar="FILE", help="finished runs, a line each")
    parser.add_argument("--data-dir", type=Path, help="where the data sets' files are")
    parser.add_argument(
        "--only", type=names_option(("images", "vectors", "periods", "backbone")), default="all", metavar="A,B"
    )
    parser.add_argument("--network", default="", metavar="WHEEL:FILE", help="the recogniser of `backbone`")
    parser.add_argument("--show", action="store_true", help="measure nothing more")
    options = parser.parse_args()
    lines = list(map(json.loads, options.kept.read_text().splitlines() if options.kept.exists() else []))
    done = {PublicRun(**line["cell"]) for line in lines}
    for cell in cells():
        if options.show or cell in done or (options.only != "all" and cell.part not in options.only):
            continue
        with tempfile.TemporaryDirectory() as folder:
            lines.append(
                {
                    "cell": asdict(cell),
                    **measure(cell, Path(folder), data_dir=options.data_dir, network=options.network),
                }
            )
        with options.kept.open("a") as file:
            file.write(json.dumps(lines[-1]) + "\n")
    groups: dict[str, list[Figures]] = {}
    for line in lines:
        groups.setdefault(json.dumps({**line["cell"], "seed": 0}), []).append(line)
    rows = []
    for key, group in groups.items():
        for number in range(len(group[0]["periods"])):
            values = [line["periods"][number] for line in group]
            means = {name: sum(each[name] for each in values) / len(values) for name in values[0]}
            rows.append(json.loads(key) | {"period": number + 1, "seeds": len(group)} | means)
    table("means over the seeds", [{k: round(v, 3) if isinstance(v, float) else v for k, v in r.items()} for r in rows])
    write(options, {"made_by": "benchmarks/public_samples.py", "epsilon": 2.0, "images": EACH, "rows": rows})


if __name__ == "__main__":
    main()
