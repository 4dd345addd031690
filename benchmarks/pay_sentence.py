"""Compares the sentence "does the fleet pay?" with what fleets gain in the product.

    python -m benchmarks.pay_sentence --kept FILE [--data-dir DIR] [--minutes M]

The fleets are drawn by a seed: of a data set, with a number of boards, of images on each, an alpha of their labels, and
an epsilon; the second half of them with few boards, many images and a small epsilon. They are none of those with which
the gain table and its errors were measured. For each one `hushfleet plan --data` writes a task, from `PUBLIC` images
that no board has, and `hushfleet.aggregator.planning.pay` says its sentence for this task; and once more for the same
task without the simulation, by the table alone. The truth is the mean gain of own heads over training alone in the
product's fast engine, over `SEEDS` fleets of other images. "Pays" is right if that is a point or more, "does not pay"
if it is less; "may pay" is right if it is in the interval, and counts for neither.

A fleet is a line of --kept.
"""

from __future__ import annotations

import json
import math
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.common import Figures, make_parser, table
from benchmarks.gain_errors import ALPHAS, EPSILONS, PRODUCT_TEST, MeasuredFleet, product_result
from benchmarks.gain_sets import images_of
from hushfleet.aggregator.config.task import parse_task
from hushfleet.aggregator.planning.advice import Advice
from hushfleet.aggregator.planning.gain_errors import WORTH
from hushfleet.aggregator.planning.pay import pay
from hushfleet.simulator.studies.plan.needs import needs
from hushfleet.simulator.studies.plan.own_images import OwnImages, measured_table
from hushfleet.simulator.studies.plan.task_file import task_text

DRAW, SEEDS, PUBLIC = 45, (0, 1), 1200
DATA = ("fashion-mnist", "mnist", "letters")
KINDS = (((14, 200), (10, 60), EPSILONS), ((14, 45), (20, 60), (1.0, 2.0)))
"""The smallest and the largest numbers of boards and of images, and the epsilons; twelve fleets of each kind."""
WORDS = {"yes": "pays", "no": "does not pay", "perhaps": "may pay"}


def fleets() -> Iterator[tuple[MeasuredFleet, float]]:
    """Yields fleets of random sizes, each with its epsilon; small numbers are as likely as large ones."""
    rng = np.random.default_rng(DRAW)
    for number in range(24):
        *ranges, epsilons = KINDS[number // 12]
        boards, images = (round(math.exp(rng.uniform(*np.log(ends)))) for ends in ranges)
        epsilon, alpha = float(rng.choice(epsilons)), ALPHAS[rng.integers(len(ALPHAS))]
        yield MeasuredFleet("product", DATA[number % len(DATA)], boards, images, alpha, seed=number), epsilon


def measured(fleet: MeasuredFleet, epsilon: float, data_dir: Path | None) -> Figures:
    """Returns the gain of a fleet with its standard error, and the two predicted answers with their intervals."""
    train, test = images_of(fleet.data, data_dir)
    order, gains = np.random.default_rng([DRAW, fleet.seed]).permutation(len(train)), list[float]()
    public, rest = train.take(order[:PUBLIC]), order[PUBLIC:]
    for seed in SEEDS:
        private = train.take(np.random.default_rng(seed).permutation(rest)[: fleet.devices * fleet.images])
        details = product_result(fleet, epsilon, private, test.take(slice(PRODUCT_TEST))).details
        gains += np.subtract(details.accuracy_own_local[-1], details.local_only_local).tolist()
    cut, asked = PUBLIC * 3 // 4, fleet.question(epsilon)
    own = OwnImages("public", asked.classes, public.take(slice(cut)), public.take(slice(cut, None)))
    said = {}
    for way, gain_table in (("simulated", measured_table(asked, own)), ("table", None)):
        task = parse_task(tomllib.loads(task_text(asked, needs(asked, gain_table), gain_table)))
        found = pay(task, devices=fleet.devices)
        assert isinstance(found, Advice)
        low, high = (round(end, 4) for end in found.intervals.own)
        said[way] = {"answer": found.answer, "low": low, "high": high}
    error = np.std(gains, ddof=1) / math.sqrt(len(gains))
    return {"gain": round(float(np.mean(gains)), 4), "error": round(float(error), 4), **said}


def is_right(said: Figures, gain: float) -> bool:
    if said["answer"] == "perhaps":
        return bool(said["low"] <= gain <= said["high"])
    return (said["answer"] == "yes") == (gain >= WORTH)


def counts(lines: list[Figures], way: str) -> Figures:
    """Counts right answers, and those of the worst kind: `pays`, where the loss is above two standard errors."""
    found: Figures = {"fleets": len(lines), "gain": sum(line["gain"] >= WORTH for line in lines)}
    for answer, words in WORDS.items():
        of = [line for line in lines if line[way]["answer"] == answer]
        found[words] = f"{sum(is_right(line[way], line['gain']) for line in of)} of {len(of)} right"
    found["right"] = sum(is_right(line[way], line["gain"]) for line in lines)
    found["pays, but loses"] = sum(line[way]["answer"] == "yes" and line["gain"] < -2 * line["error"] for line in lines)
    return found


def show(lines: list[Figures]) -> None:
    rows = []
    for line in lines:
        row = {key: line[key] for key in ("data", "boards", "images", "alpha", "epsilon")}
        row["measured"] = f"{100 * line['gain']:+.1f} +-{100 * line['error']:.1f}"
        for way in ("simulated", "table"):
            said = line[way]
            row[way] = f"{WORDS[said['answer']]}, {100 * said['low']:+.1f} to {100 * said['high']:+.1f}"
            row[way] += "" if is_right(said, line["gain"]) else " (wrong)"
        rows.append(row)
    table("gain of own heads over training alone, in points", rows)
    table("answers", [{"way": way} | counts(lines, way) for way in ("simulated", "table")])


def main() -> None:
    parser = make_parser(__doc__ or "")
    parser.add_argument("--kept", type=Path, required=True, metavar="FILE", help="measured fleets, a line each")
    parser.add_argument("--data-dir", type=Path, help="where the data sets' files are")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after so many, with what there is")
    options = parser.parse_args()
    ends = time.monotonic() + 60 * options.minutes
    lines = list(map(json.loads, options.kept.read_text().splitlines() if options.kept.exists() else []))
    for fleet, epsilon in list(fleets())[len(lines) :]:
        if time.monotonic() < ends:
            who = {"data": fleet.data, "boards": fleet.devices, "images": fleet.images, "alpha": fleet.alpha}
            lines.append(who | {"epsilon": epsilon} | measured(fleet, epsilon, options.data_dir))
            print(lines[-1], flush=True)
            with options.kept.open("a") as file:
                file.write(json.dumps(lines[-1]) + "\n")
    show(lines)


if __name__ == "__main__":
    main()
