"""Makes the homes, trains a task for each quarter, and prints which forecasts are wrong by more than half an hour.

`python run.py [--seeds N] [--json FILE] [KEY=VALUE ...]`, keys as in task.toml.
"""

import argparse
import json
import tempfile
from pathlib import Path

import make_data
import make_table
import numpy as np

import hushfleet as hf
from hushfleet.data.arrays import Data

HERE, QUARTERS, DAYS, KEPT = Path(__file__).parent, 4, 91, 10  # of a quarter; days that a recorder keeps


def quarters(files: list[Path], seed: int) -> list[Data]:
    """Returns the homes' samples by quarter: a home trains on what its recorder keeps, and the other days test."""
    rows = [(file.stem, *sample) for file in files for sample in make_table.samples(file, *make_data.ENTITIES)]
    homes, hours, y, x = (np.array(column) for column in zip(*rows, strict=True))
    x, y, day = np.float32(x).reshape(len(x), 3, 1, -1), np.float32(y)[:, None], (hours - make_data.FIRST_HOUR) // 24
    rng, found, home = np.random.default_rng(seed), [], np.unique(homes, return_inverse=True)[1]
    for number in range(QUARTERS):
        first = number * DAYS + rng.integers(0, DAYS - KEPT, len(files))[home]
        train = (first <= day) & (day < first + KEPT)
        test = (day // DAYS == number) & ((day < first - 1) | (day > first + KEPT))
        parts = {"train": train, "test": test}
        given = {f"{part}_{name}": values[chosen] for part, chosen in parts.items()
                 for name, values in (("x", x), ("y", y), ("device", homes))}  # fmt: skip
        found.append(Data(**given, class_names=[make_table.TARGET]))
    return found


def one_year(seed: int, changes: dict[str, str]) -> list[dict[str, float]]:
    """Returns the wrong forecasts by quarter, in per cent of all."""
    found, settings = [], {"seed": seed, **changes}
    homes = hf.task(HERE / "task.toml", settings).data.devices
    with tempfile.TemporaryDirectory() as folder:
        files = make_data.make(Path(folder), homes=homes, days=QUARTERS * DAYS, seed=seed)
        for number, data in enumerate(quarters(files, seed), 1):
            out = Path(folder) / f"quarter-{number}"
            run = hf.simulate(str(HERE / "task.toml"), settings, data=data, out=out, report=False, quiet=True)
            settings["model.start"] = str(out)
            own = run.devices[["accuracy_alone_local", "accuracy_own_local"]].mean()
            right = {"alone": own.iloc[0], "shared": run.rounds.accuracy_global.iloc[-1], "own": own.iloc[1]}
            found.append({name: round(100 * (1 - float(share)), 2) for name, share in right.items()})
            print(f"seed {seed}, quarter {number}: {found[-1]}", flush=True)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("changes", nargs="*", metavar="KEY=VALUE")
    given = parser.parse_args()
    with hf.script(given.changes) as changes:
        runs = [one_year(seed, changes) for seed in range(given.seeds)]
    for number in range(QUARTERS):
        found = {name: [run[number][name] for run in runs] for name in runs[0][number]}
        said = (f"{name} {np.mean(values):.1f} ±{np.std(values):.1f}" for name, values in found.items())
        print(f"quarter {number + 1}, % of forecasts wrong: {', '.join(said)}")
    if given.json:
        homes = hf.task(HERE / "task.toml", changes).data.devices
        figures = {"made_by": "examples/thermostats/run.py", "homes": homes, "days": KEPT, "runs": runs}
        given.json.write_text(json.dumps(figures, indent=1) + "\n")
