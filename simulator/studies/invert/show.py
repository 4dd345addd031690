"""Shows the attacker's results: the table, JSON, and the picture with the originals at the top."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from rich.table import Table

from hushfleet.simulator.studies.invert.views import ImageView

COLUMNS = ("what the server sees", "epsilon_server", "recognised", "PSNR, median, dB")


def table(title: str, views: Sequence[ImageView]) -> Table:
    lines = Table(*COLUMNS, title=title)
    for view in views:
        lines.add_row(view.name, _epsilon(view), _recognised(view), f"{np.median(view.psnr):.1f}")
    return lines


def to_json(task: str, classmates: float, views: Sequence[ImageView]) -> str:
    """:param classmates: mean number of images of a class, among which one must be recognised."""
    plain = [
        {
            "view": view.name,
            "epsilon_server": view.epsilon_server,
            "recognised": view.recognised.tolist(),
            "psnr_db": [round(float(each), 2) for each in view.psnr],
        }
        for view in views
    ]
    return json.dumps({"task": task, "images_of_a_class": round(classmates, 1), "views": plain}, indent=2)


def draw(originals: np.ndarray, views: Sequence[ImageView]) -> bytes:
    """Returns a PNG: a column for each image, a row for each view."""
    count = len(originals)
    rows = [("the training image", originals, None), *((_label(view), view.images, view.recognised) for view in views)]
    with matplotlib.rc_context({"font.size": 9}):
        figure = Figure(figsize=(2.3 + 0.8 * count, 0.86 * len(rows)), dpi=130, facecolor="white")
        panels = figure.subplots(len(rows), count, squeeze=False, gridspec_kw={"wspace": 0.06, "hspace": 0.1})
        figure.subplots_adjust(left=2.2 / (2.3 + 0.8 * count), right=0.99, top=0.99, bottom=0.01)
        for line, (label, images, found) in zip(panels, rows, strict=True):
            line[0].set_ylabel(label, rotation=0, ha="right", va="center", labelpad=8)
            for number, (axes, image) in enumerate(zip(line, images, strict=True)):
                shades = np.clip(np.moveaxis(image, 0, -1), 0, 1)
                axes.imshow(shades if shades.shape[-1] == 3 else shades[..., 0], cmap="gray_r", vmin=0, vmax=1)
                axes.set(xticks=[], yticks=[])
                hit = found is not None and found[number]
                axes.spines[:].set(color="#c0392b" if hit else "#bbbbbb", linewidth=2.5 if hit else 0.6)
        file = io.BytesIO()
        figure.savefig(file, metadata={"Software": None})
        return file.getvalue()


def _label(view: ImageView) -> str:
    noise = "" if view.epsilon_server is None else f"\nepsilon {_epsilon(view)}"
    return f"{view.name}{noise}\n{_recognised(view)} recognised"


def _recognised(view: ImageView) -> str:
    return f"{int(view.recognised.sum())} of {len(view.recognised)}"


def _epsilon(view: ImageView) -> str:
    return "infinite" if view.epsilon_server is None else f"{view.epsilon_server:,.0f}"
