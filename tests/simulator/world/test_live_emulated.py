"""Live fleets of emulated boards: the same models as ever, and devices that are slow, cut off, starved or stopped."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from hushfleet.edge_client.board.config import load_config
from hushfleet.errors import BadInput
from hushfleet.simulator.boards import FleetMix
from hushfleet.simulator.run_folder import Simulation, begin
from hushfleet.simulator.world.emulation import emulation_of, machine_speed
from hushfleet.simulator.world.link_model import LinkConditions
from hushfleet.simulator.world.live import LiveFleet
from hushfleet.simulator.world.memory_limit import address_space_bytes, client_memory

pytestmark = pytest.mark.slow

BOARDS = ("raspberry-pi-zero-2-w", "jetson-orin-nano", "raspberry-pi-4-2gb")


def simulation_of(short_task: Any, folder: Path, *, devices: int, **round: Any) -> Simulation:
    task = short_task(data={"devices": devices, "limit": 240}, round={"rounds": 2, **round})
    return begin(task, folder, data_dir=None, mix=FleetMix.in_turn(BOARDS, devices))


def test_emulated_boards_end_in_the_model_of_fast(
    short_task: Any, runs: Any, audit: Any, finish: Any, wait: Any, tmp_path: Path
) -> None:
    calm = runs.fast(simulation_of(short_task, tmp_path / "fast", devices=4, min_updates=4))
    live = simulation_of(short_task, tmp_path / "live", devices=4, min_updates=4)
    bad = LinkConditions(up_mbit_s=4, down_mbit_s=4, latency_ms=5, jitter_ms=10, stall_every_s=0.5, stall_s=0.1)
    fleet = LiveFleet(live, emulate=True, links={"device-3": bad})
    names = [device.name for device in fleet.devices]
    boards = {device.name: device.board for device in fleet.devices}
    assert set(boards.values()) == set(BOARDS)
    shown = "\n".join(fleet.describe())

    def logs() -> str:
        return audit.logs(live)

    with fleet.running():
        assert fleet.network is not None
        for name in names:
            wanted = emulation_of(fleet.boards[name], machine_speed=machine_speed())
            config = load_config(live.folder.device(name).path / "device.toml")
            assert config.simulation is not None
            assert config.simulation.slowdown == wanted.slowdown > 1
            assert config.simulation.write_mb_s == wanted.write_mb_s
            assert config.broker.url != fleet.broker.url
            assert config.limits.memory_mib == 0
            if sys.platform == "linux":
                limit = address_space_bytes(wanted.memory_mib, client_memory())
                wait(lambda name=name, limit=limit: address_space_of(fleet.pid(name)) == limit, "the limit is set")
            assert fleet.network.conditions(name) == (bad if name == "device-3" else wanted.link)
        wait(lambda: (fleet.check(), audit.events(live, "round_open"))[1], "a round opened", logs=logs)
        fleet.network.reset("device-3")
        finish(fleet)
        traffic = {name: fleet.network.traffic(name) for name in names}
    assert audit.models(live) == audit.models(calm), "to the last bit"
    audit.check(live)
    model_bytes = 4 * live.prepared.spec.model.layout.size
    for name in names:
        assert traffic[name].down_bytes > model_bytes + 2000, "a model and a difference"
        assert traffic[name].up_bytes > 2000
        log = live.folder.device(name).log.read_text()
        stretched = emulation_of(fleet.boards[name], machine_speed=machine_speed()).slowdown
        assert f"stretched {stretched:.2f} times" in log
        assert boards[name] in shown
    assert "no connection: " in live.folder.device("device-3").log.read_text()


def address_space_of(pid: int) -> int | None:
    found = re.search(r"^Max address space +(\d+) ", Path(f"/proc/{pid}/limits").read_text(), re.MULTILINE)
    return int(found[1]) if found else None


def test_devices_that_are_starved_absent_cut_off_and_stopped(
    short_task: Any, audit: Any, finish: Any, wait: Any, tmp_path: Path
) -> None:
    live = simulation_of(short_task, tmp_path / "run", devices=4, min_devices=3, min_updates=2, quorum=1.0)
    starved, late, stopped, other = (device.name for device in live.fleet.devices)
    fleet = LiveFleet(live, proxied=True, absent=[late, stopped], memory_mib={starved: 40}, write_mb_s={other: 0.5})

    def logs() -> str:
        return audit.logs(live)

    def accepted(device: str) -> list[Any]:
        return [event for event in audit.events(live, "update") if event["device"] == device]

    def present() -> set[str]:
        return {event["device"] for event in audit.events(live, "presence")}

    with fleet.running():
        assert fleet.expected_down == {late, stopped}
        wait(lambda: {starved, other} <= present(), "two devices are there", logs=logs)
        assert not fleet.is_running(late)
        assert audit.events(live, "round_open") == [], "a third is waited for"
        fleet.cut(other)
        fleet.start_again(stopped)
        before = fleet.network.traffic(other)
        wait(lambda: (fleet.check(), audit.events(live, "decline"))[1], "the starved device declined", logs=logs)
        wait(lambda: accepted(stopped), "the others trained", logs=logs)
        assert fleet.network.traffic(other).down_bytes - before.down_bytes <= 1 << 16, "one piece was on its way"
        assert fleet.is_running(other)
        assert not accepted(other)
        fleet.stop(stopped)
        wait(lambda: not fleet.is_running(stopped), "it stopped", logs=logs)
        fleet.check()
        assert not fleet.is_running(late)
        assert not fleet.is_running(stopped)
        fleet.mend(other)
        wait(lambda: accepted(other), "the mended device goes on", logs=logs)
        for name in (stopped, late):
            fleet.start_again(name)
        assert fleet.expected_down == set()
        finish(fleet)
    for decline in audit.events(live, "decline"):
        assert (decline["device"], decline["code"]) == (starved, "memory")
        assert "this device gives 40 MiB" in decline["reason"]
    assert len(audit.events(live, "round_close")) == 2
    assert {event["device"] for event in audit.events(live, "update")} >= {stopped, other}
    assert starved not in {event["device"] for event in audit.events(live, "update")}
    config = load_config(live.folder.device(other).path / "device.toml")
    assert config.simulation is not None
    assert (config.simulation.write_mb_s, config.simulation.slowdown) == (0.5, 1.0)


def test_a_starved_device_that_cannot_live_is_given_up_and_the_fleet_goes_on(
    short_task: Any, audit: Any, wait: Any, tmp_path: Path
) -> None:
    live = simulation_of(short_task, tmp_path / "run", devices=4, min_updates=1)
    fleet = LiveFleet(live, client=(sys.executable, "-c", "raise MemoryError"), restarts=1, memory_mib={"device-2": 40})
    with fleet.running():
        for name in ("device-0", "device-1", "device-3"):
            fleet.expected_down.add(name)
        wait(lambda: (fleet.check(), "device-2" in fleet.expected_down)[1], "it was given up")
        assert not fleet.is_running("device-2")
    assert live.folder.device("device-2").log.read_text().count("MemoryError") == 2


def test_without_a_network_nothing_can_be_cut(short_task: Any, tmp_path: Path) -> None:
    fleet = LiveFleet(simulation_of(short_task, tmp_path / "run", devices=2, min_updates=1))
    for act in (fleet.cut, fleet.mend):
        with pytest.raises(BadInput, match="no network that can be cut"):
            act("device-0")
    assert fleet.describe() == []
