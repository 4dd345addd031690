"""Makes synthetic accelerometer data: people walk, run, climb stairs, cycle or sit, each with a phone in a pocket.

These are no measurements. A window is two seconds at 25 Hz of three axes, in m/s^2: gravity, a vertical movement with a
second harmonic, and a sideways movement. The activity sets their rate and strength, and the person scales them: one
person's walk may be as fast as another person's run. The phone is rotated differently in each pocket. Each person does
some activities often and others rarely.

    python make_data.py        # writes activity.npz beside this file: 24 people train, 6 others are the common test
"""

from pathlib import Path

import numpy as np

ACTIVITIES = ("sit", "walk", "stairs", "run", "cycle")
RATE_HZ = (0.0, 1.8, 1.5, 2.7, 1.2)  # steps or turns a second
UP_DOWN = (0.05, 2.5, 3.0, 6.0, 1.0)  # m/s^2
SWAY = (0.05, 1.0, 1.6, 2.0, 2.0)
STEPS, HZ, NOISE, TILT = 50, 25.0, 1.0, 0.2
PEOPLE, STRANGERS, WINDOWS = 24, 6, 40


def askew(rng: np.random.Generator) -> np.ndarray:
    """Returns the rotation of the phone by some degrees, float64 `[3, 3]`."""
    q, r = np.linalg.qr(np.eye(3) + TILT * rng.standard_normal((3, 3)))
    return q * np.sign(np.diag(r))


def person(rng: np.random.Generator, windows: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns float32 `[windows, 3, 50]` and labels int64 `[windows]` of one person."""
    pace, strength, pocket = rng.uniform(0.75, 1.3), rng.uniform(0.5, 1.6), askew(rng)
    labels = rng.choice(len(ACTIVITIES), windows, p=rng.dirichlet(np.full(len(ACTIVITIES), 2.0)))
    time = np.arange(STEPS) / HZ
    samples = np.empty((windows, 3, STEPS))
    for sample, label in zip(samples, labels, strict=True):
        rate, force = pace * RATE_HZ[label] * rng.uniform(0.93, 1.07), strength * rng.uniform(0.8, 1.2)
        angle = 2 * np.pi * (rate * time + rng.random())
        up = 9.81 + force * UP_DOWN[label] * (np.sin(angle) + 0.4 * np.sin(2 * angle + 0.5))
        side = force * SWAY[label] * np.sin(angle / 2 + rng.random())
        sample[:] = pocket @ np.stack([side, 0.3 * (up - 9.81), up]) + NOISE * rng.standard_normal((3, STEPS))
    return samples.astype(np.float32), labels


def make(path: Path, *, people: int = PEOPLE, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    persons = [person(rng, WINDOWS) for _ in range(people)]
    strangers = [person(rng, WINDOWS) for _ in range(STRANGERS)]
    np.savez(
        path,
        train_x=np.concatenate([x for x, _ in persons]),
        train_y=np.concatenate([y for _, y in persons]),
        train_device=np.repeat([f"person-{number:02d}" for number in range(people)], WINDOWS),
        test_x=np.concatenate([x for x, _ in strangers]),
        test_y=np.concatenate([y for _, y in strangers]),
        class_names=np.array(ACTIVITIES),
    )


if __name__ == "__main__":
    make(Path(__file__).with_name("activity.npz"))
