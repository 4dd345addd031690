"""Runs hundreds of real devices with one broker and one aggregator on this machine; measures losses and costs.

    python -m benchmarks.fleet [--quick] [--devices 500] [--rounds 5] [--tls] [--json F]

Mosquitto, with the configuration that Hushfleet generates, and `hushfleet aggregator` with its durable store are the
real ones, one process each. The devices are also real, with one thread each in a few processes
(`simulator/world/hosted.py` describes the differences from boards). Each trains on a few handwritten digits. All
of them are in each round's cohort, and a round closes when all updates were accepted.

Then the files of all sides are read, and every promise is checked; the last one is that the fast engine computes the
same global models, bit by bit. The exit status is 0 only if nothing was lost. `make chaos` runs fleets in which
processes are killed.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
import psutil
import trustme

from benchmarks.common import Figures, console, cores, make_parser, table, write
from benchmarks.processes import ROOT
from benchmarks.updates import train
from hushfleet.aggregator.config.task import Task, load_task
from hushfleet.aggregator.results.events import iterate_events
from hushfleet.aggregator.storage.store import AggregatorStore
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.errors import BadInput, HushfleetError
from hushfleet.simulator.run_folder import Simulation, begin
from hushfleet.simulator.world.live import LiveFleet
from hushfleet.simulator.world.tls import FleetTls

QUICK = {"devices": 50, "rounds": 2}
LOST = "lost"
END_WITHIN_S = 180.0
SAMPLE_S = 0.25
DESCRIPTORS_A_DEVICE = 8  # a connection, a selector, a pair to wake it up, the store, its lock and its journal


def task_of(*, devices: int, rounds: int) -> Task:
    """Returns the example task with all devices in each round, and as little data per device as possible."""
    settings = (
        'name="fleet-digits-cnn"',
        f"data.devices={devices}",
        'data.partition="iid"',
        "data.min_samples=2",  # 1,437 digits to train on are 2 for each of 700 devices
        "data.test_fraction=0",
        f"privacy.delta={1 / devices}",
        f"round.rounds={rounds}",
    )
    return load_task(ROOT / "tasks" / "digits-fedglp-adp.toml", settings)


def allow_descriptors(count: int) -> None:
    """Increases the soft limit of open files, which children inherit. Raises `BadInput` above the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and count > hard:
        raise BadInput(f"{count} open files are needed in a process, and the hard limit is {hard}: take more processes")
    if soft != resource.RLIM_INFINITY and soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))


def make_certificates(folder: Path, devices: Sequence[str]) -> FleetTls:
    """Makes a private authority's certificates for the broker at 127.0.0.1, the aggregator and each device, by id."""
    folder.mkdir(parents=True)
    tls, authority = FleetTls(folder), trustme.CA()
    authority.cert_pem.write_to_path(tls.ca_file)
    for name in ("broker", "aggregator", *devices):
        made = authority.issue_cert("127.0.0.1" if name == "broker" else name, common_name=name)
        made.cert_chain_pems[0].write_to_path(tls.cert_file(name))
        made.private_key_pem.write_to_path(tls.key_file(name))
    return tls


class ResourceSample(NamedTuple):
    """The resources that a process has used up to the time `at`, in unix seconds."""

    at: float
    resident_mib: float
    cpu_s: float


def take_samples(usage: defaultdict[str, list[ResourceSample]], fleet: LiveFleet, hosts: Iterable[str]) -> None:
    """Takes a sample of each running process: the broker, the aggregator and the hosts of devices."""
    pids = {name: fleet.pid(name) for name in ("aggregator", *hosts) if fleet.is_running(name)}
    if fleet.broker is not None:
        pids["broker"] = fleet.broker.pid
    for name, pid in pids.items():
        with suppress(psutil.Error):  # it has ended
            process = psutil.Process(pid)
            times, resident = process.cpu_times(), process.memory_info().rss
            usage[name].append(ResourceSample(time.time(), resident / (1 << 20), times.user + times.system))


def run_live(
    simulation: Simulation, *, generators: int, tls: bool = False, lost: int = 0
) -> tuple[float, dict[str, list[ResourceSample]]]:
    """Runs the task to its end; returns the time at which devices were started, and the usage of each process.

    :param lost: how many devices are in a process of their own, which is killed when a round has opened.
    :raises HushfleetError: a process ends that should not.
    """
    names, folder = [device.name for device in simulation.fleet.devices], simulation.folder.path
    allow_descriptors(DESCRIPTORS_A_DEVICE * -(-len(names) // generators) + 100)
    certificates = make_certificates(folder / "certificates", names) if tls else None
    hosts = {f"generator-{number}": names[lost + number :: generators] for number in range(generators)}
    hosts |= {LOST: names[:lost]} if lost else {}
    fleet = LiveFleet(simulation, absent=hosts, tls=certificates, hosts=hosts, tested=False)
    usage: defaultdict[str, list[ResourceSample]] = defaultdict(list)
    with fleet.running():
        while not _has_happened(simulation, "run"):
            fleet.check()  # so that the time until all are present does not include loading PyTorch
            time.sleep(SAMPLE_S)
        began_at = time.time()
        for host in hosts:
            fleet.start_again(host)
        while not fleet.finished:
            if lost and not fleet.expected_down and _has_happened(simulation, "round_open"):
                fleet.expected_down.add(LOST)
                fleet.kill(LOST)
            take_samples(usage, fleet, hosts)
            fleet.check()
            time.sleep(SAMPLE_S)
        fleet.wait(END_WITHIN_S)
        fleet.check()
    return began_at, usage


def _has_happened(simulation: Simulation, kind: str) -> bool:
    return any(event["event"] == kind for event in iterate_events(simulation.folder.events))


def finding(promise: str, found: int, expected: int) -> Figures:
    return {"promise": promise, "kept": found == expected, "found": f"{found:,} of {expected:,}"}


def audit(simulation: Simulation) -> list[Figures]:
    """Reads the stores of the aggregator and all devices; returns each promise, whether it was kept, and the counts."""
    names = [device.name for device in simulation.fleet.devices]
    task, wanted = simulation.prepared.spec.task, simulation.task.round.rounds
    with AggregatorStore(simulation.folder.aggregator) as store:
        closed = [row.round for row in store.rounds() if row.phase == "closed"]
        accepted = [(row.round, update) for row in store.rounds() for update in store.updates(row.round)]
        charged = Counter(charge.device for charge in store.charges())
        refusals = sum((Counter(codes) for codes in store.refusals().values()), Counter())
        declines = len(store.declines())
    digests = {(number, update.device): update.digest for number, update in accepted}
    ledgers, acked, same_bytes = 0, 0, 0
    for name in names:
        with DeviceStore(simulation.folder.device(name).store, device=name, inspect=True) as device:
            ledgers += device.ledger.rounds_charged(task) == charged[name] == wanted
            entries = {number: device.outbox(task, number) for number in closed}
        acked += sum(entry is not None and entry.status == "acked" for entry in entries.values())
        same_bytes += sum(e is not None and e.digest == digests.get((number, name)) for number, e in entries.items())
    codes = Counter(event["code"] for event in iterate_events(simulation.folder.events) if event["event"] == "update")
    updates = wanted * len(names)

    return [
        finding("every round was closed", len(closed), wanted),
        finding("every round has an update of every device", len(digests), updates),
        finding("nobody declined", declines, 0),
        finding("every ledger holds what was charged", ledgers, len(names)),
        finding("every update was acknowledged on its device", acked, updates),
        finding("the bytes are those that the devices committed", same_bytes, updates),
        finding("no update was refused", sum(codes.values()) - codes["accepted"] - codes["duplicate"], 0),
        finding("no message was refused", refusals.total(), 0),
    ]


def compare_with_fast(simulation: Simulation, folder: Path, *, processes: int = 0) -> Figures:
    """Runs the same task and seed by the fast engine, on the devices' own runtime; models must be bit-identical."""
    fast = begin(simulation.task, folder, data_dir=simulation.data_dir)
    train(fast, processes=processes, runtime="onnx")
    models = []
    for each in (simulation, fast):
        with AggregatorStore(each.folder.aggregator) as store:
            models.append([row.result_digest for row in store.rounds()])
    same = sum(one == other for one, other in zip(*models, strict=False))
    promise = "the global models are those of the fast engine, bit by bit"
    return {"promise": promise, "kept": models[0] == models[1] != [], "found": f"{same} of {len(models[1])}"}


def figures_of(simulation: Simulation, began_at: float, usage: Mapping[str, Sequence[ResourceSample]]) -> Figures:
    """Returns the figures of a run that ended well, from the aggregator's events."""
    events = list(iterate_events(simulation.folder.events))
    opened_at, closed_at = (
        {e["round"]: e["at"] for e in reversed(events) if e["event"] == kind} for kind in ("round_open", "round_close")
    )
    ready = {e["device"]: e["at"] for e in reversed(events) if e["event"] == "presence" and e["state"] == "ready"}
    rounds, latencies = [], []
    for number, opened in sorted(opened_at.items()):
        offered = {e["device"]: e["at"] for e in reversed(events) if (e["event"], e.get("round")) == ("offer", number)}
        accepted = [e for e in events if (e["event"], e.get("code"), e.get("round")) == ("update", "accepted", number)]
        latencies += [e["at"] - offered[e["device"]] for e in accepted]
        rounds.append(
            {
                "round": number,
                "trained_s": max(offered.values()) - opened,
                "accepted_s": max(e["at"] for e in accepted) - opened,
                "closed_s": closed_at[number] - opened,
                "updates": len(accepted),
                "payload_bytes": sum(e["bytes"] for e in accepted),
            }
        )
    first, last = opened_at[1], max(closed_at.values())
    updates = len(ready) * len(rounds)
    quantiles = {f"p{q}": float(np.quantile(latencies, q / 100)) for q in (50, 95, 99)}
    return {
        "devices": len(ready),
        "present_s": max(ready.values()) - began_at,
        "wall_s": last - first,
        "updates_per_s": median(each["updates"] / each["closed_s"] for each in rounds),
        "latency_s": quantiles | {"longest": max(latencies)},
        "usage": {name: _used(samples, first, closed_at[1], last, updates) for name, samples in usage.items()},
        "rounds": rounds,
    }


def _used(samples: Sequence[ResourceSample], first: float, after_first: float, last: float, updates: int) -> Figures:
    """:param updates: number of the whole fleet's updates, so that CPU times of several generators can be added."""
    at_first, at_second, at_last = (
        next((sample for sample in samples if sample.at >= moment), samples[-1])
        for moment in (first, after_first, last)
    )
    return {
        "cpu_s": samples[-1].cpu_s,
        "cpu_ms_per_update": 1e3 * (at_last.cpu_s - at_first.cpu_s) / updates,
        "peak_mib": max(sample.resident_mib for sample in samples),
        "after_first_round_mib": at_second.resident_mib,
        "after_last_round_mib": at_last.resident_mib,
    }


def show(figures: Figures) -> None:
    table("Seconds since the round was opened, for the slowest device", figures["rounds"])
    table("Processes", [{"process": name, **usage} for name, usage in sorted(figures["usage"].items())])
    whole = {name: value for name, value in figures.items() if isinstance(value, float | int) and name != "tls"}
    table("The run, and seconds from offer to acceptance", [whole | figures["latency_s"]])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--devices", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="50 devices, 2 rounds")
    parser.add_argument("--generators", type=int, help="processes of devices (default: one a core, 2 or more)")
    parser.add_argument("--tls", action="store_true", help="mutual TLS, a certificate for each device")
    parser.add_argument("--no-fast", action="store_true", help="do not compare with the fast engine")
    parser.add_argument("--out", type=Path, help="keep the run's folders here")
    options = parser.parse_args(arguments)
    if options.quick:
        vars(options).update(QUICK)
    generators = min(options.generators or max(2, cores()), options.devices)

    def measure(folder: Path) -> Figures:
        task = task_of(devices=options.devices, rounds=options.rounds)
        simulation = begin(task, folder / "live", data_dir=None)
        ran = run_live(simulation, generators=generators, tls=options.tls)
        findings = audit(simulation)
        if not options.no_fast:
            findings.append(compare_with_fast(simulation, folder / "fast", processes=generators))
        if not all(finding["kept"] for finding in findings[:2]):
            return {"findings": findings}
        return {
            "generators": generators,
            "tls": options.tls,
            **figures_of(simulation, *ran),
            "findings": findings,
        }

    return judged(options, measure, show)


def judged(options: argparse.Namespace, measure: Callable[[Path], Figures], show: Callable[[Figures], None]) -> int:
    """Shows and writes the figures of a run in a scratch folder; returns 0 if all its `findings` were kept.

    Figures of findings alone are of a run that has no others, because it lost too much.
    """
    with tempfile.TemporaryDirectory(prefix="hushfleet-fleet-") as scratch:
        try:
            figures = measure(getattr(options, "out", None) or Path(scratch))
        except HushfleetError as error:
            console.print(f"error: {error}", style="red")
            return error.exit_code
    table("Promises", figures["findings"])
    if len(figures) > 1:
        show(figures)
        write(options, figures)
    return 0 if all(finding["kept"] for finding in figures["findings"]) else 1


if __name__ == "__main__":
    sys.exit(main())
