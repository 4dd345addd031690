"""Converts a described network to the stages that the compiled kernels know, with the sizes of each stage's tiles.

A tile is the data that a kernel keeps in registers; its best size depends on the layer and the processor's registers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeVar

from hushfleet.errors import BadInput
from hushfleet.models.layers import Conv, Dropout, Layered, Linear, Place, Pool
from hushfleet.models.model import Model
from hushfleet.params import is_linear

L = TypeVar("L", Conv, Pool, Dropout, Linear)
WIDTH = 16  # channels and hidden units come in multiples of this, the widest vector of any target
CACHE_FLOATS = 8 << 10  # maximum size of a kernel's working set in a first-level cache
MAX_PIXELS = 16  # of a tile
WINOGRAD_STEP = 4  # outputs along a side of a tile
WINOGRAD_TILES = 16  # at a time, of several images if one has fewer
MIN_WINOGRAD_TILES = 4  # with fewer of an image, the products wait for each other


@dataclass(frozen=True)
class VectorUnit:
    """The compiler's target: floats in a vector, and registers for vectors."""

    lanes: int
    registers: int


@dataclass(frozen=True)
class ConvTiles:
    """The tiles of a convolution.

    :param rows: rows of outputs at a time; more than `window` means Winograd's algorithm.
    :param pixels: pixels of each row (with Winograd: its tiles), times `vectors` of outputs: the forward accumulators.
    :param run: accumulators of the weights' gradient, taps for the first layer and vectors for the others.
    :param band: pooled rows whose inputs stay in the first-level cache.
    """

    rows: int
    pixels: int
    vectors: int
    run: int
    band: int


@dataclass(frozen=True)
class ConvStage:
    """A convolution with its ReLU and, if `window` is 2, the pooling that follows."""

    number: int
    conv: Conv
    input_shape: tuple[int, int, int]
    window: int

    @property
    def name(self) -> str:
        return f"conv{self.number}"

    @property
    def first(self) -> bool:
        return self.number == 1

    @property
    def outputs(self) -> int:
        return self.conv.outputs

    @property
    def patch(self) -> int:
        """The number of inputs of one output."""
        return self.input_shape[0] * self.conv.kernel**2

    @property
    def padded(self) -> tuple[int, int]:
        return self.input_shape[1] + 2 * self.conv.padding, self.input_shape[2] + 2 * self.conv.padding

    @property
    def input_size(self) -> int:
        return self.input_shape[0] * math.prod(self.padded)

    @property
    def grid(self) -> tuple[int, int]:
        """Height and width of the outputs before pooling."""
        return self.padded[0] + 1 - self.conv.kernel, self.padded[1] + 1 - self.conv.kernel

    @property
    def pooled(self) -> tuple[int, int]:
        return self.grid[0] // self.window, self.grid[1] // self.window

    @property
    def output_size(self) -> int:
        return self.outputs * math.prod(self.pooled)

    @property
    def words(self) -> int:
        """The number of 64-bit words for one bit per output, at each corner of each pooled pixel's window."""
        return math.prod(self.pooled) * self.window**2 * self.outputs // self.word

    @property
    def word(self) -> int:
        """The number of outputs whose bits share a word."""
        return math.gcd(self.outputs, 64)

    @property
    def winograd_rows(self) -> int:
        """The number of output rows that Winograd's algorithm takes at a time; 0 if tiles do not fit or are too few."""
        if self.first or self.conv.kernel not in (3, 5) or any(size % WINOGRAD_STEP for size in self.grid):
            return 0
        height, in_row = (size // WINOGRAD_STEP for size in self.grid)
        fitting = (n for n in range(1, height + 1) if height % n == 0 and (n == 1 or n * in_row <= WINOGRAD_TILES))
        rows = max(fitting)
        return rows * WINOGRAD_STEP if rows * in_row >= MIN_WINOGRAD_TILES else 0

    @property
    def winograd_tiles(self) -> int:
        """The number of an image's tiles at a time."""
        return self.winograd_rows * self.grid[1] // WINOGRAD_STEP**2

    @property
    def winograd_points(self) -> int:
        return (WINOGRAD_STEP + self.conv.kernel - 1) ** 2

    @property
    def back_by_winograd(self) -> bool:
        """Whether Winograd's algorithm is the faster way back; the other one leaves out what is 0 after pooling."""
        return bool(self.winograd_rows) and (self.window == 1 or self.conv.kernel == 5)

    @property
    def images(self) -> int:
        """The number of images that Winograd's algorithm takes at a time; 1 without it."""
        whole = self.winograd_rows == self.grid[0]
        return max(1, WINOGRAD_TILES // self.winograd_tiles) if whole else 1

    def tiles(self, target: VectorUnit) -> ConvTiles:
        """Chooses tiles whose accumulators fit the registers."""
        rows, pixels, vectors = self._forward_tile(target)
        if self.first:
            units, free = self.patch, (target.registers - 2 - vectors) // vectors
        else:
            units, free = self.patch // target.lanes, target.registers - 6
        run = math.ceil(units / math.ceil(units / free))
        input_row = self.padded[1] * self.input_shape[0]
        band = (CACHE_FLOATS // input_row - self.conv.kernel + 1) // self.window
        return ConvTiles(self.winograd_rows or rows, pixels, vectors, run, min(max(band, 1), self.pooled[0]))

    def _forward_tile(self, target: VectorUnit) -> tuple[int, int, int]:
        """Returns the rows, pixels and vectors of accumulators with which the forward kernel needs the fewest cycles.

        A step multiplies each of the tile's pixels with each of its vectors of weights. Two products or two loads
        start per cycle, and eight accumulators hide a product's latency; weights from the second-level cache and the
        loop itself cost a little more.
        """
        far = 0.25 if self.patch * self.outputs > CACHE_FLOATS else 0
        width = self.winograd_tiles or self.grid[1]
        row_choices = {1} if self.winograd_rows else {1, self.window}

        def step_cycles(rows: int, pixels: int, vectors: int) -> float:
            products, loads = rows * pixels * vectors, rows * pixels + vectors
            return max(products / 2, loads / 2, 4) + far * vectors + 1

        def cycles(tile: tuple[int, int, int]) -> float:
            rows, pixels, vectors = tile
            whole, rest = divmod(width, pixels)
            steps = whole * step_cycles(rows, pixels, vectors) + (step_cycles(rows, rest, vectors) if rest else 0)
            return steps / vectors / rows

        tiles = [
            (rows, pixels, vectors)
            for rows in row_choices
            for pixels in range(1, min(width, MAX_PIXELS) + 1)
            for vectors in (1, 2, 4)
            if self.outputs // target.lanes % vectors == 0 and rows * pixels * vectors + vectors <= target.registers - 2
        ]
        return min(tiles, key=lambda tile: (cycles(tile), tile))


@dataclass(frozen=True)
class LinearStage:
    """A linear layer with its ReLU and dropout.

    :param mask: the number of the dropout mask that multiplies its outputs.
    """

    name: str
    inputs: int
    outputs: int
    relu: bool
    mask: int | None


@dataclass(frozen=True)
class Stages:
    """A network in the form of the C program.

    :param convs: may be empty; then the first linear layer reads the images.
    :param flat_mask: the number of the dropout mask that multiplies the last convolution's outputs.
    """

    convs: tuple[ConvStage, ...]
    flat_mask: int | None
    linears: tuple[LinearStage, ...]


def stages_of(model: Model) -> Stages:
    """Converts the model's layers to the kernels' form. Raises `BadInput` with the reason if this is not possible."""
    network = model.function
    if is_linear(model.layout):
        ((outputs, inputs), _) = model.layout.shapes
        return Stages((), None, (LinearStage("head", inputs, outputs, relu=False, mask=None),))
    if not isinstance(network, Layered):
        raise BadInput(f"{model.name} is written as PyTorch code, not as a list of layers that could be compiled")
    places, masks = list(network.places), iter(range(len(model.dropout)))

    def accept(kind: type[L]) -> tuple[L, Place] | None:
        if not places or not isinstance(places[0].layer, kind):
            return None
        return places[0].layer, places.pop(0)

    convs: list[ConvStage] = []
    while found := accept(Conv):
        conv, place = found
        _require_width(model, place.name, conv.outputs)
        channels, height, width = place.input_shape
        convs.append(ConvStage(len(convs) + 1, conv, (channels, height, width), 2 if accept(Pool) else 1))
    flat_mask = next(masks) if convs and accept(Dropout) else None
    linears: list[LinearStage] = []
    while taken := accept(Linear):
        linear, place = taken
        if linear.relu:
            _require_width(model, place.name, linear.outputs)
        mask = next(masks) if linear.relu and accept(Dropout) else None
        linears.append(LinearStage(place.name, math.prod(place.input_shape), linear.outputs, linear.relu, mask))
    relus = [stage.relu for stage in linears]
    if places or not linears or relus != [True] * (len(linears) - 1) + [False]:
        raise BadInput(
            f"{model.name}: the compiled kernels take convolutions, each with or without pooling, then linear layers, "
            f"of which only the last is without ReLU; dropout may follow the last pooling and hidden linear layers"
        )
    return Stages(tuple(convs), flat_mask, tuple(linears))


def _require_width(model: Model, name: str, outputs: int) -> None:
    if outputs % WIDTH:
        raise BadInput(f"{model.name}: {name} has {outputs} outputs; the compiled kernels need a multiple of {WIDTH}")
