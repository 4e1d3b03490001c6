"""The geometry of pooling windows, and reductions over them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jax import Array, lax
from jax import numpy as jnp

from . import dtypes
from .dtypes import DType

# The most elements of a window for which lowerings emit an operation per element of a window.
MOST_TAPS = 36

Sizes = Sequence[int]


@dataclass(frozen=True)
class PoolWindows:
    """The pooling windows along one dimension.

    Attributes:
        dim: The dimension.
        size: The size of the unpadded input along the dimension.
        out: The number of windows.
        kernel: The number of elements of a window.
        stride: The distance between the first elements of adjacent windows.
        padding: The number of padding elements before the input.
        dilation: The distance between adjacent elements of a window.
    """

    dim: int
    size: int
    out: int
    kernel: int
    stride: int
    padding: int
    dilation: int

    @property
    def edge_padding(self) -> tuple[int, int]:
        """The padding (low, high) that the windows need. It is negative at an end where the windows do not read all of the input."""
        reach = (self.out - 1) * self.stride + (self.kernel - 1) * self.dilation + 1
        return self.padding, reach - self.size - self.padding

    @property
    def starts(self) -> np.ndarray:
        """The index of each window's first element; 0 is the first element of the unpadded input. int64[out]."""
        return np.arange(self.out) * self.stride - self.padding

    def tap(self, x: Array, number: int) -> Array:
        """Returns element `number` of each window along the dimension. `x` is the padded input."""
        first = number * self.dilation
        last = first + (self.out - 1) * self.stride
        return lax.slice_in_dim(x, first, last + 1, self.stride, self.dim)


def lowest(dtype: DType) -> float | int:
    """Returns the lowest number of a dtype; minus infinity for floats."""
    return -math.inf if dtypes.is_float(dtype) else int(jnp.iinfo(dtype).min)


def pad(x: Array, value: float | int, edge_padding: dict[int, tuple[int, int]], interior: int = 0) -> Array:
    """Pads some dimensions, as `lax.pad` does.

    Args:
        value: The value of the new elements.
        edge_padding: By dimension, (low, high); negative numbers crop.
        interior: The number of new elements between adjacent elements, in these dimensions.
    """
    config = [(*edge_padding[dim], interior) if dim in edge_padding else (0, 0, 0) for dim in range(x.ndim)]
    return lax.pad(x, lax.full((), value, x.dtype), config)


def windows_along(
    space: Sizes, out: Sizes, rank: int, kernel: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes = (1,)
) -> list[PoolWindows]:
    """Returns the windows along each spatial dimension.

    Args:
        space, out: The spatial sizes of the input and the output, which are the trailing ones.
        rank: The number of dimensions of the input.
        kernel, stride, padding, dilation: One value for each spatial dimension, or one for all. An empty stride means the kernel size.
    """
    count = len(space)
    settings = [list(values) * count if len(values) == 1 else list(values) for values in (kernel, stride or kernel, padding, dilation)]
    return [PoolWindows(rank - count + i, space[i], out[i], *(values[i] for values in settings)) for i in range(count)]


def reduce_window(x: Array, initial: float | int, function: str, dims: Sequence[PoolWindows]) -> Array:
    """Returns the sum or maximum of each window. Padding elements have the value `initial`.

    Args:
        function: "max" for the maximum, otherwise the sum.
        dims: The windows along each pooled dimension.
    """
    crop = {dim.dim: (0, min(dim.edge_padding[1], 0)) for dim in dims}
    if any(high for _, high in crop.values()):
        x = pad(x, initial, crop)
    window, stride, dilation, padding = [1] * x.ndim, [1] * x.ndim, [1] * x.ndim, [(0, 0)] * x.ndim
    for dim in dims:
        window[dim.dim], stride[dim.dim], dilation[dim.dim] = dim.kernel, dim.stride, dim.dilation
        padding[dim.dim] = (dim.edge_padding[0], max(dim.edge_padding[1], 0))
    combine = lax.max if function == "max" else lax.add
    return lax.reduce_window(x, np.array(initial, x.dtype), combine, window, stride, padding, window_dilation=dilation)
