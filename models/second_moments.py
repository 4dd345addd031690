"""Defines a detector whose parameters are second moments, of vectors and windows of series: one linear map of a sample.

A sample of C channels and T steps becomes z by the orthonormal DCT-II of each channel over time. The parameters are a
matrix W_t for each of the T frequencies, and the reconstruction of z_t is W_t z_t / `GAIN`. At W = 0 the gradient of
the mean squared error is the mean of z_t z_t^T times -2 / (values GAIN). So one step of gradient descent from zero
makes the parameters a multiple of the second moments of a device's samples, and a sum of updates is their sum. Moments
between frequencies are left out: for steady signals they are near zero, and noise grows with the number of values.

The task ends with the projector onto the leading directions (`hushfleet.methods.second_moments`) as W / `GAIN`. A
sample's reconstruction error is then its squared distance from these.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from hushfleet.errors import BadInput
from hushfleet.learning.own_variation import cosines
from hushfleet.methods.second_moments import GAIN
from hushfleet.models.model import Model
from hushfleet.params import MOMENTS, ParamLayout

if TYPE_CHECKING:
    from torch import Tensor

_MOST_VALUES, _MOST_STEPS = 1 << 20, 1 << 11


def second_moments(classes: int | None = None, input_shape: tuple[int, int, int] = (40, 1, 1)) -> Model:
    """Makes the detector for channels x rows = C series of T steps, with T C^2 parameters; it starts at zero.

    :param classes: the number of values of a sample, as in `input_shape`. Raises `BadInput` for another number, for
        more than 2^20 parameters, which noise would hide on any fleet of boards, and for more than 2,048 steps, whose
        transform would be too large a graph.
    """
    values, steps = math.prod(input_shape), input_shape[-1]
    if classes not in (None, values):
        raise BadInput(f"model.name = 'second-moments': {classes} outputs, and a sample has {values} values")
    if steps > _MOST_STEPS:
        raise BadInput(
            f"model.name = 'second-moments' takes series of at most {_MOST_STEPS:,} steps, not of {steps:,}; cut "
            "them into shorter windows, or set features = 'sound:log-mel' for sound"
        )
    series = values // steps
    if (found := steps * series**2) > _MOST_VALUES:
        raise BadInput(
            f"model.name = 'second-moments': {steps} blocks of {series} x {series} second moments are {found} values, "
            f"above {_MOST_VALUES}; take fewer channels, for example wider bands of a spectrum"
        )
    layout = ParamLayout((MOMENTS,), ((steps, series, series),))
    return Model("second-moments", "Hushfleet", input_shape, values, layout, (), _reconstructed, starts_at_zero=True)


def _reconstructed(tensors: Mapping[str, Tensor], x: Tensor, dropout: Sequence[Tensor]) -> Tensor:
    import torch

    moments = tensors[MOMENTS]
    steps, series, _ = moments.shape
    basis = torch.from_numpy(cosines(steps))
    z = (x.reshape(-1, series, steps) @ basis.T).permute(2, 0, 1)
    return ((z @ moments).permute(1, 2, 0) @ (basis / GAIN)).flatten(1)
