"""Computes order-2 scattering: a convolutional network of two fixed layers, with wavelets in place of learned filters.

Bruna and Mallat, Invariant Scattering Convolution Networks, TPAMI 2013, with J = 2 scales and L = 8 angles. The
wavelets are Morlet wavelets as in the package Kymatio (Andreux et al., JMLR 2020), cut to small kernels, so that a few
convolutions are enough; images are mirrored at their borders.

S0 = x * phi, S1 = |x * psi_a| * phi, S2 = ||x * psi_a| * psi_b| * phi with the scale of b above that of a:
1 + 16 + 64 numbers at every fourth pixel of each row and column.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hushfleet.at_need import at_need
from hushfleet.errors import BadInput
from hushfleet.models.features import synthetic
from hushfleet.models.onnx_nodes import Graph

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.nn import functional as F
else:  # takes seconds to import, and kept features need none
    torch = at_need("torch")
    F = at_need("torch.nn.functional")

ANGLES = 8
MAPS = 1 + 2 * ANGLES + ANGLES**2
SIDES = range(16, 65, 4)
RADII = (3, 6)
"""The radii of the kernels of both scales, in pixels: two standard deviations of the longer axis."""


def wavelets(scale: int) -> np.ndarray:
    """Returns the real, then the imaginary parts, float64 `[2 * 8, 1, size, size]`, each with sum zero."""
    width, slant, frequency = 0.8 * 2**scale, 4 / ANGLES, 0.75 * math.pi / 2**scale
    row, column = _grid(RADII[scale])
    parts = []
    for angle in range(ANGLES):
        theta = (ANGLES - ANGLES // 2 - 1 - angle) * math.pi / ANGLES
        along = math.cos(theta) * row + math.sin(theta) * column
        across = math.cos(theta) * column - math.sin(theta) * row
        envelope = np.exp(-(along**2 + slant**2 * across**2) / (2 * width**2))
        wave = envelope * np.exp(1j * frequency * along)
        wave -= envelope * (wave.sum() / envelope.sum())
        parts.append(wave * slant / (2 * math.pi * width**2))
    waves = np.stack(parts)
    return np.concatenate((waves.real, waves.imag))[:, None]


def low_pass(scale: int) -> np.ndarray:
    """Returns a Gaussian, sum 1, standard deviation 0.8 times 2^scale pixels, float64 `[1, 1, size, size]`."""
    width = 0.8 * 2**scale
    row, column = _grid(RADII[scale])
    bell = np.exp(-(row**2 + column**2) / (2 * width**2))
    return (bell / bell.sum())[None, None]


def _grid(radius: int) -> tuple[np.ndarray, np.ndarray]:
    row, column = np.mgrid[-radius : radius + 1, -radius : radius + 1].astype(np.float64)
    return row, column


@dataclass(frozen=True)
class Scattering:
    """Order-2 scattering of images of (channels, height, width), each channel separately."""

    image_shape: tuple[int, int, int]
    kept: int = 512

    def __post_init__(self) -> None:
        _, height, width = self.image_shape
        if height != width or height not in SIDES:
            raise BadInput(
                f"model.features = 'scattering' takes square images with sides of {SIDES[0]} to {SIDES[-1]}, multiples "
                f"of 4, not {height} x {width}; for smaller ones take 'filters', for larger ones have them resized "
                "(data.input_shape), or bring an ONNX file of your own"
            )

    @property
    def size(self) -> int:
        """The number of features of an image."""
        channels, height, width = self.image_shape
        return channels * MAPS * (height // 4) * (width // 4)

    def public_images(self) -> np.ndarray:
        """Returns the public images for whitening, float64 `[n, C, H, W]`."""
        return synthetic.mixed(3000, self.image_shape)

    def __call__(self, x: Tensor) -> Tensor:
        """Computes `[n, C, H, W]` -> `[n, size]`, in the type of `x`."""
        _, _, height, width = x.shape
        images = x.reshape(-1, 1, height, width)
        first = torch.cat((images, _modulus(images, 0, 1)), 1)
        second = _modulus(first.reshape(-1, 1, height, width), 1, 2).reshape(len(first), -1, height // 2, width // 2)
        maps = torch.cat((_smooth(first, 1, 4), _smooth(second, 0, 2)), 1)
        return maps.reshape(len(x), -1)

    def add(self, graph: Graph, x: str) -> str:
        """Adds the same function as ONNX nodes; returns the name of their result."""
        _, height, width = self.image_shape

        def convolve(value: str, kernel: np.ndarray, stride: int, size: tuple[int, int]) -> str:
            """Convolves every channel of `value` separately, images of `size`."""
            radius = kernel.shape[-1] // 2
            images = graph.node("Reshape", value, graph.constant(np.array([-1, 1, *size])))
            pads = graph.constant(np.array([0, 0, radius, radius] * 2))
            padded = graph.node("Pad", images, pads, mode="reflect")
            return graph.node("Conv", padded, graph.constant(kernel.astype(np.float32)), strides=[stride, stride])

        def modulus(value: str, scale: int, stride: int, size: tuple[int, int]) -> str:
            waves = convolve(value, wavelets(scale), stride, size)
            sides = size[0] // stride, size[1] // stride
            pairs = graph.node("Reshape", waves, graph.constant(np.array([-1, 2, ANGLES, *sides])))
            return graph.node("ReduceL2", pairs, graph.constant(np.array([1])), keepdims=0)

        def smooth(value: str, scale: int, stride: int, size: tuple[int, int], maps: int) -> str:
            sides = size[0] // stride, size[1] // stride
            smoothed = convolve(value, low_pass(scale), stride, size)
            return graph.node("Reshape", smoothed, graph.constant(np.array([-1, maps, *sides])))

        whole, half = (height, width), (height // 2, width // 2)
        images = graph.node("Reshape", x, graph.constant(np.array([-1, 1, *whole])))
        first = graph.node("Concat", images, modulus(x, 0, 1, whole), axis=1)
        second = modulus(first, 1, 2, whole)
        low, high = smooth(first, 1, 4, whole, 1 + ANGLES), smooth(second, 0, 2, half, (1 + ANGLES) * ANGLES)
        maps = graph.node("Concat", low, high, axis=1)
        return graph.node("Reshape", maps, graph.constant(np.array([-1, self.size])))


def _convolve(x: Tensor, kernel: np.ndarray, stride: int) -> Tensor:
    radius = kernel.shape[-1] // 2
    padded = F.pad(x, (radius,) * 4, mode="reflect")
    return F.conv2d(padded, torch.from_numpy(kernel).to(x), stride=stride)


def _modulus(x: Tensor, scale: int, stride: int) -> Tensor:
    waves = _convolve(x, wavelets(scale), stride)
    return waves.unflatten(1, (2, ANGLES)).square().sum(1).sqrt()


def _smooth(maps: Tensor, scale: int, stride: int) -> Tensor:
    smooth = _convolve(maps.reshape(-1, 1, *maps.shape[2:]), low_pass(scale), stride)
    return smooth.reshape(len(maps), maps.shape[1], *smooth.shape[2:])
