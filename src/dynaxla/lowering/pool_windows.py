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

# With more elements in a window, the lowerings no longer handle each element of a window by an operation of its own.
MOST_TAPS = 36

Sizes = Sequence[int]


@dataclass(frozen=True)
class PoolWindows:
    """The windows along one dimension: `out` windows over a dimension of size `size`, each of `kernel` elements, `dilation` apart."""

    dim: int
    size: int
    out: int
    kernel: int
    stride: int
    padding: int
    dilation: int

    @property
    def margins(self) -> tuple[int, int]:
        """The padding that the windows need at both ends; negative where they leave a remainder of the input unread."""
        reach = (self.out - 1) * self.stride + (self.kernel - 1) * self.dilation + 1
        return self.padding, reach - self.size - self.padding

    @property
    def starts(self) -> np.ndarray:
        """The index of each window's first element; 0 is the first element of the unpadded input. int64[out]."""
        return np.arange(self.out) * self.stride - self.padding

    def tap(self, x: Array, number: int) -> Array:
        """Returns element `number` of every window along the dimension. `x` is padded already."""
        first = number * self.dilation
        last = first + (self.out - 1) * self.stride
        return lax.slice_in_dim(x, first, last + 1, self.stride, self.dim)


def lowest(dtype: DType) -> float | int:
    """Returns the lowest number of a dtype; minus infinity for floats."""
    return -math.inf if dtypes.is_float(dtype) else int(jnp.iinfo(dtype).min)


def pad(x: Array, value: float | int, margins: dict[int, tuple[int, int]], spacing: int = 0) -> Array:
    """Pads some dimensions, or crops them where a margin is negative, with `spacing` new elements between adjacent old ones."""
    return lax.pad(x, lax.full((), value, x.dtype), [(*margins[dim], spacing) if dim in margins else (0, 0, 0) for dim in range(x.ndim)])


def windows_along(
    space: Sizes, out: Sizes, rank: int, kernel: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes = (1,)
) -> list[PoolWindows]:
    """Returns the windows along each spatial dimension.

    Args:
        space, out: The trailing (spatial) sizes of the input and the output.
        rank: The number of dimensions of the input.
        kernel, stride, padding, dilation: One value for each spatial dimension, or one for all. An empty stride means the kernel size.
    """
    count = len(space)
    settings = [list(values) * count if len(values) == 1 else list(values) for values in (kernel, stride or kernel, padding, dilation)]
    return [PoolWindows(rank - count + i, space[i], out[i], *(values[i] for values in settings)) for i in range(count)]


def reduce_window(x: Array, initial: float | int, function: str, dims: Sequence[PoolWindows]) -> Array:
    """Returns the sum or maximum of each window. Elements beyond the ends have the value `initial`."""
    crop = {dim.dim: (0, min(dim.margins[1], 0)) for dim in dims}
    if any(high for _, high in crop.values()):
        x = pad(x, initial, crop)
    window, stride, dilation, padding = [1] * x.ndim, [1] * x.ndim, [1] * x.ndim, [(0, 0)] * x.ndim
    for dim in dims:
        window[dim.dim], stride[dim.dim], dilation[dim.dim] = dim.kernel, dim.stride, dim.dilation
        padding[dim.dim] = (dim.margins[0], max(dim.margins[1], 0))
    combine = lax.max if function == "max" else lax.add
    return lax.reduce_window(x, np.array(initial, x.dtype), combine, window, stride, padding, window_dilation=dilation)
