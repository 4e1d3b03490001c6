"""The windows of a pooling, and what lies in them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from jax import Array, lax
from jax import numpy as jnp

from . import dtypes
from .dtypes import DType

# Beyond this many places in a window, each is no longer looked at on its own.
MOST_TAPS = 36


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
    return -math.inf if dtypes.is_float(dtype) else int(jnp.iinfo(dtype).min)


def pad(x: Array, value: float | int, margins: dict[int, tuple[int, int]], spacing: int = 0) -> Array:
    """Pad, or crop where negative, along some dimensions, with `spacing` new places between the old ones."""
    return lax.pad(x, lax.full((), value, x.dtype), [(*margins[dim], spacing) if dim in margins else (0, 0, 0) for dim in range(x.ndim)])
