"""`hushfleet features`: make a file of fixed features of a network that others trained."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeVar

import typer

from hushfleet.errors import BadInput

BOARDS = ("raspberry-pi-zero-2-w", "raspberry-pi-4-2gb", "raspberry-pi-5-4gb", "jetson-nano-2019")
_IMAGES = 5  # timed
_Number = TypeVar("_Number", int, float)

features = typer.Typer(no_args_is_help=True, help="Make fixed features of networks that others trained.")


@features.callback()
def _group() -> None:
    """Keeps `make` a sub-command: typer merges a single one with its group."""


@features.command("make")
def _make(
    source: Annotated[str, typer.Argument(metavar="PACKAGE|FILE", help="An installed package, a wheel or an ONNX file. Of several files in a package: PACKAGE:NAME.onnx.")],
    out: Annotated[Path | None, typer.Option(metavar="FILE.onnx", help="The file to write; default: features.onnx.")] = None,
    input_shape: Annotated[str | None, typer.Option(metavar="C,H,W", help="What the network takes; default: the file's own, or a common size.")] = None,
    image_shape: Annotated[str | None, typer.Option(metavar="C,H,W", help="The task's images, if they are others: grey ones are repeated, sides are resized in the graph.")] = None,
    border: Annotated[int, typer.Option(min=0, help="Black pixels around the task's images before they are resized, for networks that know their objects with a margin.")] = 0,
    cut: Annotated[str | None, typer.Option(metavar="TENSOR", help="The tensor with the features; default: the input of the classifier, or the output.")] = None,
    mean: Annotated[str, typer.Option(metavar="M|M,M,M", help="The network's own normalisation of pixels in [0, 1].")] = "0",
    std: Annotated[str, typer.Option(metavar="S|S,S,S", help="The same, its deviation.")] = "1",
) -> None:  # fmt: skip
    """Make a file for `model.features` of an ONNX network in a package, or in a file.

    Shapes are fixed, constants folded, the network is cut at its classifier, and checked as boards check it. Nothing of
    the package is imported, and no licence is accepted for you: it is printed.

    Example: `hushfleet features make rapidocr-onnxruntime:rec_infer.onnx --input-shape 3,48,48 --mean 0.5 --std 0.5`
    """
    from hushfleet.models.features.make import find_source, make

    found = find_source(source)
    made = make(
        found.data,
        network_shape=_shape(input_shape),
        image_shape=_shape(image_shape),
        border=border,
        cut=cut,
        mean=_numbers(mean, float),
        std=_numbers(std, float),
    )
    path = out or Path("features.onnx")
    path.write_bytes(made.data)
    typer.echo(f"{found.name}: {len(found.data) / 1e6:.1f} MB\nlicence: {found.licence}")
    typer.echo("; ".join(made.notes))
    _print_costs(path, made.image_shape)
    typer.echo(f'\nmodel.features = "{path}"')


def _print_costs(path: Path, image_shape: tuple[int, int, int]) -> None:
    """Prints size and cost of what boards get of the file."""
    import time

    import numpy as np
    import onnx

    from hushfleet.firmware_profiles.board import load_board
    from hushfleet.learning.graph_safety import check_graph
    from hushfleet.learning.graph_session import open_session
    from hushfleet.learning.graph_shapes import graph_cost
    from hushfleet.models.features import get_features
    from hushfleet.wire.format.spec import MAX_GRAPH_BYTES

    extractor = get_features(str(path), image_shape)
    weights = sum(int(np.prod(each.dims)) for each in onnx.load_from_string(extractor.graph).graph.initializer)
    cost = graph_cost(check_graph(extractor.graph, max_initializer_bytes=MAX_GRAPH_BYTES), 1)
    session, x = open_session(extractor.graph, fold=False), np.zeros((1, *image_shape), np.float32)
    session.run(None, {"x": x})
    began = time.process_time()
    for _ in range(_IMAGES):
        session.run(None, {"x": x})
    image_s = (time.process_time() - began) / _IMAGES
    typer.echo(
        f"boards get {len(extractor.graph) / 1e6:.1f} MB with {weights:,} parameters, and of an image "
        f"{extractor.count - 1} features{' in order' if extractor.has_order else ''} by {cost.work / 1e6:,.0f} million "
        f"multiply-adds, holding {cost.held_bytes / 2**20:.0f} MiB"
    )
    typer.echo(
        f"an image takes {1000 * image_s:.1f} ms of processor here; by the profiles, as if here were generic-x86:"
    )
    for board in map(load_board, BOARDS):
        typer.echo(f"  {board.name}: ~{1000 * image_s / float(board.relative_cpu_speed):,.0f} ms")


def _numbers(text: str, kind: type[_Number]) -> list[_Number]:
    try:
        return [kind(each) for each in text.split(",")]
    except ValueError as error:
        raise BadInput(f"{text!r} must be numbers, divided by commas") from error


def _shape(text: str | None) -> tuple[int, int, int] | None:
    if text is None:
        return None
    numbers = _numbers(text, int)
    if len(numbers) != 3 or min(numbers) < 1:
        raise BadInput(f"{text!r} must be channels, height and width, such as 3,48,48")
    return numbers[0], numbers[1], numbers[2]
