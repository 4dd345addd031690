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
from hushfleet.models.native.stages import WINOGRAD_POINTS, ConvStage, LinearStage, Stages, VectorUnit, stages_of
from hushfleet.objectives import CROSS_ENTROPY, Objective
from hushfleet.params import PRIOR, is_linear

STRIDE = "sizeof(Sample) / sizeof(float)"


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
        yield function("backward", ", int from, int until, float *out", self._backward())
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
        rows = 0
        for stage in self.stages.convs:
            n, weights, channels = stage.number, stage.patch * stage.outputs, stage.input_shape[0]
            yield f"float forward{n}[{weights}]"
            yield f"float grad_weight{n}[{weights}]"
            if not stage.first:
                yield f"float backward{n}[{weights}]"
                yield f"float grad_x{n}[{stage.input_size}]"
                yield f"Entry entries{n}[{stage.outputs * stage.tiles(self.target).band * stage.pooled[1]}]"
                yield f"int counts{n}[{stage.outputs}]"
            if stage.winograd_rows:
                yield f"float points{n}[{WINOGRAD_POINTS * channels * stage.outputs}]"
                yield f"float x_points{n}[{WINOGRAD_POINTS * channels * stage.winograd_tiles}]"
                yield f"float y_points{n}[{WINOGRAD_POINTS * stage.outputs * stage.winograd_tiles}]"
            rows = max(rows, max(stage.winograd_rows, stage.window) * stage.grid[1] * stage.outputs)
        yield f"float rows[{rows}]"
        yield f"float y[{self.stages.linears[0].inputs}]"
        yield f"float grad_y[{self.stages.linears[0].inputs}]"

    def _forward(self) -> Iterator[str]:
        yield from where(f"from < {max(1, len(self.stages.convs))}", self._forward_convs())
        for linear in self.stages.linears:
            yield from where(f"from <= {self._number(linear)}", self._forward_linear(linear))

    def _forward_convs(self) -> Iterator[str]:
        for stage in self.stages.convs:
            n = stage.number
            yield f"pack_forward({stage.name}, {self._weight(stage)}, shared->forward{n});"
            if stage.winograd_rows:
                yield f"winograd_weights({stage.name}, shared->forward{n}, shared->points{n});"
        yield from self._each_sample(self._forward_sample())

    def _forward_linear(self, stage: LinearStage) -> Iterator[str]:
        yield (
            f"linear_forward({stage.name}, batch, samples->{self._input(stage)}, {STRIDE}, "
            f"{self._weight(stage)}, {self._bias(stage)}, samples->{stage.name}, {STRIDE});"
        )
        if stage.relu:
            mask = self._mask(stage.mask, stage.outputs)
            yield from self._each_sample([f"relu_dropout({stage.outputs}, sample->{stage.name}, {mask});"])

    def _forward_sample(self) -> Iterator[str]:
        if not self.stages.convs:
            yield "memcpy(sample->flat, image, sizeof sample->flat);"
            return
        for stage in self.stages.convs:
            n, y = stage.number, self._outputs(stage, "sample->x", "shared->y")
            if stage.first and stage.conv.padding:
                _, height, width = stage.input_shape
                yield f"pad_image({stage.name}, image, {height}, {width}, {stage.conv.padding}, sample->x{n});"
            if stage.winograd_rows:
                yield (
                    f"winograd_forward({stage.name}, {self._inputs(stage)}, shared->points{n}, {self._bias(stage)}, "
                    f"shared->x_points{n}, shared->y_points{n}, shared->rows, {y}, sample->alive{n});"
                )
            else:
                yield (
                    f"conv_forward({stage.name}, {self._inputs(stage)}, shared->forward{n}, {self._bias(stage)}, "
                    f"shared->rows, {y}, sample->alive{n});"
                )
        yield f"flatten(shared->y, {self._flat_mask}, sample->flat, {self._flat_shape});"

    def _backward(self) -> Iterator[str]:
        for linear in reversed(self.stages.linears):
            number = self._number(linear)
            yield from where(f"from <= {number}", self._linear_relu_gradient(linear))
            yield from where(self._wanted(linear), [self._linear_weight_gradient(linear)])
            yield from where(f"from < {number}", [self._linear_input_gradient(linear)])
        if not self.stages.convs:
            return
        yield f"if (from >= {len(self.stages.convs)})"
        yield "    return;"
        for stage in self.stages.convs:
            yield f"memset(shared->grad_weight{stage.number}, 0, sizeof shared->grad_weight{stage.number});"
            yield f"memset(out + {self._start(stage, 'bias')}, 0, {stage.outputs} * sizeof(float));"
            if not stage.first:
                yield f"pack_backward({stage.name}, {self._weight(stage)}, shared->backward{stage.number});"
        biases = {stage.number: f"out + {self._start(stage, 'bias')}" for stage in self.stages.convs}
        yield from self._each_sample(self._backward_sample(biases))
        for stage in self.stages.convs:
            order = "forward" if stage.first else "backward"
            out = f"out + {self._start(stage, 'weight')}"
            yield f"unpack_{order}({stage.name}, shared->grad_weight{stage.number}, {out});"

    def _linear_relu_gradient(self, stage: LinearStage) -> Iterator[str]:
        if stage.relu:
            mask = self._mask(stage.mask, stage.outputs)
            yield from self._each_sample(
                [f"relu_dropout_gradient({stage.outputs}, sample->{stage.name}, {mask}, sample->{grad_of(stage)});"]
            )

    def _linear_weight_gradient(self, stage: LinearStage) -> str:
        return (
            f"linear_weight_gradient({stage.name}, batch, samples->{grad_of(stage)}, {STRIDE}, "
            f"samples->{self._input(stage)}, {STRIDE}, "
            f"out + {self._start(stage, 'weight')}, out + {self._start(stage, 'bias')});"
        )

    def _linear_input_gradient(self, stage: LinearStage) -> str:
        return (
            f"linear_input_gradient({stage.name}, batch, samples->{grad_of(stage)}, {STRIDE}, {self._weight(stage)}, "
            f"samples->grad_{self._input(stage)}, {STRIDE});"
        )

    def _backward_sample(self, biases: Mapping[int, str]) -> Iterator[str]:
        """:param biases: the place where each convolution adds its gradient by the bias."""
        yield f"unflatten(sample->grad_flat, {self._flat_mask}, shared->grad_y, {self._flat_shape});"
        for stage in reversed(self.stages.convs):
            number = self._number(stage)
            yield from where(f"from <= {number}", self._conv_gradient(stage, biases[stage.number]))
            if not stage.first:
                yield from where(f"from < {number}", self._conv_input_gradient(stage))

    def _conv_gradient(self, stage: ConvStage, bias: str) -> Iterator[str]:
        n, seen = stage.number, self._seen(stage)
        yield f"relu_gradient({stage.name}, sample->alive{n}, {self._conv_grad(stage)}, {bias});"
        if stage.first:
            yield f"first_weight_gradient({stage.name}, {seen}, shared->rows, shared->grad_weight{n});"
        else:
            entries = f"shared->entries{n}, shared->counts{n}"
            yield f"conv_weight_gradient({stage.name}, {seen}, shared->grad_weight{n}, {entries});"

    def _conv_input_gradient(self, stage: ConvStage) -> Iterator[str]:
        n, grad = stage.number, self._conv_grad(stage)
        yield f"memset(shared->grad_x{n}, 0, sizeof shared->grad_x{n});"
        yield f"conv_input_gradient({stage.name}, shared->backward{n}, sample->alive{n}, {grad}, shared->grad_x{n});"

    def _seen(self, stage: ConvStage) -> str:
        return f"{self._inputs(stage)}, sample->alive{stage.number}, {self._conv_grad(stage)}"

    def _conv_grad(self, stage: ConvStage) -> str:
        return self._outputs(stage, "shared->grad_x", "shared->grad_y")

    def _each_sample(self, lines: Iterator[str] | list[str]) -> Iterator[str]:
        yield "for (int i = 0; i < batch; i++) {"
        yield "    Sample *const sample = samples + i;"
        image = f"images + (size_t)i * {math.prod(self.model.input_shape)}"
        for line in lines:
            yield f"    {line.replace('image,', f'{image},')}"
        yield "}"

    def _following(self, stage: ConvStage) -> ConvStage | None:
        return self.stages.convs[stage.number] if stage.number < len(self.stages.convs) else None

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
 * class, or -1. */
int gradient(const float *params, const float *images, const int64_t *labels, int batch, const float *const *masks,
             int from, int until, float *out, float *loss, void *scratch)
{{
    SPLIT_SCRATCH
    forward(params, images, batch, masks, samples, shared, 0);
    const int wrong = cross_entropy(batch, {classes}, samples->{logits}, {stride}, labels, loss);
    if (wrong < 0)
        backward(params, images, batch, masks, samples, shared, from, until, out);
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
    backward(params, images, batch, masks, samples, shared, from, until, out);
}}
"""
