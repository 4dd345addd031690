"""The options of `hushfleet invert`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from hushfleet.aggregator.report.options import Option
from hushfleet.schema import AtLeast1, Count
from hushfleet.simulator.options import DataDir, TaskSettings

FIGURES, PICTURE = "invert.json", "invert.png"


@dataclass(frozen=True, kw_only=True)
class InvertOptions(TaskSettings):
    """Options of the attack."""

    # fmt: off
    images: Annotated[int, Meta(ge=1, le=50), Option(help="Number of images to seek; the seed draws them.")] = 6
    devices: Annotated[int, Meta(ge=2, le=1000), Option(help="Number of devices in secure aggregation.")] = 100
    steps: Annotated[AtLeast1, Option(help="Optimisation steps of the attack, for all images at once.")] = 400
    tries: Annotated[int, Meta(ge=1, le=20), Option(help="Number of restarts of each search.")] = 4
    seed: Annotated[Count, Option(help="Seed of the images, the noise and the starts of searches.")] = 0
    data_dir: DataDir = None
    out: Annotated[Path | None, Option(help="Folder for invert.json and invert.png, the picture.")] = None
    as_json: Annotated[bool, Option("--json", help="Print JSON instead of a table.")] = False
    # fmt: on
