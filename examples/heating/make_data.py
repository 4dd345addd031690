"""Makes synthetic houses: a thermostat's board has the last two hours of a heated room, and predicts the next hour.

These are no measurements. A room loses heat to the outside and gains heat from its radiator and the sun, at different
rates in each house; the thermostat switches at half a degree around a set point. A sample has a value every five
minutes for two hours, of four channels: room and outside temperature (degrees C), radiator and sun (0 to 1). Its target
is the change of the room temperature after one hour, in degrees.

    python make_data.py        # writes heating.npz beside this file: 30 houses train, 8 others are the common test
"""

from pathlib import Path

import numpy as np

STEP_H, PAST, AHEAD = 1 / 12, 24, 12  # hours, steps
HOUSES, STRANGERS, WINDOWS = 30, 8, 24
SENSOR_C = 0.05  # standard deviation of the room's sensor


def house(rng: np.random.Generator, windows: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns float32 `[windows, 4, 24]` and targets float32 `[windows, 1]` of one house."""
    loss, radiator, window = rng.uniform(0.05, 0.08), rng.uniform(2.5, 3.5), rng.uniform(0.3, 1.0)  # degrees an hour
    wanted, days = rng.uniform(18, 22), windows // 4
    hours = np.arange(round(24 * days / STEP_H)) * STEP_H
    weather, clouds = rng.uniform(-5, 12, days), rng.uniform(0, 1, days)
    outside = np.interp(hours / 24, np.arange(days), weather) + 4 * np.sin(2 * np.pi * (hours - 9) / 24)
    sun = np.clip(np.sin(2 * np.pi * (hours - 6) / 24), 0, 1) * clouds[(hours // 24).astype(int)]
    room, heats, on = np.empty(len(hours)), np.empty(len(hours)), False
    now = wanted
    for step in range(len(hours)):
        on = now < wanted + (0.5 if on else -0.5)
        room[step], heats[step] = now, on
        warming = loss * (outside[step] - now) + radiator * on + window * sun[step]
        now += STEP_H * warming + 0.02 * rng.standard_normal()
    seen = np.stack([room + SENSOR_C * rng.standard_normal(len(room)), outside, heats, sun])
    ends = rng.choice(np.arange(PAST, len(hours) - AHEAD), windows, replace=False)
    samples = np.stack([seen[:, end - PAST : end] for end in ends])
    targets = room[ends + AHEAD - 1] - room[ends - 1]
    return samples.astype(np.float32), targets[:, None].astype(np.float32)


def make(path: Path, *, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    houses = [house(rng, WINDOWS) for _ in range(HOUSES)]
    strangers = [house(rng, WINDOWS) for _ in range(STRANGERS)]
    np.savez(
        path,
        train_x=np.concatenate([x for x, _ in houses]),
        train_y=np.concatenate([y for _, y in houses]),
        train_device=np.repeat([f"house-{number:02d}" for number in range(HOUSES)], WINDOWS),
        test_x=np.concatenate([x for x, _ in strangers]),
        test_y=np.concatenate([y for _, y in strangers]),
        class_names=np.array(["warming in an hour, degrees C"]),
    )


if __name__ == "__main__":
    make(Path(__file__).with_name("heating.npz"))
