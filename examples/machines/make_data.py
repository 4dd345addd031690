"""Makes synthetic pumps: vibration, load and temperature of rotating machines, per minute, with faults in the test.

These are no measurements. Each minute a board records one second of acceleration at 2048 Hz and stores ten numbers: the
level in six octave bands and the peak (dB), the shaft's speed (Hz), the motor's current (A) and the bearing's
temperature (degrees C). A window is four minutes. The acceleration is the sum of

- imbalance: a sine at the shaft's speed n, whose force grows with n squared;
- misalignment: sines at 2n and 3n that grow with the load; and the impeller's seven blades, at 7n;
- flow noise, which is white and grows with the load, and the noise of the sensor;

times the gain of the mounting, which differs between machines by 1 dB. The temperature follows the ambient temperature
and the square of the load with a time constant of 20 minutes. Machines differ in speed, residual imbalance,
misalignment, ambient temperature, and the load in their first week: a board trains on a week with loads around one
value, and is tested on weeks with any load. Faults occur only in test windows, one per such window, with a severity
from 0.3 to 1:

- bearing: an impulse each time that a ball passes a defect of the outer race, 3.58 n with 1 % of jitter, which excites
  the housing at its resonance of 500 to 800 Hz (McFadden and Smith, Journal of Sound and Vibration 96, 1984);
- imbalance: 2.6 to 4 times the residual imbalance, as after the loss of a blade tip;
- lubrication: the bearing is 5 to 10 degrees warmer, and its noise above 256 Hz is 3 to 5 dB higher.

    python make_data.py        # writes machines.npz beside this file
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

RATE, STEPS = 2048, 4  # samples of a second; minutes of a window
BANDS = (4, 32, 64, 128, 256, 512, 1024)  # Hz, edges
CHANNELS = (*(f"db_{low}_{high}" for low, high in pairwise(BANDS)), "db_peak", "hz", "ampere", "celsius")
FAULTS = ("bearing", "imbalance", "lubrication")
LAG = 20.0  # minutes
MACHINES, TRAIN, NORMAL, OF_EACH_FAULT = 60, 20, 12, 4  # windows of each machine


class Machine(NamedTuple):
    """The properties of a machine that do not change between weeks."""

    speed: float
    imbalance: float
    misalignment: float
    gain: float
    resonance: float
    usual_load: float
    ambient: float

    @classmethod
    def drawn(cls, rng: np.random.Generator) -> Machine:
        return cls(
            speed=rng.uniform(22, 26),
            imbalance=rng.lognormal(0, 0.25),
            misalignment=rng.lognormal(0, 0.25),
            gain=10 ** (rng.normal(0, 1) / 20),
            resonance=rng.uniform(500, 800),
            usual_load=rng.uniform(0.3, 1.0),
            ambient=rng.uniform(22, 28),
        )


def windows(machine: Machine, count: int, rng: np.random.Generator, *, any_load: bool, fault: str = "") -> np.ndarray:
    """Returns float32 `[count, channels, STEPS]`.

    :param any_load: whether loads vary, as in later weeks; otherwise they are around the usual load.
    """
    shape, time = (count, STEPS), np.arange(RATE) / RATE
    wanted = rng.uniform(0.25, 1.05, count) if any_load else rng.normal(machine.usual_load, 0.05, count)
    before = wanted + 0.1 * rng.standard_normal(count)  # the load before the window
    load = np.clip(wanted[:, None] + 0.03 * rng.standard_normal(shape), 0.2, 1.1)
    warmed = 1 - np.exp(-np.arange(STEPS) / LAG)
    heat = before[:, None] ** 2 + (wanted**2 - before**2)[:, None] * warmed
    ambient = machine.ambient + rng.normal(0, 1.5, count)[:, None]
    celsius = ambient + 30 * heat + 0.2 * rng.standard_normal(shape)
    ampere = 4 + 11 * load + 0.15 * rng.standard_normal(shape)
    hz = machine.speed * (1 + 0.15 * load) * (1 + 0.002 * rng.standard_normal(shape))
    turn, severity = hz[..., None] * time, rng.uniform(0.3, 1.0, (count, 1))

    def tone(order: float, amplitude: np.ndarray) -> np.ndarray:
        sine: np.ndarray = amplitude[..., None] * np.sin(2 * np.pi * (order * turn + rng.random((*shape, 1))))
        return sine

    lost = 2 + 2 * severity if fault == "imbalance" else 1.0
    signal = tone(1, 0.5 * machine.imbalance * lost * (hz / 25) ** 2)
    signal += tone(2, 0.4 * machine.misalignment * load) + tone(3, 0.2 * machine.misalignment * load)
    signal += tone(7, 0.5 * load)
    flow = np.fft.rfft(rng.standard_normal((*shape, RATE))) * (0.05 + 0.25 * load[..., None])
    if fault == "lubrication":
        celsius += 3 + 7 * severity
        flow[..., 256:] *= 10 ** ((2 + 3 * severity[..., None]) / 20)  # one line of the spectrum is 1 Hz
    signal += np.fft.irfft(flow)
    if fault == "bearing":
        passed = 3.58 * turn * (1 + 0.01 * rng.standard_normal((*shape, 1)))
        hits = np.diff(np.floor(passed), axis=-1, prepend=0) > 0
        ring = np.exp(-400 * time) * np.sin(2 * np.pi * machine.resonance * time)
        force = 1.5 * severity[..., None] * (0.5 + load[..., None])
        signal += np.fft.irfft(np.fft.rfft(hits * force) * np.fft.rfft(ring), RATE)
    signal = machine.gain * signal + 0.02 * rng.standard_normal((*shape, RATE))

    power = np.abs(np.fft.rfft(signal) / RATE) ** 2
    levels = [10 * np.log10(power[..., low:high].sum(-1)) for low, high in pairwise(BANDS)]
    peak = 20 * np.log10(np.abs(signal).max(-1))
    return np.stack([*levels, peak, hz, ampere, celsius], axis=1).astype(np.float32)


def make(path: Path, *, machines: int = MACHINES, train: int = TRAIN, seed: int = 0) -> None:
    """:param train: windows of a machine's first week, without labels."""
    rng = np.random.default_rng(seed)
    trains, tests = [], []
    for machine in [Machine.drawn(rng) for _ in range(machines)]:
        trains.append(windows(machine, train, rng, any_load=False))
        faults = [windows(machine, OF_EACH_FAULT, rng, any_load=True, fault=fault) for fault in FAULTS]
        tests.append(np.concatenate([windows(machine, NORMAL, rng, any_load=True), *faults]))
    names = np.array([f"machine-{number:03d}" for number in range(machines)])
    is_fault = np.repeat([0, 1], [NORMAL, OF_EACH_FAULT * len(FAULTS)])
    np.savez(
        path,
        train_x=np.concatenate(trains),
        train_device=np.repeat(names, train),
        test_x=np.concatenate(tests),
        test_y=np.tile(is_fault, machines),
        test_device=np.repeat(names, len(is_fault)),
    )


if __name__ == "__main__":
    make(Path(__file__).with_name("machines.npz"))
