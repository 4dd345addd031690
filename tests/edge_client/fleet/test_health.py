"""What a board says of itself, when, and what it leaves out."""

from __future__ import annotations

import datetime
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from hushfleet.edge_client.board.config import DeviceConfig, FleetSection
from hushfleet.edge_client.fleet.health import EVERY_S, BoardHealth
from hushfleet.wire.format.health import Health
from hushfleet.wire.format.messages import decode_message
from hushfleet.wire.link.interface import Delivery
from support.edge import DEVICE, Bench

MakeBench = Callable[..., Bench]


@pytest.fixture
def in_fleet(config: DeviceConfig, tmp_path: Path) -> DeviceConfig:
    (tmp_path / "state").mkdir()
    return replace(config, fleet=FleetSection("cd" * 32, "mqtts://localhost"))


def a_raspberry_pi(root: Path) -> None:
    for name, text in {
        "proc/meminfo": "MemTotal:  4000000 kB\nMemFree:  100000 kB\nMemAvailable:  1580000 kB\n",
        "sys/class/thermal/thermal_zone0/type": "cpu-thermal\n",
        "sys/class/thermal/thermal_zone0/temp": "57450\n",
        "sys/class/thermal/thermal_zone1/type": "gpu-thermal\n",
        "sys/class/thermal/thermal_zone1/temp": "31000\n",
        "sys/devices/platform/soc/soc:firmware/get_throttled": "50005\n",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_it_is_read_in_coarse_steps(in_fleet: DeviceConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a_raspberry_pi(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(used=87.0, free=13.0))
    health = BoardHealth(in_fleet, now=100.0, root=tmp_path)
    told = health.message(100.0, session=3, hides_duration=False)
    assert (told.device, told.session, told.uptime_s, told.slot, told.certificate_end) == (DEVICE, 3, 0, "none", 0)
    assert (told.memory_percent, told.disk_percent, told.temperature_c, told.throttled) == (60, 80, 55, True)
    (tmp_path / "sys/devices/platform/soc/soc:firmware/get_throttled").write_text("50000\n")
    assert health.message(160.0, session=3, hides_duration=False).throttled is False, (
        "it was slowed down, and is no more"
    )
    silent = health.message(220.0, session=3, hides_duration=True)
    assert [silent.memory_percent, silent.disk_percent, silent.temperature_c, silent.throttled] == [None] * 4


def test_zones_of_a_jetson_that_are_no_sensors_are_left_out(in_fleet: DeviceConfig, tmp_path: Path) -> None:
    a_raspberry_pi(tmp_path)
    nano, orin = (tmp_path / f"sys/class/thermal/thermal_zone{number}" for number in (2, 3))
    nano.mkdir()
    (nano / "type").write_text("PMIC-Die\n")
    (nano / "temp").write_text("100000\n")
    (orin / "temp").mkdir(parents=True)  # an error when it is read, as of a part that is not there
    told = BoardHealth(in_fleet, now=0.0, root=tmp_path).message(0.0, session=1, hides_duration=False)
    assert told.temperature_c == 55


@pytest.mark.parametrize(("zone", "told"), [("-273200", 55), ("2147483647", 55), ("204000", 55), ("199000", 200)])
def test_a_temperature_that_no_processor_has_is_no_sensors(
    in_fleet: DeviceConfig, tmp_path: Path, zone: str, told: int
) -> None:
    """ACPI tells -273.2 degrees of a zone that it has not set up. The message has no such value: the client ended."""
    a_raspberry_pi(tmp_path)
    (tmp_path / "sys/class/thermal/thermal_zone1/temp").write_text(zone)
    health = BoardHealth(in_fleet, now=0.0, root=tmp_path)
    assert health.message(0.0, session=1, hides_duration=False).temperature_c == told
    shutil.rmtree(tmp_path / "sys/class/thermal/thermal_zone0")
    expected = told if zone == "199000" else None
    assert health.message(60.0, session=1, hides_duration=False).temperature_c == expected


def test_what_is_not_there_is_not_known(in_fleet: DeviceConfig, tmp_path: Path) -> None:
    for file, text in (("proc/meminfo", "nothing"), ("sys/class/thermal/thermal_zone0/temp", "hot")):
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).write_text(text)
    told = BoardHealth(in_fleet, now=0.0, root=tmp_path).message(0.0, session=1, hides_duration=False)
    assert (told.memory_percent, told.temperature_c, told.throttled) == (None, None, None)


def test_the_moments_are_fixed_at_the_start(in_fleet: DeviceConfig) -> None:
    health = BoardHealth(in_fleet, now=7.0)
    due = []
    for now in (7.0, 67.5, 130.0, 1000.0):
        assert now >= health.due_at
        health.message(now, session=1, hides_duration=True)
        due.append(health.due_at)
    assert due == [7.0 + EVERY_S * n for n in (1, 2, 3, 17)]


def test_the_end_of_its_certificate(in_fleet: DeviceConfig, tmp_path: Path) -> None:
    from support.certificates import a_certificate

    end = datetime.datetime(2031, 5, 1, tzinfo=datetime.UTC)
    (tmp_path / "state" / "tls.pem").write_bytes(a_certificate(DEVICE, end=end))
    told = BoardHealth(in_fleet, now=0.0).message(0.0, session=1, hides_duration=True)
    assert told.certificate_end == end.timestamp()


def test_it_is_retained_signed_and_once_a_minute(make_bench: MakeBench, in_fleet: DeviceConfig) -> None:
    bench = make_bench(config=in_fleet)
    spy = bench.hub.link("spy")
    spy.subscribe(bench.server.topics.health(DEVICE))
    spy.open()
    told: list[Health] = []

    def listen() -> None:
        while (event := spy.receive(0.0)) is not None:
            if isinstance(event, Delivery):
                key = bench.store.identity.public_key
                message = decode_message(event.payload, federation="test", public_key=key)
                assert isinstance(message, Health)
                told.append(message)

    bench.steps()
    listen()
    assert [(health.uptime_s, health.disk_percent) for health in told] == [(0, None)], "no task is known yet"
    bench.train(1)
    bench.clock.now += EVERY_S
    bench.steps()
    listen()
    assert [health.uptime_s for health in told] == [0, 60]
    assert told[1].disk_percent is not None, "the unit is the device, and how long it works no secret"
    assert told[1].last_decline is None
    late = bench.hub.link("late")
    late.subscribe(bench.server.topics.health(DEVICE))
    late.open()
    assert any(isinstance(event, Delivery) for event in iter(lambda: late.receive(0.0), None)), "it is retained"


def test_the_last_decline_is_told_by_its_code_alone(make_bench: MakeBench, in_fleet: DeviceConfig) -> None:
    poor = replace(in_fleet, limits=replace(in_fleet.limits, epsilon_server=0.01))
    bench = make_bench(config=poor)
    bench.server.open_round(1)
    bench.until(lambda: bool(bench.server.declines))
    assert bench.agent.health is not None
    assert bench.agent.health.last_decline == bench.server.declines[0].code == "budget"


def test_a_board_without_a_fleet_says_nothing(make_bench: MakeBench) -> None:
    assert make_bench().agent.health is None
