"""The geometry of pooling windows, and reductions over them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jax import Array, lax
from jax import numpy as jnp

from . import dtypes
from .dimensions import Sizes
from .dtypes import DType

# Lowerings emit an operation for each element of a window if a window has at most this many elements.
MAX_UNROLLED_WINDOW = 36


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
        """The padding (low, high) that the windows need. `high` is negative if the windows do not read the last elements of the input."""
        span = (self.out - 1) * self.stride + (self.kernel - 1) * self.dilation + 1
        return self.padding, span - self.size - self.padding

    @property
    def starts(self) -> np.ndarray:
        """The index of each window's first element; 0 is the first element of the unpadded input. int64[out]."""
        return np.arange(self.out) * self.stride - self.padding

    def tap(self, x: Array, number: int) -> Array:
        """Returns element `number` of each window: x with size `out` along the dimension. `x` is the padded input."""
        first = number * self.dilation
        last = first + (self.out - 1) * self.stride
        return lax.slice_in_dim(x, first, last + 1, self.stride, self.dim)


def lowest(dtype: DType) -> float | int:
    """Returns the lowest number of an integer dtype; minus infinity for floats."""
    return -math.inf if dtypes.is_float(dtype) else int(jnp.iinfo(dtype).min)


def pad(x: Array, value: float | int, edge_padding: dict[int, tuple[int, int]], interior: int = 0) -> Array:
    """Pads some dimensions, as `lax.pad` does.

    Args:
        value: The value of the new elements.
        edge_padding: By dimension, (low, high); negative numbers crop.
        interior: The number of new elements between adjacent elements in the padded dimensions.
    """
    config = [(*edge_padding[dim], interior) if dim in edge_padding else (0, 0, 0) for dim in range(x.ndim)]
    return lax.pad(x, lax.full((), value, x.dtype), config)


def windows_along(
    space: Sizes, out: Sizes, rank: int, kernel: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes = (1,)
) -> list[PoolWindows]:
    """Returns the windows along each spatial dimension.

    Args:
        space, out: The spatial sizes of the input and of the output. The spatial dimensions come last.
        rank: The number of all dimensions of the input.
        kernel, stride, padding, dilation: One value for each spatial dimension, or one for all. An empty stride means the kernel size.
    """
    count = len(space)
    per_dim = [list(values) * count if len(values) == 1 else list(values) for values in (kernel, stride or kernel, padding, dilation)]
    return [PoolWindows(rank - count + i, space[i], out[i], *(values[i] for values in per_dim)) for i in range(count)]


def reduce_window(x: Array, initial: float | int, function: str, windows: Sequence[PoolWindows]) -> Array:
    """Returns the sum or maximum of each window. Padding elements have the value `initial`.

    Args:
        function: "max" for the maximum, otherwise the sum.
        windows: The windows along each pooled dimension.
    """
    crop = {pooled.dim: (0, min(pooled.edge_padding[1], 0)) for pooled in windows}
    if any(high for _, high in crop.values()):
        x = pad(x, initial, crop)
    window, stride, dilation, padding = [1] * x.ndim, [1] * x.ndim, [1] * x.ndim, [(0, 0)] * x.ndim
    for pooled in windows:
        window[pooled.dim], stride[pooled.dim], dilation[pooled.dim] = pooled.kernel, pooled.stride, pooled.dilation
        padding[pooled.dim] = (pooled.edge_padding[0], max(pooled.edge_padding[1], 0))
    combine = lax.max if function == "max" else lax.add
    return lax.reduce_window(x, np.array(initial, x.dtype), combine, window, stride, padding, window_dilation=dilation)
