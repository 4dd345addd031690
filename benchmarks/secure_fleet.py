"""Runs a thousand real devices in rounds with secure aggregation, kills some, and checks the opened sums and the
losses.

    python -m benchmarks.secure_fleet --data-dir DIR [--devices 1000] [--rounds 1] [--lost 0.05] [--json F]

Broker, aggregator and devices are as in `benchmarks/fleet.py`. A share of the devices is in a separate process, which
is killed when the first round has opened and is not restarted: some of them are committee members. Each device has four
images, and the head sees pixels: with features, a thousand boards that fetch their graph at once take 5 MiB each. The
exit status is 0 only if every round's sum was opened and nothing else was lost.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common import Figures, cores, make_parser, table
from benchmarks.fleet import finding, judged, run_live
from benchmarks.processes import ROOT
from hushfleet.aggregator.config.task import Task, parse_task
from hushfleet.aggregator.results.events import iterate_events
from hushfleet.aggregator.storage.store import AggregatorStore
from hushfleet.schema import read_file
from hushfleet.simulator.engines.fast.device import store_of
from hushfleet.simulator.run_folder import Simulation, begin

IMAGES = 4


def task_of(data: str, *, devices: int, rounds: int, lost: float) -> Task:
    settings = (
        f'data.name="{data}"',
        'name="secure-fleet"',
        f"data.devices={devices}",
        f"data.limit={IMAGES * devices}",
        'data.partition="iid"',
        "data.min_samples=2",
        f"round.rounds={rounds}",
        f"round.quorum={1 - lost}",
        f"round.min_updates={int((1 - 2 * lost) * devices)}",
        "round.deadline_s=900",
    )
    plain = read_file(ROOT / "tasks" / "fashion-mnist-hush.toml")
    del plain["model"]["features"]
    return parse_task(plain, settings)


def disk_bytes(simulation: Simulation) -> int:
    """Returns the size of all files of devices."""
    folder = simulation.folder.path / "devices"
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def audit(simulation: Simulation, *, lost: float) -> list[Figures]:
    task, names = simulation.prepared.spec.task, [device.name for device in simulation.fleet.devices]
    with AggregatorStore(simulation.folder.aggregator) as store:
        rounds = store.rounds()
        opened = sum(row.phase == "closed" and row.result_digest != row.global_digest for row in rounds)
        included = {(row.round, update.device) for row in rounds for update in store.updates(row.round)}
        answers = [len(store.answer_sizes(row.round)) for row in rounds]
        refusals = sum((Counter(codes) for codes in store.refusals().values()), Counter())
    of_device: defaultdict[str, list[int]] = defaultdict(list)
    for number, name in included:
        of_device[name].append(number)
    kept = acked = 0
    for name in names:
        with store_of(simulation.folder, name) as device:
            kept += device.ledger.rounds_charged(task) >= len(of_device[name])
            acked += all(
                (entry := device.outbox(task, number)) is not None and entry.status == "acked"
                for number in of_device[name]
            )
    wanted, least = simulation.task.round.rounds, int((1 - lost) * len(names))

    enough = sum(sum(number == row.round for number, _ in included) >= least for row in rounds)
    return [
        finding("every round's sum was opened", opened, wanted),
        finding(f"every sum has {least:,} devices or more", enough, wanted),
        finding("every device in a sum has charged it", kept, len(names)),
        finding("every device in a sum knows that its update arrived", acked, len(names)),
        finding("no message was refused", refusals.total(), 0),
        {"promise": "answers of the committee, a round", "kept": True, "found": ", ".join(map(str, answers))},
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--data", default="fashion-mnist", help="digits has enough images for 300 devices")
    parser.add_argument("--data-dir", type=Path, help="where they are; default: download")
    parser.add_argument("--devices", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--lost", type=float, default=0.05, help="the share of the devices that is killed")
    options = parser.parse_args(arguments)
    lost = options.lost

    def measure(folder: Path) -> Figures:
        task = task_of(options.data, devices=options.devices, rounds=options.rounds, lost=lost)
        simulation = begin(task, folder / "run", data_dir=options.data_dir)
        simulation.write_samples()  # its devices are not those of the fast engine
        _, usage = run_live(simulation, generators=max(2, cores()), lost=round(lost * options.devices))
        events = list(iterate_events(simulation.folder.events))
        first = next(event["at"] for event in events if event["event"] == "round_open")
        last = [event for event in events if event["event"] == "round_close"][-1]
        return {
            "devices": options.devices,
            "in the last sum": last["participants"],
            "seconds": last["at"] - first,
            "kilobytes on disk a device": disk_bytes(simulation) / options.devices / 1000,
            "bytes up a device": last["uplink_bytes"] / max(1, last["participants"]),
            "findings": audit(simulation, lost=lost),
            "processes": [
                {"process": name, "cpu_s": each[-1].cpu_s, "peak_mib": max(sample.resident_mib for sample in each)}
                for name, each in sorted(usage.items())
            ],
        }

    return judged(options, measure, show)


def show(figures: Figures) -> None:
    table("Processes", figures["processes"])
    table("The run", [{name: value for name, value in figures.items() if not isinstance(value, list)}])


if __name__ == "__main__":
    sys.exit(main())
