"""Runs the fleet and draws its models' predictions for photographs. `python run.py privacy.epsilon=8` changes a key."""

import base64
import io
from pathlib import Path

from make_data import make
from matplotlib.figure import Figure
from PIL import Image

import hushfleet as hf


def draw(run: hf.Run, path: Path) -> None:
    """Draws twelve random test photographs, and a board's predictions for them: alone, and as part of the fleet."""
    details = run.result.details
    figure = Figure(figsize=(9, 7.4), layout="constrained")
    means = run.devices[["accuracy_alone", "accuracy_own"]].mean()
    figure.suptitle(f"A board's model, right in {means.iloc[0]:.0%} alone and in {means.iloc[1]:.0%} with the fleet")
    for axes, each in zip(figure.subplots(3, 4).flat, details.examples, strict=False):
        axes.imshow(Image.open(io.BytesIO(base64.b64decode(each.png))))
        axes.axis("off")
        axes.set_title(details.class_names[each.label], fontsize=11, fontweight="bold")
        for place, who, said in ((-0.08, "alone", each.said_alone), (-0.19, "fleet", each.said_own)):
            color = "#1b7a3d" if said == each.label else "#b5524a"
            axes.text(0, place, f"{who}: {details.class_names[said]}", color=color, transform=axes.transAxes)
    figure.savefig(path, dpi=80)


if __name__ == "__main__":
    here = Path(__file__).parent
    with hf.script() as changes:
        if not (here / "photographs").exists():
            make(here / "photographs")
        run = hf.simulate(here / "task.toml", changes)
        draw(run, run.folder / "photographs.png")
        print(run.folder / "photographs.png")
        print(run.report())
