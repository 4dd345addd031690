"""`hushfleet fleet test`: test the fleet's newest model with public images."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hushfleet.aggregator.fleet.commands.setup import Dir
from hushfleet.errors import BadInput

app = typer.Typer()


@app.command("test")
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
    from hushfleet.aggregator.results.report.readable import number, percent
    from hushfleet.aggregator.storage.checkpoints import Checkpoints

    folder = FleetFolder(path)
    # By their files: the store is the aggregator's, which may be running.
    kept = [int(file.stem.removeprefix("global-")) for file in folder.run.glob("global-*.safetensors")]
    if not kept:
        raise BadInput(f"{folder.run} has no model yet: no round has begun")
    prepared = prepare(load_task(folder.task, (f"data.path={data.absolute()}",)), run_id="test")
    if prepared.evaluate_global is None or prepared.dataset is None or not len(prepared.dataset.test):
        raise BadInput(f"{data}: there is nothing to test with, or the task trains no model")
    rounds, vectors = max(kept), prepared.method.server.vectors
    model = Checkpoints(folder.run, prepared.spec.model.layout, vectors=vectors).read(rounds)
    found = prepared.evaluate_global(prepared.method.split(model)[0])
    print(
        f"after {rounds} rounds of {folder.run.name}, the fleet's model is right on {percent(found.accuracy)} of "
        f"{len(prepared.dataset.test)} test samples (loss {number(found.loss)})"
    )
