"""Hundreds of real devices on one broker and one aggregator, on this machine: is anything lost, and what does it cost?

    python -m benchmarks.fleet [--quick] [--devices 500] [--rounds 5] [--tls] [--kill broker,aggregator] [--plot F.png]

Mosquitto, with the configuration that Hushfleet generates, and `hushfleet aggregator` with its durable store are the
real ones, each a process. The devices are real, too, a thread each in a few processes (`benchmarks/many_devices.py`
says what differs from boards). Each trains on a few handwritten digits. All of them are in each round's cohort, and a
round closes when all were accepted.

Then the files of all sides are read, and every promise is checked, last of all that the fast engine comes to the same
global models, bit by bit. The exit status is 0 only if nothing was lost.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
import trustme

from benchmarks.common import COLOURS, Figures, console, cores, earlier, make_parser, plot, table, words_of, write
from benchmarks.processes import ROOT, environment, memory_mib
from benchmarks.updates import train
from hushfleet.aggregator.broker.child import dies_with_parent
from hushfleet.aggregator.config.task import Task, load_task
from hushfleet.aggregator.observe.events import EventTail, iterate_events
from hushfleet.aggregator.storage.store import AggregatorStore
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.errors import BadInput, HushfleetError
from hushfleet.simulator.engines.live.engine import LiveFleet
from hushfleet.simulator.engines.live.tls import FleetTls
from hushfleet.simulator.run_folder import Simulation, begin

KILL_AT = {"broker": 1 / 3, "aggregator": 2 / 3}  # of the cohort's updates accepted, in round 2
QUICK = {"devices": 50, "rounds": 2}
NOTHING_FOR_S = 180.0
TICK_S = 0.05
SAMPLE_S = 0.25
DESCRIPTORS_A_DEVICE = 8  # a connection, a selector, a pair to wake it, the store, its lock and its journal
PHASES = {"plan_out_s": "plan_at", "model_out_s": "model_at", "trained_s": "offered_at", "acked_s": "acked_at"}


def task_of(*, devices: int, rounds: int) -> Task:
    """The example task with everybody in each round, and as little data as a device can have."""
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
    """Raises the soft limit of open files, which children inherit. Raises `BadInput` above the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and count > hard:
        raise BadInput(f"{count} open files are needed in a process, and the hard limit is {hard}: take more processes")
    if soft != resource.RLIM_INFINITY and soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))


def make_certificates(folder: Path, devices: Sequence[str]) -> FleetTls:
    """Of a private authority: for the broker at 127.0.0.1, the aggregator, and each device, with its id as its name."""
    folder.mkdir(parents=True)
    tls, authority = FleetTls(folder), trustme.CA()
    authority.cert_pem.write_to_path(tls.ca_file)
    for name in ("broker", "aggregator", *devices):
        made = authority.issue_cert("127.0.0.1" if name == "broker" else name, common_name=name)
        made.cert_chain_pems[0].write_to_path(tls.cert_file(name))
        made.private_key_pem.write_to_path(tls.key_file(name))
    return tls


@dataclass
class Usage:
    """Of one part of the run, over all processes that had its name one after the other.

    :param samples: unix seconds, MiB resident, CPU seconds so far.
    """

    cpu_s: float = 0.0
    peak_mib: float = 0.0
    samples: list[tuple[float, float, float]] = field(default_factory=list)

    def at(self, moment: float) -> tuple[float, float, float]:
        return next((sample for sample in self.samples if sample[0] >= moment), self.samples[-1])


class Meter:
    """Samples processes, as often as `SAMPLE_S` allows."""

    def __init__(self) -> None:
        self._cpu: dict[tuple[str, int], float] = {}
        self._next_at = 0.0
        self.usages: dict[str, Usage] = {}

    def look(self, pids: dict[str, int]) -> None:
        """:param pids: name -> process id, at this moment."""
        if time.monotonic() >= self._next_at:
            self._next_at = time.monotonic() + SAMPLE_S
            for name, pid in pids.items():
                with suppress(psutil.Error):  # it has ended
                    self._sample(name, pid)

    def _sample(self, name: str, pid: int) -> None:
        times, resident = psutil.Process(pid).cpu_times(), memory_mib("VmRSS", pid)
        if not resident:
            return
        usage, used = self.usages.setdefault(name, Usage()), times.user + times.system
        usage.cpu_s += used - self._cpu.get((name, pid), 0.0)
        self._cpu[name, pid] = used
        usage.peak_mib = max(usage.peak_mib, memory_mib("VmHWM", pid))
        usage.samples.append((time.time(), resident, usage.cpu_s))


def run_live(simulation: Simulation, options: Any) -> tuple[float, list[Path], dict[str, Usage]]:
    """Runs the task to its end; when devices were started, their notes, and what each process used.

    Raises `HushfleetError` where something ends that should not, or nothing happens.
    """
    names, folder = [device.name for device in simulation.fleet.devices], simulation.folder.path
    allow_descriptors(DESCRIPTORS_A_DEVICE * -(-len(names) // options.generators) + 100)
    tls = make_certificates(folder / "certificates", names) if options.tls else None
    fleet = LiveFleet(simulation, absent=names, tls=tls)
    processes: dict[str, subprocess.Popen[bytes]] = {}
    notes = [folder / f"generator-{number}.jsonl" for number in range(options.generators)]

    def pids() -> dict[str, int]:
        found = {name: process.pid for name, process in processes.items()}
        if fleet.is_running("aggregator"):
            found["aggregator"] = fleet.pid("aggregator")
        if fleet.broker is not None and fleet.broker.is_running:
            found["broker"] = fleet.broker.pid
        return found

    meter = Meter()
    try:
        with fleet.running():
            configs = [simulation.folder.device(name).path / "device.toml" for name in names]
            for name, config in zip(names, configs, strict=True):
                config.write_text(fleet.device_config(name))
            while not any(event["event"] == "run" for event in iterate_events(simulation.folder.events)):
                fleet.check()  # the time until all are present is the devices', not that of loading PyTorch
                time.sleep(TICK_S)
            began_at = time.time()
            for number, path in enumerate(notes):
                command = [sys.executable, "-m", "benchmarks.many_devices", path, *configs[number :: len(notes)]]
                with path.with_suffix(".log").open("ab") as log:
                    processes[f"generator {number}"] = subprocess.Popen(
                        dies_with_parent(list(map(str, command))),
                        env=environment(MALLOC_ARENA_MAX="2"),  # else hundreds of threads have a heap each
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                    )
            for _ in _watched(fleet, list(options.kill), kill_round=min(2, options.rounds)):
                meter.look(pids())
                _check(processes, simulation)
            for process in processes.values():
                process.wait(NOTHING_FOR_S)
            _check(processes, simulation)
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
    return began_at, notes, meter.usages


Processes = dict[str, subprocess.Popen[bytes]]


def _watched(fleet: LiveFleet, kill: list[str], *, kill_round: int) -> Iterator[None]:
    """Until the task has finished, every `TICK_S`; kills on its way."""
    tail, round, accepted, heard_at = EventTail(fleet.simulation.folder.events), 0, 0, time.monotonic()
    while not fleet.finished:
        for event in tail.read():
            heard_at = time.monotonic()
            if event["event"] == "round_open":
                round, accepted = event["round"], 0
            accepted += event["event"] == "update" and event["code"] == "accepted"
        if time.monotonic() - heard_at > NOTHING_FOR_S:
            raise HushfleetError(f"nothing has happened for {NOTHING_FOR_S:g} s: round {round}, {accepted} updates")
        for name in [name for name in kill if round == kill_round and accepted >= KILL_AT[name] * len(fleet.devices)]:
            kill.remove(name)
            fleet.expected_down.add(name)
            fleet.kill(name)
            fleet.start_again(name)
        fleet.check()
        yield
        time.sleep(TICK_S)


def _check(processes: Processes, simulation: Simulation) -> None:
    for name, process in processes.items():
        if process.poll():
            log = (simulation.folder.path / f"{name.replace(' ', '-')}.log").read_text()[-2000:]
            raise HushfleetError(f"{name} ended with status {process.returncode}; the end of its log:\n{log}")


def audit(simulation: Simulation, *, killed: bool) -> list[Figures]:
    """Reads the stores of the aggregator and of all devices: each promise, whether it was kept, and what was found.

    :param killed: something was, so that chunks of forgotten offers may have come and been refused.
    """
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

    def finding(promise: str, found: int, of: int) -> Figures:
        return {"promise": promise, "kept": found == of, "found": f"{found:,} of {of:,}"}

    return [
        finding("every round was closed", len(closed), wanted),
        finding("every round has an update of every device", len(digests), updates),
        finding("nobody declined", declines, 0),
        finding("every ledger holds what was charged", ledgers, len(names)),
        finding("every update was acknowledged on its device", acked, updates),
        finding("the bytes are those that the devices committed", same_bytes, updates),
        finding("no update was refused", sum(codes.values()) - codes["accepted"] - codes["duplicate"], 0),
        finding("no message was refused", 0 if killed else refusals.total(), 0),
    ]


def compare_with_fast(simulation: Simulation, folder: Path, *, processes: int = 0) -> Figures:
    """Runs the same task and seed by the fast engine, on the devices' own runtime; models must be the same bits."""
    fast = begin(simulation.task, folder, data_dir=simulation.data_dir)
    train(fast, processes=processes, runtime="onnx")
    models = []
    for each in (simulation, fast):
        with AggregatorStore(each.folder.aggregator) as store:
            models.append([row.result_digest for row in store.rounds()])
    same = sum(one == other for one, other in zip(*models, strict=False))
    promise = "the global models are those of the fast engine, bit by bit"
    return {"promise": promise, "kept": models[0] == models[1] != [], "found": f"{same} of {len(models[1])}"}


def figures_of(simulation: Simulation, began_at: float, notes: Sequence[Path], usages: dict[str, Usage]) -> Figures:
    """Of a run that ended well."""
    lines = [[json.loads(line) for line in path.read_text().splitlines()] for path in notes]
    events = list(iterate_events(simulation.folder.events))
    opened_at, closed_at = (
        {e["round"]: e["at"] for e in reversed(events) if e["event"] == kind} for kind in ("round_open", "round_close")
    )
    ready = {e["device"]: e["at"] for e in reversed(events) if e["event"] == "presence" and e["state"] == "ready"}
    rounds, latencies = [], []
    for number, opened in sorted(opened_at.items()):
        mine = [line for each in lines for line in each if line.get("round") == number]
        accepted = [e for e in events if e["event"] == "update" and (e["round"], e["code"]) == (number, "accepted")]
        acks = sorted(e["at"] - opened for e in accepted)
        latencies += [line["acked_at"] - line["offered_at"] for line in mine]
        phases = {name: max(line[noted] for line in mine) - opened for name, noted in PHASES.items()}
        rounds.append(
            {
                "round": number,
                **phases,
                "closed_s": closed_at[number] - opened,
                "updates_per_s": (len(acks) - 1) / max(acks[-1] - acks[0], 1e-9),
                "payload_bytes": sum(e["bytes"] for e in accepted),
                "acks_s": [round(ack, 3) for ack in acks],
            }
        )
    devices, first, last = len(ready), opened_at[1], max(closed_at.values())
    usage: Figures = {}
    for name, used in usages.items():
        begun = next((each[0] for number, each in enumerate(lines) if name == f"generator {number}"), None)
        share = begun["devices"] if begun else devices
        usage[name] = {
            "cpu_s": used.cpu_s,
            "cpu_ms_per_update": 1e3 * (used.at(last)[2] - used.at(first)[2]) / share / len(rounds),
            "peak_mib": used.peak_mib,
            "after_first_round_mib": used.at(closed_at[1])[1],
            "after_last_round_mib": used.at(last)[1],
            **({"mib_per_device": (used.peak_mib - begun["imports_mib"]) / share} if begun else {}),
        }
    messages = sum((Counter(each[-1]["messages"]) for each in lines), Counter())
    traffic = sum((Counter(each[-1]["bytes"]) for each in lines), Counter())
    quantiles = {f"p{q}": float(np.quantile(latencies, q / 100)) for q in (50, 95, 99)}
    return {
        "devices": devices,
        "present_s": max(ready.values()) - began_at,
        "wall_s": last - first,
        "updates_per_s": median(len(each["acks_s"]) / each["closed_s"] for each in rounds),
        "messages_per_s": sum(messages.values()) / (last - first),
        "mb_per_s": 1e-6 * sum(traffic.values()) / (last - first),
        "traffic_bytes": traffic,
        "messages": messages,
        "duplicates": sum(e["event"] == "update" and e["code"] == "duplicate" for e in events),
        "latency_s": quantiles | {"longest": max(latencies)},
        "usage": usage,
        "rounds": rounds,
    }


def show(figures: Figures) -> None:
    table("Promises", figures["findings"])
    rounds = [{name: value for name, value in each.items() if name != "acks_s"} for each in figures["rounds"]]
    table("Seconds since the round was opened, for the slowest device", rounds)
    table("Processes", [{"process": name, **usage} for name, usage in sorted(figures["usage"].items())])
    traffic, packets = figures["traffic_bytes"], figures["messages"]
    kinds = [{"kind": kind, "packets": count, "bytes": traffic[kind]} for kind, count in packets.items()]
    table("MQTT packets at the devices", kinds)
    whole = {name: value for name, value in figures.items() if isinstance(value, float | int) and name != "tls"}
    table("The run, and seconds from offer to ack", [whole | figures["latency_s"]])


def draw(figure: Any, figures: Figures) -> None:
    left, right = figure.subplots(1, 2)
    for each in figures["rounds"]:
        acks = each["acks_s"]
        left.step(acks, np.arange(1, len(acks) + 1), where="post", label=f"round {each['round']}")
    left.set(xlabel="seconds since the round was opened", ylabel="updates accepted", ylim=(0, None), xlim=(0, None))
    left.legend(frameon=False)
    latency = figures["latency_s"]
    right.barh(list(latency), list(latency.values()), color=COLOURS["third"])
    right.set(xlabel="seconds from offer to ack")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--devices", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="50 devices, 2 rounds")
    parser.add_argument("--generators", type=int, help="processes of devices (default: one a core, 2 or more)")
    parser.add_argument("--kill", type=words_of(KILL_AT), default=(), help="kill -9 these in the middle of a round")
    parser.add_argument("--tls", action="store_true", help="mutual TLS, a certificate for each device")
    parser.add_argument("--no-fast", action="store_true", help="do not compare with the fast engine")
    parser.add_argument("--out", type=Path, help="keep the run's folders here")
    options = parser.parse_args(arguments)
    if options.quick:
        vars(options).update(QUICK)
    options.generators = min(options.generators or max(2, cores()), options.devices)
    figures = earlier(options)
    if figures is None:
        with tempfile.TemporaryDirectory(prefix="hushfleet-fleet-") as scratch:
            folder = options.out or Path(scratch)
            try:
                task = task_of(devices=options.devices, rounds=options.rounds)
                simulation = begin(task, folder / "live", data_dir=None)
                ran = run_live(simulation, options)
                findings = audit(simulation, killed=bool(options.kill))
                if not options.no_fast:
                    findings.append(compare_with_fast(simulation, folder / "fast", processes=options.generators))
                if not all(finding["kept"] for finding in findings[:2]):
                    table("Promises", findings)
                    return 1
                how = {name: getattr(options, name) for name in ("generators", "tls", "kill")}
                figures = {**how, **figures_of(simulation, *ran), "findings": findings}
            except HushfleetError as error:
                console.print(f"error: {error}", style="red")
                return error.exit_code
    show(figures)
    write(options, figures)
    plot(options, figures, f"{figures['devices']} devices on one broker", lambda figure: draw(figure, figures))
    return 0 if all(finding["kept"] for finding in figures["findings"]) else 1


if __name__ == "__main__":
    sys.exit(main())
