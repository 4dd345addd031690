"""Writes the parts of a program for sums of each sample's clipped or squared gradient.

A sample's gradient of the convolutions is stored, that of the linear layers never (see kernels/singles.h).
"""

from __future__ import annotations

from collections.abc import Iterator

from hushfleet.models.native.stages import ConvStage
from hushfleet.models.native.writer import LOGITS, SCRATCH, ProgramWriter, function, grad_of, where


class SinglesWriter(ProgramWriter):
    """Writes `singles_of_slopes`, for any objective, instead of a batch's gradient; see its comment."""

    kernels = (*ProgramWriter.kernels, "singles.h")

    def parts(self) -> Iterator[str]:
        """Yields the parts of the C source, in order."""
        yield from self._head()
        more = ", int from, int until, int normed, double clip_norm, double *norms, float *out"
        yield function("single_backward", more, self._single_backward())
        yield from self._entries(SCRATCH, LOGITS, _SINGLE_SLOPES)

    def _shared(self) -> Iterator[str]:
        yield from super()._shared()
        for stage in self.stages.convs:
            yield f"float sum_weight{stage.number}[{stage.patch * stage.outputs}]"
            yield f"float sum_bias{stage.number}[{stage.outputs}]"
            yield f"float grad_bias{stage.number}[{stage.outputs}]"

    def _single_backward(self) -> Iterator[str]:
        """Writes the backward pass. Without `norms`, squares are summed; without `out`, only norms are computed, and a
        second call with `normed` computes the sum from the stored values."""
        convs = self.stages.convs
        for linear in reversed(self.stages.linears):
            number = self._number(linear)
            yield from where(f"from <= {number}", self._linear_relu_gradient(linear))
            yield from where(f"from < {number}", [self._linear_input_gradient(linear)])
        yield from where(f"from < {len(convs)}", self._sums_begin())
        yield from self._each_sample(self._single_sample())
        yield "if (!out)"
        yield "    return;"
        for linear in self.stages.linears:
            yield from where(self._wanted(linear), [self._linear_weight_gradient(linear)])
        yield from where(f"from < {len(convs)}", self._sums_end())

    def _sums_begin(self) -> Iterator[str]:
        for stage in self.stages.convs:
            yield f"memset(shared->sum_weight{stage.number}, 0, sizeof shared->sum_weight{stage.number});"
            yield f"memset(shared->sum_bias{stage.number}, 0, sizeof shared->sum_bias{stage.number});"
            if not stage.first:
                yield f"pack_backward({stage.name}, {self._weight(stage)}, shared->backward{stage.number});"

    def _sums_end(self) -> Iterator[str]:
        for stage in self.stages.convs:
            n, order = stage.number, "forward" if stage.first else "backward"
            yield f"unpack_{order}({stage.name}, shared->sum_weight{n}, out + {self._start(stage, 'weight')});"
            yield f"memcpy(out + {self._start(stage, 'bias')}, shared->sum_bias{n}, sizeof shared->sum_bias{n});"

    def _single_sample(self) -> Iterator[str]:
        convs, linears = self.stages.convs, self.stages.linears
        fields = [(kind, stage) for stage in convs for kind in ("weight", "bias")]
        yield from where(f"from < {len(convs)}", self._single_gradient())
        yield from where("!norms", self._squared_sample(fields))
        yield from where("!normed", self._norm(fields))
        yield "if (!out)"
        yield "    continue;"
        yield "const float factor = norms[i] > clip_norm ? (float)(clip_norm / norms[i]) : 1;"
        for linear in linears:
            yield f"scale({linear.outputs}, factor, sample->{grad_of(linear)});"
        for kind, stage in fields:
            one, total = f"shared->grad_{kind}{stage.number}", f"shared->sum_{kind}{stage.number}"
            yield from where(self._wanted(stage), [f"add_scaled({_count(kind, stage)}, factor, {one}, {total});"])

    def _norm(self, fields: list[tuple[str, ConvStage]]) -> Iterator[str]:
        yield "double squares = 0;"
        for linear in self.stages.linears:
            squares = f"linear_squares({linear.name}, sample->{grad_of(linear)}, sample->{self._input(linear)})"
            yield from where(self._wanted(linear), [f"squares += {squares};"])
        for kind, stage in fields:
            squares = f"sum_squares({_count(kind, stage)}, shared->grad_{kind}{stage.number})"
            yield from where(self._wanted(stage), [f"squares += {squares};"])
        yield "norms[i] = sqrt(squares);"

    def _squared_sample(self, fields: list[tuple[str, ConvStage]]) -> Iterator[str]:
        for linear in self.stages.linears:
            yield f"square({linear.outputs}, sample->{grad_of(linear)});"
            yield f"square({linear.inputs}, sample->{self._input(linear)});"
        for kind, stage in fields:
            one, total = f"shared->grad_{kind}{stage.number}", f"shared->sum_{kind}{stage.number}"
            yield from where(self._wanted(stage), [f"add_squares({_count(kind, stage)}, {one}, {total});"])
        yield "continue;"

    def _single_gradient(self) -> Iterator[str]:
        """Writes the gradient of one sample by the convolutions' weights and biases."""
        convs = self.stages.convs
        if not convs:
            return
        for stage in convs:
            for field in (f"grad_weight{stage.number}", f"grad_bias{stage.number}"):
                yield f"memset(shared->{field}, 0, sizeof shared->{field});"
        yield "const int first = i, end = i + 1;"
        yield from self._backward_samples({stage.number: f"shared->grad_bias{stage.number}" for stage in convs})

    def _back_by_winograd(self, stage: ConvStage) -> bool:
        """Says no: it would take the transforms of all weights for each sample."""
        return False


def _count(kind: str, stage: ConvStage) -> int:
    return stage.outputs if kind == "bias" else stage.patch * stage.outputs


_SINGLE_SLOPES = """
/* The sum of the samples' gradients, each scaled down to the norm `clip_norm` if it is longer; `norms` before that.
 * Without `out` only those, and the scratch memory stays ready for another call: for the sum by these norms with
 * `normed`, of fewer layers if need be. Without `norms` the sum of the squares of the samples' gradients, entry by
 * entry. */
void singles_of_slopes(const float *params, const float *images, int batch, const float *const *masks,
                       const float *slopes, int from, int until, int normed, double clip_norm, double *norms,
                       float *out, void *scratch)
{{
    SPLIT_SCRATCH
    for (int i = 0; i < batch; i++)
        memcpy(samples[i].{logits}, slopes + (size_t)i * {classes}, sizeof(float) * {classes});
    single_backward(params, images, batch, masks, samples, shared, from, until, normed, clip_norm, norms, out);
}}
"""
