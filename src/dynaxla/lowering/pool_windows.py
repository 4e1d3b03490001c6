"""The windows of a pooling, and what lies in them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jax import Array, lax
from jax import numpy as jnp

from . import dtypes
from .dtypes import DType

# Beyond this many places in a window, each is no longer looked at on its own.
MOST_TAPS = 36

Sizes = Sequence[int]


@dataclass(frozen=True)
class PoolWindows:
    """The windows along one dimension of size `size`: `out` of them, each reading `kernel` places, `dilation` apart."""

    dim: int
    size: int
    out: int
    kernel: int
    stride: int
    padding: int
    dilation: int

    @property
    def margins(self) -> tuple[int, int]:
        """How much the windows reach beyond both ends; negative where they leave a rest unread."""
        reach = (self.out - 1) * self.stride + (self.kernel - 1) * self.dilation + 1
        return self.padding, reach - self.size - self.padding

    @property
    def starts(self) -> np.ndarray:
        """The first place of each window, with 0 the first of the input."""
        return np.arange(self.out) * self.stride - self.padding

    def tap(self, x: Array, number: int) -> Array:
        """The place of this number of every window along the dimension, which has been padded."""
        first = number * self.dilation
        last = first + (self.out - 1) * self.stride
        return lax.slice_in_dim(x, first, last + 1, self.stride, self.dim)


def lowest(dtype: DType) -> float | int:
    """The lowest number of a dtype; minus infinity for floats."""
    return -math.inf if dtypes.is_float(dtype) else int(jnp.iinfo(dtype).min)


def pad(x: Array, value: float | int, margins: dict[int, tuple[int, int]], spacing: int = 0) -> Array:
    """Pad, or crop where negative, along some dimensions, with `spacing` new places between the old ones."""
    return lax.pad(x, lax.full((), value, x.dtype), [(*margins[dim], spacing) if dim in margins else (0, 0, 0) for dim in range(x.ndim)])


def windows_along(
    space: Sizes, out: Sizes, rank: int, kernel: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes = (1,)
) -> list[PoolWindows]:
    """space, out: the last sizes of input and output. Settings given once hold for all dimensions; stride () means that of the kernel."""
    count = len(space)
    settings = [list(values) * count if len(values) == 1 else list(values) for values in (kernel, stride or kernel, padding, dilation)]
    return [PoolWindows(rank - count + i, space[i], out[i], *(values[i] for values in settings)) for i in range(count)]


def reduce_window(x: Array, initial: float | int, function: str, dims: Sequence[PoolWindows]) -> Array:
    """The sum or maximum of each window; beyond the ends lies `initial`."""
    crop = {dim.dim: (0, min(dim.margins[1], 0)) for dim in dims}
    if any(high for _, high in crop.values()):
        x = pad(x, initial, crop)
    window, stride, dilation, padding = [1] * x.ndim, [1] * x.ndim, [1] * x.ndim, [(0, 0)] * x.ndim
    for dim in dims:
        window[dim.dim], stride[dim.dim], dilation[dim.dim] = dim.kernel, dim.stride, dim.dilation
        padding[dim.dim] = (dim.margins[0], max(dim.margins[1], 0))
    combine = lax.max if function == "max" else lax.add
    return lax.reduce_window(x, np.array(initial, x.dtype), combine, window, stride, padding, window_dilation=dilation)
