"""`hushfleet log`: a run's figures for TensorBoard or MLflow."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer


def register(app: typer.Typer) -> None:
    @app.command()
    def log(
        run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder, of a simulation or an aggregator.")],
        to: Annotated[Literal["tensorboard", "mlflow"], typer.Option(help="mlflow: the server of MLFLOW_TRACKING_URI.")] = "tensorboard",
        out: Annotated[Path | None, typer.Option(metavar="DIR", help="TensorBoard's folder; default: RUN/tensorboard.")] = None,
        follow: Annotated[bool, typer.Option("--follow", help="Of a run that goes on: wait for more until its last round.")] = False,
    ) -> None:  # fmt: skip
        """Write a run's figures by round to TensorBoard or MLflow, while it goes on or afterwards.

        Example: `hushfleet log runs/demo/paper --to tensorboard`
        """
        from rich.console import Console

        from hushfleet.aggregator.results.tracking import Mlflow, Sink, TensorBoard, figures_of
        from hushfleet.errors import BadInput
        from hushfleet.user_files import checked_folder

        folder = checked_folder(out or run / "tensorboard")
        figures = figures_of(run, follow=follow)
        first = next(figures, None)
        if first is None:
            raise BadInput(f"no round of {run} has closed yet")
        sink: Sink = TensorBoard(folder) if to == "tensorboard" else Mlflow("hushfleet", run.resolve().name)
        count = 1
        try:
            sink.write(first)
            for each in figures:
                sink.write(each)
                count += 1
        finally:
            sink.close()
        where = f"see: tensorboard --logdir {folder}" if to == "tensorboard" else "experiment hushfleet"
        Console().print(f"{count} rounds written; {where}", highlight=False, soft_wrap=True)
