"""Divides the digits of scikit-learn among ten cameras in a way that no built-in partition does.

Camera 0 has seven times as many images as camera 9; the first cameras get thin strokes, the last ones thick strokes;
and three cameras hang upside down, so that their 6 looks like a 9 of the other cameras.

    python make_data.py        # writes cameras.npz beside this file
"""

from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

CAMERAS, UPSIDE_DOWN, SMALLEST = 10, (2, 5, 8), 1 / 7


def make(path: Path, *, cameras: int = CAMERAS, seed: int = 0) -> None:
    bunch, rng = load_digits(), np.random.default_rng(seed)
    images, labels = np.rint(bunch.images * (255 / 16)).astype(np.uint8)[:, None], bunch.target
    shares = np.geomspace(1, SMALLEST, cameras)
    ink = images.mean((1, 2, 3)) + rng.normal(0, 8, len(images))
    camera = np.empty(len(images), int)
    cuts = np.rint(np.cumsum(shares / shares.sum())[:-1] * len(images)).astype(int)
    for number, members in enumerate(np.split(np.argsort(ink), cuts)):
        camera[members] = number
    turned = np.isin(camera, UPSIDE_DOWN)
    images[turned] = images[turned, :, ::-1, ::-1]
    np.savez(path, train_x=images, train_y=labels, train_device=camera)  # a fifth is held out as the common test


if __name__ == "__main__":
    make(Path(__file__).with_name("cameras.npz"))
