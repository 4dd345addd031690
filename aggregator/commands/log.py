"""`hushfleet log`: write a run's figures for TensorBoard, MLflow or Weights & Biases."""

from __future__ import annotations

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
    import shlex

    from hushfleet.aggregator.observe.console import Console
    from hushfleet.aggregator.results.tracking import Mlflow, Sink, TensorBoard, WeightsAndBiases, figures_of
    from hushfleet.errors import BadInput
    from hushfleet.user_files import checked_folder

    folder = checked_folder(out or (run / "tensorboard" if to == "tensorboard" else run))
    figures = figures_of(run, follow=follow)
    first = next(figures, None)
    if first is None:
        raise BadInput(f"no round of {run} has closed yet")
    name = run.resolve().name
    sink: Sink
    if to == "tensorboard":
        sink, where = TensorBoard(folder), f"see: tensorboard --logdir {shlex.quote(str(folder))}"
    elif to == "mlflow":
        sink, where = Mlflow("hushfleet", name), "experiment hushfleet"
    else:
        sink = WeightsAndBiases("hushfleet", name, folder)
        where = f"project hushfleet; upload: wandb sync {shlex.quote(str(folder / 'wandb'))}/offline-run-*"
    count = 1
    try:
        sink.write(first)
        for each in figures:
            sink.write(each)
            count += 1
    finally:
        sink.close()
    Console().print(f"{count} rounds written; {where}", highlight=False, markup=False, soft_wrap=True)
