"""Makes class folders with photographs, as on boards: 1,500 images of CIFAR-10.

    python make_data.py        # writes photographs/train/<class>/*.png and photographs/test/<class>/*.png

To use your own photographs of any size, put them there instead, and change `class_names` in task.toml.
"""

from pathlib import Path

import numpy as np
from PIL import Image

from hushfleet.data.sets import load


def make(folder: Path, *, data_dir: Path | None = None) -> None:
    data = load("cifar10", data_dir=data_dir)  # downloads it if it is missing
    for part, samples, count in (("train", data.train, 100), ("test", data.test, 50)):
        for label, name in enumerate(data.class_names):
            (folder / part / name).mkdir(parents=True, exist_ok=True)
            for place in np.flatnonzero(samples.y == label)[:count]:
                picture = Image.fromarray(samples.images[place].transpose(1, 2, 0))
                picture.save(folder / part / name / f"{place}.png")


if __name__ == "__main__":
    make(Path(__file__).with_name("photographs"))
