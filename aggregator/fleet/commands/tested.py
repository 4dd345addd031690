"""`hushfleet fleet test`: test the fleet's newest model with public images."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hushfleet.aggregator.fleet.commands.ask import ASK
from hushfleet.aggregator.fleet.commands.setup import Dir
from hushfleet.errors import BadInput

if TYPE_CHECKING:
    from hushfleet.data.targets import Targets
    from hushfleet.model.evaluation import Evaluation

app = typer.Typer()


@app.command("test", rich_help_panel=ASK)
def _test(
    path: Dir,
    data: Annotated[Path, typer.Argument(metavar="DATA", help="As data.path of the task: a folder with test/CLASS/*.jpg, or an .npz or .csv file.")],
) -> None:  # fmt: skip
    """Test the fleet's newest model with public data like the boards'. It costs no privacy, and boards hear nothing of it.

    Example:

    `hushfleet fleet test greenhouse public/`
    """
    from hushfleet.aggregator.config.task import load_task
    from hushfleet.aggregator.fleet.folder import FleetFolder
    from hushfleet.aggregator.publish.prepare import prepare
    from hushfleet.aggregator.publish.start import EarlierModel
    from hushfleet.aggregator.storage.checkpoints import Checkpoints

    folder = FleetFolder(path)
    # Found by file names, because the store belongs to the aggregator, which may be running.
    kept = {int(file.stem.removeprefix("global-")): file for file in folder.run.glob("global-*.safetensors")}
    if not kept:
        raise BadInput(f"{folder.run} has no model yet: no round has begun")
    rounds = max(kept)
    changes = [f"data.path={data.absolute()}"]
    if columns := EarlierModel.read(kept[rounds]).columns:  # in the order in which the model takes them
        changes.append(f"data.columns={json.dumps(columns)}")
    prepared = prepare(load_task(folder.task, tuple(changes)), run_id="test")
    if prepared.evaluate_global is None or prepared.dataset is None or not len(prepared.dataset.test):
        raise BadInput(f"{data}: there is nothing to test with, or the task trains no model")
    vectors = prepared.method.server.vectors
    model = Checkpoints(folder.run, prepared.spec.model.layout, vectors=vectors).read(rounds)
    found = prepared.evaluate_global(prepared.method.split(model)[0])
    said = describe_test(prepared.spec.model.targets, found, len(prepared.dataset.test))
    print(f"after {rounds} rounds of {folder.run.name}, the fleet's model {said}")


def describe_test(targets: Targets, found: Evaluation, count: int) -> str:
    """Says how good a model is on so many test samples; an autoencoder's score is not a share of the samples."""
    from hushfleet.aggregator.results.report.readable import number, percent

    samples = f"{count} test samples (loss {number(found.loss)})"
    if not targets.are_inputs:
        return f"is right on {percent(found.accuracy)} of {samples}"
    score = found.accuracy if math.isfinite(found.accuracy) else None
    return f"has {targets.measure} {number(score)} on {samples}"
