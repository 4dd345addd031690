"""`hushfleet log`: write a run's figures for TensorBoard, MLflow or Weights & Biases."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Annotated, Literal

import typer


def log(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder, of a simulation or an aggregator.")],
    to: Annotated[Literal["tensorboard", "mlflow", "wandb"], typer.Option(help="mlflow: the server of MLFLOW_TRACKING_URI. wandb: files for `wandb sync`; with WANDB_MODE=online sent at once.")] = "tensorboard",
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of TensorBoard or Weights & Biases; default: RUN/tensorboard, RUN.")] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Follow a run that is not finished, until its last round.")] = False,
) -> None:  # fmt: skip
    """Write a run's figures by round to TensorBoard, MLflow or Weights & Biases, while it goes on or afterwards.

    Example: `hushfleet log runs/demo/paper --to tensorboard`
    """
    from hushfleet.aggregator.report.console import Console
    from hushfleet.aggregator.results.tracking import figures_of, tracker
    from hushfleet.errors import BadInput
    from hushfleet.user_files import checked_folder

    folder = checked_folder(out or (run / "tensorboard" if to == "tensorboard" else run))
    figures = figures_of(run, follow=follow)
    first = next(figures, None)
    if first is None:
        raise BadInput(f"no round of {run} has closed yet")
    count = 0
    with tracker(to, run.resolve().name, folder) as (write, where):
        for count, each in enumerate(chain([first], figures), start=1):  # noqa: B007  # the number of the last one
            write(each)
    Console().print(f"{count} rounds written; {where}", highlight=False, markup=False, soft_wrap=True)
