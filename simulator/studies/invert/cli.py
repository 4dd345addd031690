"""`hushfleet invert`: what the server could see of a training image."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    @app.command("invert")
    def invert_command(
        task_file: Annotated[Path, typer.Argument(metavar="TASK.toml", help="Gives network, data, clip norm, delta and rounds; see `tasks/`.")],
        images: Annotated[int, typer.Option(min=1, max=50, help="How many images are sought; the seed draws them.")] = 6,
        devices: Annotated[int, typer.Option(min=2, max=1000, help="How many a secure sum has.")] = 100,
        steps: Annotated[int, typer.Option(min=1, help="Of the search, for all images at once.")] = 400,
        tries: Annotated[int, typer.Option(min=1, max=20, help="How often each search begins anew.")] = 4,
        seed: Annotated[int, typer.Option(min=0, help="Decides images, noise and where searches begin.")] = 0,
        data_dir: Annotated[Path | None, typer.Option(help="Where the data set's files are; default: download.")] = None,
        settings: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override any key, e.g. round.rounds=100.")] = None,
        out: Annotated[Path | None, typer.Option(help="Folder for invert.json and invert.png, the picture.")] = None,
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    ) -> None:  # fmt: skip
        """Seek training images in the updates that a server sees.

        The attack inverts gradients (Geiping et al. 2020) on the task's first model: of a raw update, a clipped one,
        one with a little noise, with the noise of epsilon_server 8 and 2 over the task's rounds, and of a sum of
        devices, without noise and with. It is the worst case for a device: one step on one image, whose label is
        known. An image counts as recognised if of all training images of its class it is the one most like what
        was found.

        A failed attack is no proof that none succeeds; what an epsilon promises holds for all of them.

        Examples:

        `hushfleet invert tasks/digits-fedglp-adp.toml --out runs/invert`

        `hushfleet invert tasks/digits-fedglp-adp.toml --images 12 --seed 1 --json`

        `hushfleet invert runs/a/task.json --out runs/a`, and `hushfleet report runs/a` shows it
        """
        import math

        from rich.console import Console

        from hushfleet.aggregator.config.sections import OWN_DATA
        from hushfleet.aggregator.observe.progress import shown
        from hushfleet.aggregator.results.result import write_whole
        from hushfleet.data.sets import load
        from hushfleet.errors import BadInput
        from hushfleet.models import get_model
        from hushfleet.simulator.command import overridden
        from hushfleet.simulator.studies.invert.show import draw, table, to_json
        from hushfleet.simulator.studies.invert.views import Terms, look
        from hushfleet.user_files import checked_folder

        console = Console(stderr=as_json)
        if out is not None:
            checked_folder(out)
        task = overridden(task_file, settings)
        if task.data.name in OWN_DATA:
            raise BadInput(f"data.name = {task.data.name!r}: images are sought of the public data sets alone")
        if task.model.features or task.model.share != "all":
            raise BadInput(
                "a network on features never shows the server a gradient by pixels; give a task without them"
            )
        clip_norm = task.privacy.clip_norm
        if clip_norm is None or not math.isfinite(clip_norm):
            raise BadInput(
                "privacy.clip_norm must be a number, since the noise is scaled to it: --set privacy.clip_norm=1"
            )
        terms = Terms(clip_norm, task.round.rounds, task.delta, devices)
        with shown(console):
            data = load(task.data.name, data_dir=data_dir).train
            shape = data.images.shape[1:]
            classes = int(data.labels.max()) + 1
            model = get_model(task.model.name, classes=classes, input_shape=shape)
            if model.input_shape != shape:
                raise BadInput(f"model.name = {model.name!r} takes {model.input_shape}; {task.data.name} has {shape}")
            if len(data) < images + devices:
                raise BadInput(f"{task.data.name} has {len(data)} images; --images and --devices ask for more")
            params = model.init(task.seed)
            originals, views = look(model, params, data, terms, count=images, steps=steps, tries=tries, seed=seed)
        text = to_json(task.name, len(data) / classes, views)
        if as_json:
            print(text)
        else:
            console.print(
                table(f"{model.name} on {task.data.name}, {task.round.rounds} rounds, delta {task.delta:g}", views)
            )
        if out is not None:
            write_whole(out / "invert.json", text + "\n")
            draw(originals, views, out / "invert.png")
            console.print(f"figures  {out / 'invert.json'}\npicture  {out / 'invert.png'}", highlight=False)
