"""Makes the sound of synthetic motors: a WAV file of one second for each clip, with faults in the test.

These are no recordings. The air near a motor of `make_data.py` carries, at 8 kHz, the sum of

- twelve harmonics of the shaft's speed: imbalance in the first, misalignment, which grows with the load, in the others;
- the fan's seven blades, at 7 and 14 times the speed, and a gear at 23 times, all in proportion to the load;
- flow noise, which is white and grows with the load;
- the noise of the room, whose level and colour differ between rooms, and whose level differs by 3 dB between clips.

Motors differ in pitch, residual imbalance, misalignment, distance, room, and the load in their first week. Faults, each
with a severity from 0.3 to 1:

- bearing: 3.58 clicks each turn, with 1 % of jitter, which excite the housing at its resonance, 1.5 to 2.4 kHz;
- harmonic: both harmonics of the blades are 2.6 to 4 times as strong;
- lubrication: the noise above 1 kHz is 3 to 5 dB higher.

    python make_sound.py       # writes sound/{train,test}/machine-NNN/{normal,fault}/*.wav beside this file
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from make_data import MACHINES, NORMAL, OF_EACH_FAULT, TRAIN, Machine

from hushfleet.data.sound import wav_of

RATE = 8000
FAULTS = ("bearing", "harmonic", "lubrication")
LOUDNESS = 0.08 * 32768
HERTZ = np.fft.rfftfreq(RATE, 1 / RATE)


def room(rng: np.random.Generator) -> np.ndarray:
    """Returns the spectrum of a room's noise."""
    level, colour = 4 * 10 ** (rng.uniform(-30, -18) / 20), rng.uniform(0, 1)
    return np.asarray(level / (1 + HERTZ / 100) ** colour)


def noise(count: int, rng: np.random.Generator) -> np.ndarray:
    """Returns spectra of white noise, complex `[count, frequency]`."""
    return np.asarray(np.fft.rfft(rng.standard_normal((count, RATE))))


def sounds(
    machine: Machine, around: np.ndarray, count: int, rng: np.random.Generator, *, any_load: bool, fault: str = ""
) -> np.ndarray:
    """Returns int16 `[count, RATE]`.

    :param around: of the room.
    :param any_load: as in `make_data.windows`.
    """
    wanted = rng.uniform(0.25, 1.05, count) if any_load else rng.normal(machine.usual_load, 0.05, count)
    load, severity = np.clip(wanted, 0.2, 1.1)[:, None], rng.uniform(0.3, 1.0, (count, 1))
    hz = machine.speed * (1 + 0.15 * load) * (1 + 0.002 * rng.standard_normal((count, 1)))
    turn = hz * np.arange(RATE) / RATE

    def tone(order: int, amplitude: np.ndarray) -> np.ndarray:
        return np.asarray(amplitude * np.sin(2 * np.pi * (order * turn + rng.random((count, 1)))))

    blades = load * (2 + 2 * severity if fault == "harmonic" else 1.0)
    signal = tone(1, 0.5 * machine.imbalance * (hz / 25) ** 2)
    for order in range(2, 13):
        signal += tone(order, 0.4 * machine.misalignment * load / order)
    signal += tone(7, 0.3 * blades) + tone(14, 0.15 * blades) + tone(23, 0.1 * load)
    flow = noise(count, rng) * (0.05 + 0.25 * load)
    if fault == "lubrication":
        flow[:, HERTZ > 1000] *= 10 ** ((2 + 3 * severity) / 20)
    if fault == "bearing":
        passed = 3.58 * turn * (1 + 0.01 * rng.standard_normal((count, 1)))
        hits = np.diff(np.floor(passed), axis=-1, prepend=0) > 0
        time = np.arange(RATE) / RATE
        ring = np.exp(-400 * time) * np.sin(2 * np.pi * 3 * machine.resonance * time)
        flow += np.fft.rfft(hits * 1.5 * severity * (0.5 + load)) * np.fft.rfft(ring)
    others = noise(count, rng) * around * 10 ** (rng.normal(0, 3, (count, 1)) / 20)
    signal = machine.gain * (signal + np.fft.irfft(flow)) + np.fft.irfft(others)
    return np.clip(np.rint(LOUDNESS * signal), -32768, 32767).astype(np.int16)


def make(path: Path, *, machines: int = MACHINES, train: int = TRAIN, seed: int = 0) -> None:
    """:param train: clips of a motor's first week."""
    rng = np.random.default_rng(seed)
    for number in range(machines):
        machine, around = Machine.drawn(rng), room(rng)
        parts = [("train", "normal", "", train), ("test", "normal", "", NORMAL)]
        parts += [("test", "fault", fault, OF_EACH_FAULT) for fault in FAULTS]
        for part, kind, fault, count in parts:
            place = path / part / f"machine-{number:03d}" / kind
            place.mkdir(parents=True, exist_ok=True)
            clips = sounds(machine, around, count, rng, any_load=part == "test", fault=fault)
            for clip, pcm in enumerate(clips):
                (place / f"{fault}{clip:02d}.wav").write_bytes(wav_of(pcm, RATE))


if __name__ == "__main__":
    make(Path(__file__).with_name("sound"))
