"""Photographs in class folders, as boards and their owners have them: 1,500 of CIFAR-10's.

    python make_data.py        # writes photographs/train/<class>/*.png and photographs/test/<class>/*.png

With photographs of your own, put them there instead, of any size, and change `class_names` in task.toml.
"""

from pathlib import Path

import numpy as np
from PIL import Image

from hushfleet.data.sets import load


def make(folder: Path, *, data_dir: Path | None = None) -> None:
    data = load("cifar10", data_dir=data_dir)  # downloaded where it is not there
    for part, samples, count in (("train", data.train, 100), ("test", data.test, 50)):
        for label, name in enumerate(data.class_names):
            (folder / part / name).mkdir(parents=True, exist_ok=True)
            for place in np.flatnonzero(samples.y == label)[:count]:
                picture = Image.fromarray(samples.images[place].transpose(1, 2, 0))
                picture.save(folder / part / name / f"{place}.png")


if __name__ == "__main__":
    make(Path(__file__).with_name("photographs"))
