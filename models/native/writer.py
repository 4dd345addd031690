"""Writes a described network as a C program: sizes, the order of calls, the layout of memory; kernels are inlined.

The arithmetic is in `kernels/`. Each sample keeps the data that its backward pass will read; all samples share the
packed weights and the sums of the gradients.

Layers are numbered from 0, convolutions first. A backward pass is for the layers `from` to `until - 1`: it goes down to
`from` and no further. The content of `out` for all other layers is undefined. A forward pass starts at the layer
`from`, and all convolutions count as one; the values of the layers below are those of the previous pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import ClassVar

from hushfleet.models.model import Model
from hushfleet.models.native.build import kernels
from hushfleet.models.native.stages import ConvStage, LinearStage, Stages, VectorUnit, stages_of
from hushfleet.objectives import CROSS_ENTROPY, Objective
from hushfleet.params import PRIOR, is_linear

STRIDE = "sizeof(Sample) / sizeof(float)"
WORD_STRIDE = "sizeof(Sample) / sizeof(uint64_t)"


@dataclass(frozen=True)
class ProgramWriter:
    """A program for a batch's loss and gradient: `gradient`, `logits`, and for other objectives than the cross-entropy
    a gradient's second half."""

    model: Model
    target: VectorUnit
    objective: Objective = CROSS_ENTROPY
    kernels: ClassVar[tuple[str, ...]] = ("vectors.h", "convolution.h", "winograd.h", "linear.h", "loss.h")

    @cached_property
    def stages(self) -> Stages:
        return stages_of(self.model)

    @property
    def text(self) -> str:
        """The C source text. Raises `BadInput` if the kernels do not know a layer."""
        return "\n".join((kernels(*self.kernels), *self.parts()))

    def parts(self) -> Iterator[str]:
        """Yields the parts of the C source, in order."""
        yield from self._head()
        yield function("backward", ", int from, int until, Take *take, void *to, float *out", self._backward())
        yield from self._entries(SCRATCH, _ENTRY, LOGITS, *([] if self.objective == CROSS_ENTROPY else [_SLOPES]))

    def _entries(self, *texts: str) -> Iterator[str]:
        for text in texts:
            yield text.format(classes=self.model.classes, logits=self.stages.linears[-1].name, stride=STRIDE)

    def _head(self) -> Iterator[str]:
        for stage in self.stages.convs:
            yield self._conv_constant(stage)
        for linear in self.stages.linears:
            yield f"static const Linear {linear.name} = {{{linear.inputs}, {linear.outputs}}};"
        yield _struct("Sample", self._sample())
        yield _struct("Shared", self._shared())
        yield function("forward", ", int from", self._forward())

    def _conv_constant(self, stage: ConvStage) -> str:
        channels, width = stage.input_shape[0], stage.padded[1]
        following = self._following(stage)
        strides = (width, 1, math.prod(stage.padded)) if stage.first else (width * channels, channels, 1)
        values = {
            "inputs": channels,
            "outputs": stage.outputs,
            "kernel": stage.conv.kernel,
            "height": stage.grid[0],
            "width": stage.grid[1],
            "window": stage.window,
            **dict(zip(("x_row", "x_pixel", "x_channel"), strides, strict=True)),
            "y_row": (following.padded[1] if following else stage.pooled[1]) * stage.outputs,
            **asdict(stage.tiles(self.target)),
            "word": stage.word,
        }
        fields = ", ".join(f".{name} = {value}" for name, value in values.items())
        return f"static const Conv {stage.name} = {{{fields}}};"

    def _sample(self) -> Iterator[str]:
        """Yields the fields of one sample's memory. The gradient overwrites the logits."""
        for stage in self.stages.convs:
            if not stage.first or stage.conv.padding:
                yield f"float x{stage.number}[{stage.input_size}]"
            yield f"uint64_t alive{stage.number}[{stage.words}]"
        yield f"float flat[{self.stages.linears[0].inputs}]"
        yield f"float grad_flat[{self.stages.linears[0].inputs}]"
        for linear in self.stages.linears:
            yield f"float {linear.name}[{linear.outputs}]"
            if linear.relu:
                yield f"float grad_{linear.name}[{linear.outputs}]"

    def _shared(self) -> Iterator[str]:
        """Yields the fields of the memory that samples use one after the other."""
        for stage in self.stages.convs:
            yield from self._conv_memory(stage)
        rows = [max(each.winograd_rows, each.window) * each.grid[1] * each.outputs for each in self.stages.convs]
        tables = [each.padded[0] * each.pooled[1] * self.target.lanes for each in self.stages.convs[:1]]
        yield f"float rows[{max([*rows, *tables], default=0)}]"
        yield f"float y[{self._images * self.stages.linears[0].inputs}]"
        yield f"float grad_y[{self._images * self.stages.linears[0].inputs}]"

    def _conv_memory(self, stage: ConvStage) -> Iterator[str]:
        n, weights, channels = stage.number, stage.patch * stage.outputs, stage.input_shape[0]
        points, plane = stage.winograd_points, f"({channels * stage.outputs} + PAD)"
        if stage.winograd_rows:
            tiles = stage.winograd_tiles * self._images
            yield f"float points{n}[{points} * {plane}]"
            yield f"float x_points{n}[{points} * ({channels * tiles} + PAD)]"
            yield f"float y_points{n}[{points} * ({stage.outputs * tiles} + PAD)]"
        else:
            yield f"float forward{n}[{weights}]"
        if not stage.first:
            yield f"float grad_x{n}[{self._images * stage.input_size}]"
        if self._back_by_winograd(stage):
            yield f"float backward{n}[{points} * {plane}]"
            yield f"float sums{n}[{points} * {plane}]"
            return
        yield f"float grad_weight{n}[{weights}]"
        if not stage.first:
            yield f"float backward{n}[{weights}]"
            yield f"Entry entries{n}[{stage.outputs * stage.tiles(self.target).band * stage.pooled[1]}]"
            yield f"int counts{n}[{stage.outputs}]"

    def _forward(self) -> Iterator[str]:
        yield from where(f"from < {max(1, len(self.stages.convs))}", self._forward_convs())
        for linear in self.stages.linears:
            yield from where(f"from <= {self._number(linear)}", self._forward_linear(linear))

    def _forward_convs(self) -> Iterator[str]:
        for stage in self.stages.convs:
            n = stage.number
            if stage.winograd_rows:
                yield f"winograd_weights({stage.name}, {self._weight(stage)}, shared->points{n}, 1);"
            else:
                yield f"pack_forward({stage.name}, {self._weight(stage)}, shared->forward{n});"
        if not self.stages.convs:
            yield from self._each_sample(["memcpy(sample->flat, image, sizeof sample->flat);"])
            return
        yield from self._together(self._forward_samples())

    def _forward_linear(self, stage: LinearStage) -> Iterator[str]:
        yield (
            f"linear_forward({stage.name}, batch, samples->{self._input(stage)}, {STRIDE}, "
            f"{self._weight(stage)}, {self._bias(stage)}, samples->{stage.name}, {STRIDE});"
        )
        if stage.relu:
            mask = self._mask(stage.mask, stage.outputs)
            yield from self._each_sample([f"relu_dropout({stage.outputs}, sample->{stage.name}, {mask});"])

    def _forward_samples(self) -> Iterator[str]:
        for stage in self.stages.convs:
            yield from self._forward_conv(stage)
        flat = f"flatten({self._flat_y}, {self._flat_mask}, sample->flat, {self._flat_shape});"
        yield from self._each_sample([flat], "first", "end")

    def _forward_conv(self, stage: ConvStage) -> Iterator[str]:
        """Writes a convolution of the samples from `first` to `end - 1`."""
        n, x, y = stage.number, self._inputs(stage), self._outputs(stage, "sample->x", self._flat_y)
        if stage.winograd_rows:
            stride = STRIDE if self._following(stage) else self.stages.linears[0].inputs
            yield (
                f"winograd_forward({stage.name}, end - first, samples[first].x{n}, {STRIDE}, shared->points{n}, "
                f"{self._bias(stage)}, shared->x_points{n}, shared->y_points{n}, shared->rows, "
                f"{self._outputs(stage, 'samples[first].x', 'shared->y')}, {stride}, samples[first].alive{n}, "
                f"{WORD_STRIDE});"
            )
            return
        lines = []
        if stage.first and stage.conv.padding:
            _, height, width = stage.input_shape
            lines.append(f"pad_image({stage.name}, image, {height}, {width}, {stage.conv.padding}, {x});")
        arrays = f"shared->forward{n}, {self._bias(stage)}, shared->rows"
        lines.append(f"conv_forward({stage.name}, {x}, {arrays}, {y}, sample->alive{n});")
        yield from self._each_sample(lines, "first", "end")

    def _backward(self) -> Iterator[str]:
        """Writes the backward pass. A layer's gradient is taken only when its weights are read no more."""
        for linear in reversed(self.stages.linears):
            number = self._number(linear)
            yield from where(f"from <= {number}", self._linear_relu_gradient(linear))
            yield from where(f"from < {number}", [self._linear_input_gradient(linear)])
            weight = self._linear_weight_gradient(linear, f"take, to, {self._start(linear, 'weight')}")
            yield from where(self._wanted(linear), [weight, *self._taken(linear, "bias", linear.outputs)])
        if not self.stages.convs:
            return
        yield f"if (from >= {len(self.stages.convs)})"
        yield "    return;"
        for stage in self.stages.convs:
            yield from self._conv_begin(stage)
        biases = {stage.number: f"out + {self._start(stage, 'bias')}" for stage in self.stages.convs}
        yield from self._together(self._backward_samples(biases))
        for stage in self.stages.convs:
            yield from where(self._wanted(stage), self._conv_end(stage))

    def _conv_begin(self, stage: ConvStage) -> Iterator[str]:
        n, weight = stage.number, self._weight(stage)
        yield f"memset(out + {self._start(stage, 'bias')}, 0, {stage.outputs} * sizeof(float));"
        if self._back_by_winograd(stage):
            yield f"winograd_weights({stage.name}, {weight}, shared->backward{n}, 0);"
            return
        yield f"memset(shared->grad_weight{n}, 0, sizeof shared->grad_weight{n});"
        if not stage.first:
            yield f"pack_backward({stage.name}, {weight}, shared->backward{n});"

    def _conv_end(self, stage: ConvStage) -> Iterator[str]:
        n, out = stage.number, f"out + {self._start(stage, 'weight')}"
        if self._back_by_winograd(stage):
            yield f"winograd_weight_gradient({stage.name}, shared->sums{n}, {out});"
        else:
            order = "forward" if stage.first else "backward"
            yield f"unpack_{order}({stage.name}, shared->grad_weight{n}, {out});"
        for kind, size in (("weight", stage.patch * stage.outputs), ("bias", stage.outputs)):
            yield from self._taken(stage, kind, size)

    def _taken(self, stage: ConvStage | LinearStage, kind: str, size: int) -> Iterator[str]:
        start = self._start(stage, kind)
        yield "if (take)"
        yield f"    take(to, out + {start}, {start}, {size});"

    def _linear_relu_gradient(self, stage: LinearStage) -> Iterator[str]:
        if stage.relu:
            mask = self._mask(stage.mask, stage.outputs)
            yield from self._each_sample(
                [f"relu_dropout_gradient({stage.outputs}, sample->{stage.name}, {mask}, sample->{grad_of(stage)});"]
            )

    def _linear_weight_gradient(self, stage: LinearStage, taken: str = "0, 0, 0") -> str:
        return (
            f"linear_weight_gradient({stage.name}, batch, samples->{grad_of(stage)}, {STRIDE}, "
            f"samples->{self._input(stage)}, {STRIDE}, "
            f"out + {self._start(stage, 'weight')}, out + {self._start(stage, 'bias')}, {taken});"
        )

    def _linear_input_gradient(self, stage: LinearStage) -> str:
        return (
            f"linear_input_gradient({stage.name}, batch, samples->{grad_of(stage)}, {STRIDE}, {self._weight(stage)}, "
            f"samples->grad_{self._input(stage)}, {STRIDE});"
        )

    def _backward_samples(self, biases: Mapping[int, str]) -> Iterator[str]:
        """Writes the convolutions' backward pass of the samples from `first` to `end - 1`.

        :param biases: the place where each convolution adds its gradient by the bias.
        """
        flat = f"shared->grad_y + (i - first) * {self.stages.linears[0].inputs}"
        line = f"unflatten(sample->grad_flat, {self._flat_mask}, {flat}, {self._flat_shape});"
        yield from self._each_sample([line], "first", "end")
        for stage in reversed(self.stages.convs):
            n, number = stage.number, self._number(stage)
            relu = f"relu_gradient({stage.name}, sample->alive{n}, {self._conv_grad(stage)}, {biases[n]});"
            lines = [*self._each_sample([relu], "first", "end")]
            if self._back_by_winograd(stage):
                lines += self._winograd_backward(stage)
            else:
                lines += self._each_sample([self._conv_weight_gradient(stage)], "first", "end")
            yield from where(f"from <= {number}", lines)
            if not stage.first and not self._back_by_winograd(stage):
                lines = [*self._each_sample(self._conv_input_gradient(stage), "first", "end")]
                yield from where(f"from < {number}", lines)

    def _winograd_backward(self, stage: ConvStage) -> Iterator[str]:
        n, down = stage.number, f"from < {self._number(stage)}"
        yield from where(down, [f"memset(shared->grad_x{n}, 0, sizeof shared->grad_x{n});"])
        yield (
            f"winograd_backward({stage.name}, end - first, samples[first].x{n}, {STRIDE}, samples[first].alive{n}, "
            f"{WORD_STRIDE}, {self._outputs(stage, 'shared->grad_x', 'shared->grad_y')}, {self._grad_size(stage)}, "
            f"shared->backward{n}, shared->x_points{n}, shared->y_points{n}, shared->rows, shared->sums{n}, "
            f"first == 0, {down} ? shared->grad_x{n} : 0, {stage.input_size});"
        )

    def _conv_weight_gradient(self, stage: ConvStage) -> str:
        n, seen = stage.number, self._seen(stage)
        if stage.first:
            return f"first_weight_gradient({stage.name}, {seen}, shared->rows, shared->grad_weight{n});"
        entries = f"shared->entries{n}, shared->counts{n}"
        return f"conv_weight_gradient({stage.name}, {seen}, shared->grad_weight{n}, {entries});"

    def _conv_input_gradient(self, stage: ConvStage) -> Iterator[str]:
        n, grad = stage.number, self._conv_grad(stage)
        grad_x = f"shared->grad_x{n} + (i - first) * {stage.input_size}"
        yield f"memset({grad_x}, 0, sizeof(float) * {stage.input_size});"
        yield f"conv_input_gradient({stage.name}, shared->backward{n}, sample->alive{n}, {grad}, {grad_x});"

    def _back_by_winograd(self, stage: ConvStage) -> bool:
        return stage.back_by_winograd

    def _seen(self, stage: ConvStage) -> str:
        return f"{self._inputs(stage)}, sample->alive{stage.number}, {self._conv_grad(stage)}"

    def _conv_grad(self, stage: ConvStage) -> str:
        place = self._outputs(stage, "shared->grad_x", "shared->grad_y")
        return f"{place} + (i - first) * {self._grad_size(stage)}"

    def _grad_size(self, stage: ConvStage) -> int:
        """Returns the number of floats from one sample's gradient by a stage's outputs to the next."""
        following = self._following(stage)
        return following.input_size if following else self.stages.linears[0].inputs

    def _together(self, lines: Iterator[str]) -> Iterator[str]:
        """Writes what the convolutions do with the samples from `first` to `end - 1`."""
        yield "for (int first = 0, end; first < batch; first = end) {"
        yield f"    end = first + {self._images} < batch ? first + {self._images} : batch;"
        yield from (f"    {line}" for line in lines)
        yield "}"

    def _each_sample(self, lines: Iterator[str] | list[str], first: str = "0", end: str = "batch") -> Iterator[str]:
        yield f"for (int i = {first}; i < {end}; i++) {{"
        yield "    Sample *const sample = samples + i;"
        image = f"images + (size_t)i * {math.prod(self.model.input_shape)}"
        for line in lines:
            yield f"    {line.replace('image,', f'{image},')}"
        yield "}"

    def _following(self, stage: ConvStage) -> ConvStage | None:
        return self.stages.convs[stage.number] if stage.number < len(self.stages.convs) else None

    @property
    def _images(self) -> int:
        """The number of samples that go through the convolutions together."""
        return max((stage.images for stage in self.stages.convs), default=1)

    @property
    def _flat_y(self) -> str:
        return f"shared->y + (i - first) * {self.stages.linears[0].inputs}"

    def _number(self, stage: ConvStage | LinearStage) -> int:
        return (*self.stages.convs, *self.stages.linears).index(stage)

    def _wanted(self, stage: ConvStage | LinearStage) -> str:
        number = self._number(stage)
        return f"from <= {number} && {number} < until"

    def _inputs(self, stage: ConvStage) -> str:
        return "image" if stage.first and not stage.conv.padding else f"sample->x{stage.number}"

    def _outputs(self, stage: ConvStage, inner: str, last: str) -> str:
        """Returns the place of a stage's outputs, or of their gradients: inside the next stage's padded inputs."""
        following = self._following(stage)
        if following is None:
            return last
        inside = following.conv.padding * (following.padded[1] + 1) * stage.outputs
        return f"{inner}{following.number} + {inside}"

    def _input(self, stage: LinearStage) -> str:
        index = self.stages.linears.index(stage)
        return self.stages.linears[index - 1].name if index else "flat"

    @property
    def _flat_shape(self) -> str:
        last = self.stages.convs[-1]
        return f"{math.prod(last.pooled)}, {last.outputs}"

    @property
    def _flat_mask(self) -> str:
        return self._mask(self.stages.flat_mask, self.stages.linears[0].inputs)

    def _mask(self, mask: int | None, size: int) -> str:
        return "0" if mask is None else f"masks ? masks[{mask}] + (size_t)i * {size} : 0"

    def _start(self, stage: ConvStage | LinearStage, kind: str) -> int:
        of_head = kind == "bias" and is_linear(self.model.layout)
        return self.model.layout.slices[PRIOR if of_head else f"{stage.name}.{kind}"].start

    def _weight(self, stage: ConvStage | LinearStage) -> str:
        return f"params + {self._start(stage, 'weight')}"

    def _bias(self, stage: ConvStage | LinearStage) -> str:
        return f"params + {self._start(stage, 'bias')}"


def where(condition: str, lines: Iterable[str]) -> Iterator[str]:
    """Yields the lines under an `if`; nothing if there are no lines."""
    lines = [f"    {line}" for line in lines]
    if lines:
        yield from (f"if ({condition}) {{", *lines, "}")


def grad_of(stage: LinearStage) -> str:
    """Returns the field of the gradient by a layer's outputs; for the logits it is their own field."""
    return f"grad_{stage.name}" if stage.relu else stage.name


def _struct(name: str, fields: Iterator[str]) -> str:
    return "\n".join(["typedef struct {", *(f"    {field} ALIGNED;" for field in fields), f"}} {name};"])


def function(name: str, more: str, lines: Iterator[str]) -> str:
    """Writes a static C function that takes a batch's arguments.

    :param more: further arguments, each with a comma before it.
    """
    arguments = "const float *params, const float *images, int batch, const float *const *masks"
    head = f"static void {name}({arguments}, Sample *samples, Shared *shared{more})"
    return "\n".join([head, "{", *(f"    {line}" for line in lines), "}"])


SCRATCH = """
#define SPLIT_SCRATCH Shared *const shared = scratch; Sample *const samples = (Sample *)(shared + 1);

size_t scratch_bytes(int batch) {{ return sizeof(Shared) + batch * sizeof(Sample); }}
"""

_ENTRY = """\
/* `scratch` is aligned to 64 bytes, and holds zeros when it is first used. Returns the first sample whose label is no
 * class, or -1. With `take`, the gradient goes there layer by layer, and `params` may change meanwhile where it was
 * taken; `out` is then memory for it. */
int gradient(const float *params, const float *images, const int64_t *labels, int batch, const float *const *masks,
             int from, int until, Take *take, void *to, float *out, float *loss, void *scratch)
{{
    SPLIT_SCRATCH
    forward(params, images, batch, masks, samples, shared, 0);
    const int wrong = cross_entropy(batch, {classes}, samples->{logits}, {stride}, labels, loss);
    if (wrong < 0)
        backward(params, images, batch, masks, samples, shared, from, until, take, to, out);
    return wrong;
}}
"""

LOGITS = """
/* The logits alone, or the first half of a gradient under a loss that the caller computes: `slopes` are then the loss's
 * derivative by them. Nothing else may use the scratch memory in between. From a later layer than 0 on: of the images
 * of the call before, whose `params` were the same below that layer. */
void logits(const float *params, const float *images, int batch, const float *const *masks, int from, float *out,
            void *scratch)
{{
    SPLIT_SCRATCH
    forward(params, images, batch, masks, samples, shared, from);
    for (int i = 0; i < batch; i++)
        memcpy(out + (size_t)i * {classes}, samples[i].{logits}, sizeof(float) * {classes});
}}
"""

_SLOPES = """
void gradient_of_slopes(const float *params, const float *images, int batch, const float *const *masks,
                        const float *slopes, int from, int until, float *out, void *scratch)
{{
    SPLIT_SCRATCH
    for (int i = 0; i < batch; i++)
        memcpy(samples[i].{logits}, slopes + (size_t)i * {classes}, sizeof(float) * {classes});
    backward(params, images, batch, masks, samples, shared, from, until, 0, 0, out);
}}
"""
