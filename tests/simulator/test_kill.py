"""Client, aggregator and broker killed with SIGKILL at seeded moments of live runs of 8 devices.

Each run must end in the calm run's model, bit by bit, with every update counted once, every round noised and
charged once, and nothing sent that was not charged. Moments are chosen over the whole life of a run: by time, by
what the aggregator has written, and right after a device has committed an update that it has not sent yet.

With seeded noise a second noising would give the same bytes, so in some runs the devices draw theirs as in the
field: such a run has no model to compare, but two noisings of one round would be two payloads.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from aggregator.events import EventTail
from hushfleet.errors import HushfleetError
from simulator.live import LiveFleet
from simulator.run_folder import Simulation

pytestmark = pytest.mark.slow

RUNS = 20
FIELD_RUNS = 4
NAMES = [f"device-{number}" for number in range(8)]
LONGEST_S = 6.0  # about the life of a calm run on a quiet machine


@dataclass(frozen=True)
class Strike:
    """Kill `victims`, `delay_s` after `moment`, and start them again `away_s` later."""

    moment: tuple[str, int, str]
    delay_s: float
    victims: tuple[str, ...]
    away_s: float


def strikes_of(seed: int) -> list[Strike]:
    """One to three; the first one comes early enough to happen in any run, and its victim goes round by the seed."""
    rng = random.Random(f"kill {seed}")
    strikes = []
    if seed >= RUNS:
        # What tempts a device to noise again: its update has left, nobody could acknowledge it, and it dies.
        device, *others = rng.sample(NAMES, 3)
        strikes.append(Strike(("training", 1, device), 0.0, ("broker", "aggregator"), 1.0))
        strikes.append(Strike(("committed", 1, device), 1.0, (device, *others), 0.0))
    for number in range(rng.randint(1, 3)):
        device = rng.choice(NAMES)
        moment = rng.choice(
            [
                ("update", rng.randint(1, 22), ""),
                ("update", rng.choice([7, 8, 15, 16]), ""),  # around the close of a round
                ("round_open", rng.randint(1, 3), ""),
                ("round_close", rng.randint(1, 2), ""),
                ("training", rng.randint(1, 2), device),
                ("committed", rng.randint(1, 2), device),
                ("seconds", 0, ""),
            ]
        )
        kinds = ["device", "aggregator", "broker"]
        chosen = {kinds[seed % 3]} if number == 0 else set()
        chosen |= {kind for kind in kinds if rng.random() < 0.3} or {rng.choice(kinds)}
        victims = tuple(kind for kind in kinds[1:] if kind in chosen)
        if "device" in chosen:
            others = [name for name in NAMES if name != device]
            victims += (device, *rng.sample(others, rng.choice([0, 0, 1, 3])))
        delay = rng.uniform(0.0, LONGEST_S) if moment[0] == "seconds" else rng.choice([0.0, rng.uniform(0.0, 0.2)])
        strikes.append(Strike(moment, delay, victims, rng.choice([0.0, rng.uniform(0.0, 1.5)])))
    return strikes


class Progress:
    """What has happened in a run, read from its files."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._events = EventTail(simulation.folder.events)
        self._seen: dict[tuple[str, str], int] = {}
        self._began = time.monotonic()

    def reached(self, strike: Strike) -> bool:
        kind, count, device = strike.moment
        for event in self._events.read():
            name = event["event"]
            about = ""
            if name == "presence" and event["state"] == "training":
                name, about = "training", event["device"]
            self._seen[name, about] = self._seen.get((name, about), 0) + 1
        if kind == "seconds":
            return True
        if kind == "committed":
            log = self._simulation.folder.device(device).log
            return log.exists() and log.read_bytes().count(b": trained and committed") >= count
        return self._seen.get((kind, device), 0) >= count


class Storm:
    """Carries out the strikes while the fleet works."""

    def __init__(self, fleet: LiveFleet, tap: Any, wait: Callable[..., Any], logs: Callable[[], str]) -> None:
        self._fleet, self._tap, self._wait, self._logs = fleet, tap, wait, logs
        self._progress = Progress(fleet.simulation)
        self.killed: list[str] = []

    def carry_out(self, strikes: list[Strike]) -> None:
        for strike in strikes:
            self._wait(lambda strike=strike: self._is_due(strike), f"{strike.moment} came", logs=self._logs)
            time.sleep(strike.delay_s)
            # What has ended well already stays as it is.
            victims = [name for name in strike.victims if self._fleet.is_running(name)]
            for name in victims:
                self._fleet.kill(name)
            time.sleep(strike.away_s)
            for name in victims:
                self._fleet.start_again(name)
                if name == "broker":
                    self._tap.attach(self._fleet.broker.url)
            self.killed += victims

    def _is_due(self, strike: Strike) -> bool:
        self._fleet.check()
        return self._fleet.finished or self._progress.reached(strike)


class FieldFleet(LiveFleet):
    """Its devices have no seed: their noise comes from the operating system, as in the field."""

    def device_config(self, name: str) -> str:
        text, _, simulation = super().device_config(name).partition("\n[simulation]\n")
        assert "seed" in simulation
        return text


def storm(fleet: LiveFleet, seed: int, tap: Any, wait: Any, audit: Any) -> None:
    strikes = strikes_of(seed)
    with fleet.running():
        assert fleet.broker is not None
        tap.attach(fleet.broker.url)

        def logs() -> str:
            return f"{strikes}\n{audit.logs(fleet.simulation)}"

        def done() -> bool:
            fleet.check()
            return fleet.finished

        weather = Storm(fleet, tap, wait, logs)
        try:
            weather.carry_out(strikes)
            wait(done, "the run finished", logs=logs)
        except HushfleetError as error:
            pytest.fail(f"{error}\n{logs()}")
        assert weather.killed, strikes
        if not isinstance(fleet, FieldFleet):
            fleet.wait()


@pytest.mark.parametrize("seed", range(RUNS))
def test_a_killed_run_ends_in_the_calm_runs_model(
    seed: int, runs: Any, calm: Simulation, audit: Any, tap: Any, wait: Any, tmp_path: Path
) -> None:
    simulation = runs.copy(tmp_path / "run")
    # amqtt in some runs, Mosquitto in the others
    fleet = LiveFleet(simulation, broker_kind="amqtt" if seed % 5 == 4 else "mosquitto")
    storm(fleet, seed, tap, wait, audit)
    assert audit.models(simulation) == audit.models(calm), strikes_of(seed)
    audit.check(simulation)
    audit.check_tap(simulation, tap)
    for name in NAMES:
        lines = simulation.folder.device(name).metrics.read_text().splitlines()
        rounds = [line.split('"round": ')[1].split(",")[0] for line in lines]
        assert len(rounds) == len(set(rounds)), f"{name} trained and committed a round twice"


@pytest.mark.parametrize("seed", range(RUNS, RUNS + FIELD_RUNS))
def test_no_round_is_noised_twice(
    seed: int, runs: Any, calm: Simulation, audit: Any, tap: Any, wait: Any, tmp_path: Path
) -> None:
    simulation = runs.copy(tmp_path / "run")
    storm(FieldFleet(simulation, broker_kind="mosquitto"), seed, tap, wait, audit)
    audit.check(simulation)
    audit.check_tap(simulation, tap)
    assert audit.models(simulation) != audit.models(calm), "the noise was drawn, not seeded"


def test_every_part_is_killed_at_all_kinds_of_moments() -> None:
    planned = [name for seed in range(RUNS + FIELD_RUNS) for strike in strikes_of(seed) for name in strike.victims]
    assert planned.count("aggregator") >= 8
    assert planned.count("broker") >= 8
    assert len({name for name in planned if name.startswith("device")}) >= 6
    kinds = {strike.moment[0] for seed in range(RUNS) for strike in strikes_of(seed)}
    assert kinds == {"update", "round_open", "round_close", "training", "committed", "seconds"}
