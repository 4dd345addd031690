"""`hushfleet plan`: estimate whether taking part will pay, before a board is flashed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from hushfleet.aggregator.report.options import Option, with_options
from hushfleet.errors import BadInput, PrivacyError
from hushfleet.privacy.terms import HONEST_FRACTION
from hushfleet.schema import AtLeast1
from hushfleet.simulator.options import DataDir, Json

FEATURES = ("scattering", "filters")


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """The fleet to estimate."""

    # fmt: off
    devices: Annotated[int, Meta(ge=2, le=100_000), Option(help="Number of devices in a round.")]
    images: Annotated[AtLeast1, Option(help="Mean number of training images of a device.")]
    epsilon: Annotated[float, Option(help="Epsilon against the server, for a whole device and all rounds.")]
    classes: Annotated[Annotated[int, Meta(ge=2, le=1000)] | None, Option(help="Number of classes; --data brings its "
"own.")] = None
    delta: Annotated[float, Option(help="Probability with which the promise may fail.")] = 1e-5
    features: Annotated[str, Option(help="Features: scattering, filters (tiny images), sound:speech or a "
"file.onnx.")] = "scattering"
    boards: Annotated[str, Option(metavar="A,B,...", help="Boards whose time is shown; see `hushfleet boards`.")] = "raspberry-pi-zero-2-w,raspberry-pi-5-8gb"
    honest_fraction: Annotated[float, Meta(ge=0.01, le=1), Option(help="Least share of honest devices; the others may "
"work with the server.")] = HONEST_FRACTION
    alpha: Annotated[Annotated[float, Meta(ge=0.01)] | None, Option(help="Dirichlet parameter of the devices' labels: "
"0.5 is very unequal. Default: equal.")] = None
    per: Annotated[str | None, Option(metavar="90d", help="Repeat the task in each such period, and show the years: "
"--epsilon is of one period.")] = None
    lifetime: Annotated[float, Meta(ge=0.0), Option(help="With --per: epsilon over all periods, after which boards "
"stop.")] = math.inf
    local: Annotated[bool, Option("--local", help="Trust nobody: each device adds all of the noise.")] = False
    shape: Annotated[str | None, Option(metavar="C,H,W", help="Shape of images: channels (1 grey, 3 colour), height, "
"width. Default: 1,28,28; with filters 1,8,8.")] = None
    data: Annotated[str | None, Option(metavar="FOLDER|NAME", help="Public images or sound to measure on: class "
"folders, or a data set.")] = None
    data_dir: DataDir = None
    out: Annotated[Path | None, Option(metavar="TASK.toml", help="Also write a task file to this path; with --per it "
"repeats.")] = None
    as_json: Json = False
    # fmt: on


@with_options
def plan(options: PlanOptions) -> None:
    """Estimate what a board gains by taking part, what privacy it gives away, and what it needs.

    For method `hush`: a small shared head on fixed features, secure aggregation, a whole device protected. The gain
    comes from a table of simulated fleets (`benchmarks/private_gain.py`); the stand-ins for your images are
    Fashion-MNIST, letters (more classes), digits (`--features filters`) and CIFAR-10 (`--shape 3,32,32`). Other images
    gain more or less, so the answer follows from an interval that held for nine of ten gains on other images
    (`docs/field.md`). It pays if the whole interval is a point or more; it does not pay if the interval begins below 0
    and ends below a point. With `--data` the fleet is simulated on public images like yours instead, and the interval
    is narrower: on some hundred of them, in a folder with a sub-folder for each class, or on a data set by its name.

    Examples:

    `hushfleet plan --devices 60 --images 40 --classes 10 --epsilon 4`

    Boards with unequal classes:
    `hushfleet plan --devices 200 --images 20 --classes 4 --epsilon 2 --alpha 0.5`

    `hushfleet plan --devices 60 --images 40 --classes 4 --epsilon 4 --boards raspberry-pi-zero-2-w --out task.toml`

    A task every quarter, until epsilon 8 is spent in all:
    `hushfleet plan --devices 200 --images 40 --classes 10 --epsilon 2 --per 90d --lifetime 8`

    Measured on images like yours: `hushfleet plan --devices 60 --images 20 --epsilon 4 --data photos/ --shape 3,32,32`

    On clips of sound, one sample a clip: `hushfleet plan --devices 60 --images 20 --epsilon 4 --data clips/ --features
    sound:speech`; `--shape 1,1,32000` takes two seconds.

    More devices help most, then a larger epsilon. More images on each device improve the shared model, but training
    alone even more. If the answer is no, each board can train alone.
    """
    import json
    from dataclasses import fields, replace

    from rich.markup import escape

    from hushfleet.aggregator.config.season import SeasonSection
    from hushfleet.aggregator.config.sections import ModelSection
    from hushfleet.aggregator.planning.advice import Advice, Question
    from hushfleet.aggregator.planning.gain_table import GainTable
    from hushfleet.aggregator.planning.year import Year
    from hushfleet.aggregator.report.console import Console
    from hushfleet.aggregator.report.progress import show_progress
    from hushfleet.firmware_profiles import load_board
    from hushfleet.simulator.studies.plan.needs import BoardCosts, needs
    from hushfleet.simulator.studies.plan.show import show, to_plain
    from hushfleet.simulator.studies.plan.task_file import task_text
    from hushfleet.user_files import checked_file

    out = options.out
    if out is not None and checked_file(out).exists():
        raise BadInput(f"--out {out}: the file exists already; choose another name")
    if out is not None and options.per is not None:
        try:
            SeasonSection(every=options.per)
        except ValueError as error:
            raise BadInput(f"--per {options.per} with --out: {error}") from error
    if options.per is None and options.lifetime != math.inf:
        raise BadInput("--lifetime needs --per: without periods --epsilon is the limit over everything")
    if options.local and options.honest_fraction != HONEST_FRACTION:
        raise BadInput(
            "--honest-fraction does nothing with --local, where each device adds all of the noise: remove one"
        )
    if not (options.features in FEATURES or options.features.endswith(".onnx") or ":" in options.features):
        raise BadInput(
            f"--features {options.features}: there are {', '.join(FEATURES)}, torchvision:NAME, timm:NAME, sound:speech "
            "and your own FILE.onnx"
        )
    try:
        ModelSection(name="linear", features=options.features)
    except ValueError as error:
        raise BadInput(f"--features {options.features}: {error}") from error
    if (options.classes is None) == (options.data is None):
        raise BadInput("give either --classes or --data, whose images have classes of their own")
    profiles = [load_board(name.strip()) for name in options.boards.split(",") if name.strip()]
    given = {each.name: getattr(options, each.name) for each in fields(Question)}
    asked = Question(**given | {"classes": options.classes or 0, "shape": read_shape(options.shape)})
    try:
        table: GainTable | None = None
        names, stand_in = tuple[str, ...](), ""
        if options.data is not None:
            from hushfleet.simulator.studies.plan.own_images import measured_table, own_images

            with show_progress(Console(stderr=True, highlight=False)):
                own = own_images(options.data, asked.input_shape, data_dir=options.data_dir)
                names, stand_in = own.class_names, own.stand_in
                asked = replace(asked, classes=own.classes, shape=own.train.images.shape[1:])
                table = measured_table(asked, own)
        advice, needed, year = Advice.on(asked, table), needs(asked, table), None
        if options.per is not None:
            rounds, multiplier = needed.rounds, needed.noise_multiplier
            year = Year.of(asked, rounds=rounds, multiplier=multiplier, per=options.per, lifetime=options.lifetime)
            advice = replace(advice, lasts_s=year.ends_after_s)
    except PrivacyError as error:
        raise BadInput(str(error)) from error
    costs = [BoardCosts.of(board, asked, needed, table) for board in profiles]
    if options.as_json:
        print(json.dumps({"class_names": names, **to_plain(advice, needed, costs, year)}, indent=2))
    else:
        console = Console(highlight=False)
        if names:
            console.print(f"{len(names)} classes: {escape(', '.join(names))}\n", soft_wrap=True)
        show(console, advice, needed, costs, year)
    if out is not None:
        try:
            with out.open("x", encoding="utf-8") as file:
                file.write(task_text(asked, needed, table, class_names=names, stand_in=stand_in, year=year))
        except OSError as error:
            raise BadInput(f"--out {out}: it cannot be written: {error.strerror}") from error
        if not options.as_json:
            shape = "segment_s" if asked.input_shape[:2] == (1, 1) else "input_shape"
            fill_in = f"see that {shape} is right" if names else f"fill in class_names, and see that {shape} is right"
            console.print(f"task    {escape(str(out))}: {fill_in}; to simulate it, set data.path", soft_wrap=True)


def read_shape(text: str | None) -> tuple[int, int, int] | None:
    """Reads a shape. Raises `BadInput` unless it is three whole numbers of 1 or more, the first of them 1 or 3."""
    if text is None:
        return None
    parts = text.split(",")
    if len(parts) != 3 or not all(part.strip().isdecimal() for part in parts) or int(parts[0]) not in (1, 3):
        raise BadInput(f"--shape {text}: give channels (1 or 3), height and width, such as 3,32,32")
    channels, height, width = map(int, parts)
    if min(height, width) < 1:
        raise BadInput(f"--shape {text}: height and width must be 1 or more, such as 3,32,32")
    return channels, height, width
