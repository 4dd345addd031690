"""Expresses backward operators by forward ones, so that a gradient becomes a graph of plain ONNX.

ONNX has no gradient operators. PyTorch's core decompositions cover most; these cover the rest, or use fewer or better
conditioned steps. Convolutions are written for two dimensions; convolutions over one dimension are converted to two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from onnxscript import opset18 as op
from torch import Tensor
from torch._decomp import core_aten_decompositions

aten = torch.ops.aten

_MANY_PIXELS = 60  # measured: with fewer, the weight's gradient is as fast as one convolution


def gradient_decompositions() -> dict[Any, Callable[..., Any]]:
    """Returns the decomposition table with which a traced gradient exports to ONNX."""
    table = dict(core_aten_decompositions())
    table[aten.convolution_backward.default] = convolution_backward
    table[aten.avg_pool2d_backward.default] = avg_pool2d_backward
    table[aten._adaptive_avg_pool2d_backward.default] = adaptive_avg_pool2d_backward
    table[aten.empty_permuted.default] = lambda size, order, **_: torch.zeros(size)
    table[aten._trilinear.default] = trilinear
    table[aten.native_group_norm.default] = group_norm
    table[aten.native_group_norm_backward.default] = group_norm_backward
    for operator in onnx_translations():
        table.pop(operator, None)
    return table


def _narrow(wide: Tensor | None) -> Tensor | None:
    return None if wide is None else wide.squeeze(2)


def convolution_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Returns the gradients of a convolution by input, weight and bias: convolutions or matrix products, and a sum."""
    if transposed or weight.ndim > 4:
        raise ValueError("only convolutions over one or two dimensions that are not transposed can be exported")
    if weight.ndim == 3:  # over one dimension: an image of one row
        grad_x, grad_weight, grad_bias = convolution_backward(
            grad.unsqueeze(2),
            x.unsqueeze(2),
            weight.unsqueeze(2),
            bias_sizes,
            stride=[1, *stride],
            padding=[0, *padding],
            dilation=[1, *dilation],
            transposed=False,
            output_padding=[0, 0],
            groups=groups,
            mask=mask,
        )
        return _narrow(grad_x), _narrow(grad_weight), grad_bias
    kernel = weight.shape[2:]
    grad_x = grad_weight = grad_bias = None
    if mask[0]:
        # The rows that the stride skipped; the transposed convolution must add them to get x's size.
        extra = [
            x.shape[2 + i] - ((grad.shape[2 + i] - 1) * stride[i] - 2 * padding[i] + dilation[i] * (kernel[i] - 1) + 1)
            for i in (0, 1)
        ]
        grad_x = aten.convolution(grad, weight, None, stride, padding, dilation, True, extra, groups)
    if mask[1] and groups == 1 and x.shape[1] > 1 and grad.shape[2] * grad.shape[3] >= _MANY_PIXELS:
        grad_weight = _weight_gradient(grad, x, kernel, stride, padding, dilation)
    elif mask[1]:
        # In each group the batch takes the place of the channels; stride and dilation swap roles.
        swapped = x.transpose(0, 1)
        if groups > 1:
            by_group = x.reshape(-1, groups, x.shape[1] // groups, *x.shape[2:]).permute(2, 1, 0, 3, 4)
            swapped = by_group.reshape(by_group.shape[0], -1, *x.shape[2:])
        grad_weight = aten.convolution(
            swapped, grad.transpose(0, 1), None, dilation, padding, stride, False, [0, 0], groups
        ).transpose(0, 1)[:, :, : kernel[0], : kernel[1]]
    if mask[2]:
        grad_bias = grad.sum((0, 2, 3))
    return grad_x, grad_weight, grad_bias


def _weight_gradient(
    grad: Tensor,
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    """Multiplies, for each kernel row, the gradient with the pixels that the row met: `[O, B P Q] @ [B P Q, C K]`.

    A single convolution, with the batch in the place of the channels, is a product with only as many columns as the
    kernel has places, but as many terms as the batch has pixels: for large images ONNX Runtime needed half of a step
    for it. All rows at once would take K times the memory.
    """
    high, wide = grad.shape[2:]
    padded = aten.constant_pad_nd(x, [padding[1], padding[1], padding[0], padding[0]]) if any(padding) else x
    pixels = padded.transpose(0, 1)
    flat = grad.transpose(0, 1).reshape(grad.shape[1], -1)
    rows = []
    for top in range(0, kernel[0] * dilation[0], dilation[0]):
        row = pixels[:, :, top : top + (high - 1) * stride[0] + 1 : stride[0]]
        lefts = range(0, kernel[1] * dilation[1], dilation[1])
        met = [row[:, :, :, left : left + (wide - 1) * stride[1] + 1 : stride[1]] for left in lefts]
        product = flat @ torch.stack(met, 1).reshape(x.shape[1] * kernel[1], -1).transpose(0, 1)
        rows.append(product.reshape(-1, x.shape[1], kernel[1]))
    return torch.stack(rows, 2)


def avg_pool2d_backward(
    grad: Tensor,
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor: int | None,
) -> Tensor:
    """Returns the gradient of average pooling by its input: a transposed convolution with equal weights."""
    if ceil_mode:
        raise ValueError("average pooling with ceil_mode cannot be exported")
    if any(padding) and not count_include_pad:  # windows at an edge are means of fewer values
        ones = torch.ones(1, 1, *x.shape[2:])
        grad = grad / aten.avg_pool2d(ones, kernel, stride or kernel, padding, False, True)
    channels, stride = x.shape[1], stride or kernel
    weight = torch.full((channels, 1, *kernel), 1 / (divisor or math.prod(kernel)))
    sizes = zip(x.shape[2:], grad.shape[2:], kernel, stride, padding, strict=True)
    extra = [size - ((count - 1) * step - 2 * pad + width) for size, count, width, step, pad in sizes]
    return aten.convolution(grad, weight, None, stride, padding, [1, 1], True, extra, channels)


def adaptive_avg_pool2d_backward(grad: Tensor, x: Tensor) -> Tensor:
    """Decomposes the backward operator into that of average pooling, if all windows have one size."""
    if x.shape[2] % grad.shape[2] or x.shape[3] % grad.shape[3]:
        raise ValueError(f"adaptive pooling of {list(x.shape[2:])} to {list(grad.shape[2:])}: must divide evenly")
    kernel = [x.shape[2] // grad.shape[2], x.shape[3] // grad.shape[3]]
    return avg_pool2d_backward(grad, x, kernel, kernel, [0, 0], False, True, None)


def trilinear(
    first: Tensor,
    second: Tensor,
    third: Tensor,
    expand_first: Sequence[int],
    expand_second: Sequence[int],
    expand_third: Sequence[int],
    summed: Sequence[int],
    unroll: int = 1,
) -> Tensor:
    """Returns the sum over some axes of the product of three tensors, each with new axes: the core of `nn.Bilinear`."""
    for axis in expand_first:
        first = first.unsqueeze(axis)
    for axis in expand_second:
        second = second.unsqueeze(axis)
    for axis in expand_third:
        third = third.unsqueeze(axis)
    return (first * second * third).sum(list(summed))


def group_norm(
    x: Tensor, weight: Tensor, bias: Tensor, batch: int, channels: int, pixels: int, groups: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns GroupNorm's output, and the mean and reciprocal deviation `[N, G]` that its backward reads."""
    grouped = x.reshape(batch, groups, -1)
    mean = grouped.mean(2, keepdim=True)
    centered = grouped - mean
    scale = torch.rsqrt((centered * centered).mean(2, keepdim=True) + eps)
    normed = (centered * scale).reshape(batch, channels, pixels)
    out = normed * weight.reshape(channels, 1) + bias.reshape(channels, 1)
    return out.reshape(x.shape), mean.reshape(batch, groups), scale.reshape(batch, groups)


def group_norm_backward(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    scale: Tensor,
    weight: Tensor,
    batch: int,
    channels: int,
    pixels: int,
    groups: int,
    mask: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of GroupNorm. With n = normed input and g = grad * weight, the one by the input is
    scale * (g - mean(g) - n * mean(g * n)), with means over a group. PyTorch's own decomposition expands the
    product, and then subtracts large terms from each other.
    """
    scale = scale.reshape(batch, groups, 1)
    normed = (x.reshape(batch, groups, -1) - mean.reshape(batch, groups, 1)) * scale
    grad = grad.reshape(batch, channels, pixels)
    grad_weight = (grad * normed.reshape(batch, channels, pixels)).sum((0, 2))
    inner = (grad * weight.reshape(channels, 1)).reshape(batch, groups, -1)
    grad_x = scale * (inner - inner.mean(2, keepdim=True) - normed * (inner * normed).mean(2, keepdim=True))
    return grad_x.reshape(x.shape), grad_weight, grad.sum((0, 2))


def onnx_max_pool2d(
    x: Any,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0, 0),
    dilation: Sequence[int] = (1, 1),
    ceil_mode: bool = False,
) -> Any:
    """Translates to MaxPool with ONNX's indices over the whole tensor; PyTorch's indices start again in every image.

    The exporter's own translation pools a second time, pixel by pixel, to convert them. This is not needed:
    only the backward below reads the indices.
    """
    return op.MaxPool(
        x,
        kernel_shape=list(kernel_size),
        strides=list(stride or kernel_size),
        pads=[*padding, *padding],
        dilations=list(dilation),
        ceil_mode=int(ceil_mode),
    )


def onnx_max_pool2d_backward(
    grad: Any,
    x: Any,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    indices: Any,
) -> Any:
    """Adds each output's gradient to the pixel that was the maximum; also correct for overlapping windows."""
    flat: Any = op.Constant(value_ints=[-1])
    zeros = op.ConstantOfShape(op.Shape(op.Reshape(x, flat)))
    spread = op.ScatterElements(zeros, op.Reshape(indices, flat), op.Reshape(grad, flat), axis=0, reduction="add")
    return op.Reshape(spread, op.Shape(x))


def onnx_copy(target: Any, source: Any, non_blocking: bool = False) -> Any:
    """Translates `target[...] = source`; the exporter's own translation forgets that the source may be smaller."""
    return op.Expand(op.CastLike(source, target), op.Shape(target))


def onnx_translations() -> dict[Any, Callable[..., Any]]:
    """Returns operators that are translated to ONNX directly, because PyTorch's operators cannot express the result."""
    return {
        aten.copy.default: onnx_copy,
        aten.max_pool2d_with_indices.default: onnx_max_pool2d,
        aten.max_pool2d_with_indices_backward.default: onnx_max_pool2d_backward,
    }
