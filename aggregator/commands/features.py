"""`hushfleet features`: make a file of fixed features of a network that others trained."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from hushfleet.models.features.backbone import FeatureExtractor

BOARDS = ("raspberry-pi-zero-2-w", "raspberry-pi-4-2gb", "raspberry-pi-5-4gb", "jetson-nano-2019")
_IMAGES = 5  # timed

features = typer.Typer(
    no_args_is_help=True,
    help="Make fixed features of networks that others trained.\n\n"
    "Example: `hushfleet features make rapidocr-onnxruntime:rec_infer.onnx --input-shape 3,48,48`",
)


@features.callback()
def _group() -> None:
    """Keeps `make` a sub-command: typer merges a single one with its group."""


def _shape(text: str) -> tuple[int, int, int]:
    sizes = text.split(",")
    if len(sizes) != 3 or not all(each.strip().isdecimal() and int(each) for each in sizes):
        raise ValueError(f"{text!r} is not C,H,W: channels, height and width, as in 3,48,48")
    channels, height, width = map(int, sizes)
    return channels, height, width


def _each(text: str) -> tuple[float, ...]:
    return tuple(map(float, text.split(",")))


@features.command("make")
def _make(
    source: Annotated[str, typer.Argument(metavar="PACKAGE|FILE", help="An installed package, a wheel or an ONNX file. Of several files in a package: PACKAGE:NAME.onnx.")],
    out: Annotated[Path, typer.Option(metavar="FILE.onnx", help="The file to write.")] = Path("features.onnx"),
    input_shape: Annotated[Any, typer.Option(parser=_shape, metavar="C,H,W", help="What the network takes; default: the file's own, or a common size.")] = None,
    image_shape: Annotated[Any, typer.Option(parser=_shape, metavar="C,H,W", help="The task's images, if they are others: grey ones are repeated, sides are resized in the graph.")] = None,
    border: Annotated[int, typer.Option(min=0, help="Black pixels around the task's images before they are resized, for networks that know their objects with a margin.")] = 0,
    cut: Annotated[str | None, typer.Option(metavar="TENSOR", help="The tensor with the features; default: the input of the classifier, or the output.")] = None,
    mean: Annotated[Any, typer.Option(parser=_each, metavar="M|M,M,M", help="The network's own normalisation of pixels in [0, 1].")] = "0",
    std: Annotated[Any, typer.Option(parser=_each, metavar="S|S,S,S", help="The same, its deviation.")] = "1",
) -> None:  # fmt: skip
    """Make a file for `model.features` of an ONNX network in a package, or in a file.

    Shapes are fixed, constants folded, the network is cut at its classifier, and checked as boards check it. Nothing of
    the package is imported, and no licence is accepted for you: it is printed.

    Example: `hushfleet features make rapidocr-onnxruntime:rec_infer.onnx --input-shape 3,48,48 --mean 0.5 --std 0.5`
    """
    from hushfleet.models.features.backbone import from_bytes
    from hushfleet.models.features.make import find_source, make
    from hushfleet.user_files import checked_file

    checked_file(out)
    found = find_source(source)
    how = {"network_shape": input_shape, "image_shape": image_shape, "mean": mean, "std": std}
    made = make(found.data, border=border, cut=cut, **how)
    typer.echo(f"{found.name}: {len(found.data) / 1e6:.1f} MB\nlicence: {found.licence}")
    typer.echo("; ".join(made.notes))
    _print_costs(from_bytes(made.data, made.image_shape, what=source))
    out.write_bytes(made.data)
    typer.echo(f'\nmodel.features = "{out}"')


def _print_costs(extractor: FeatureExtractor) -> None:
    """Prints size and cost of what boards get of the file. Raises `GraphRefused` if they would not take it."""
    import time

    import numpy as np
    import onnx

    from hushfleet.firmware_profiles.board import load_board
    from hushfleet.learning.graph_features import check_features
    from hushfleet.learning.graph_safety import check_graph
    from hushfleet.learning.graph_session import open_session
    from hushfleet.learning.graph_shapes import graph_cost
    from hushfleet.wire.format.spec import MAX_GRAPH_BYTES

    check_features(extractor.graph, extractor.spec)
    weights = sum(int(np.prod(each.dims)) for each in onnx.load_from_string(extractor.graph).graph.initializer)
    cost = graph_cost(check_graph(extractor.graph, max_initializer_bytes=MAX_GRAPH_BYTES), 1)
    session, given = open_session(extractor.graph, fold=False), {"x": np.zeros((1, *extractor.image_shape), np.float32)}
    session.run(None, given)
    began = time.process_time()
    for _ in range(_IMAGES):
        session.run(None, given)
    image_ms = 1000 * (time.process_time() - began) / _IMAGES
    order = " in order" if extractor.has_order else ""
    typer.echo(
        f"boards get {len(extractor.graph) / 1e6:.1f} MB with {weights:,} parameters, and of an image "
        f"{extractor.count - 1} features{order} by {cost.work / 1e6:,.0f} million multiply-adds, holding "
        f"{cost.held_bytes / 2**20:.0f} MiB\n"
        f"an image takes {image_ms:.1f} ms of processor here; by the profiles, as if here were generic-x86:"
    )
    for board in map(load_board, BOARDS):
        typer.echo(f"  {board.name}: ~{image_ms / float(board.relative_cpu_speed):,.0f} ms")
