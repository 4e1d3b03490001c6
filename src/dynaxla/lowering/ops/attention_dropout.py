"""Dropout masks for attention weights: for all rows at once, or for a block of rows, with the same result for the same key.

JAX's Threefry hashes each element's position in its array, so any part of the array can be drawn alone.

Source: jax/_src/random/threefry2x32.py and core.py, bernoulli and uniform of float64
"""

from __future__ import annotations

import math

import jax
import numpy as np
from jax import Array, lax
from jax.extend.random import threefry2x32_p

_WORD = np.dtype(np.uint32)
_INDEX = np.dtype(np.uint64)
# Random bits in a uniform float64: the upper 52 of 64.
_MANTISSA_BITS = 52


def kept(key: Array, probability: float, shape: tuple[int, ...]) -> Array:
    """A mask of `shape`, each element of which is true with the given probability."""
    # Without this setting an element's bits do not depend on its position alone.
    with jax.threefry_partitionable(True):
        return jax.random.bernoulli(key, probability, shape)


def kept_rows(key: Array, probability: float, shape: tuple[int, ...], rows: int, first: Array) -> Array:
    """The part of `kept`'s mask for a block of rows.

    Args:
        key, probability: as for `kept`.
        shape: of the block: (batch, heads, rows in the block, columns).
        rows: number of rows of the whole mask.
        first: index of the block's first row, an integer of rank 0.
    """
    limit = math.ceil(probability * 2**_MANTISSA_BITS) << (64 - _MANTISSA_BITS)
    if limit >> 64:
        return lax.full(shape, True)
    strides = (shape[1] * rows * shape[3], rows * shape[3], shape[3], 1)
    offset = lax.mul(lax.convert_element_type(first, _INDEX), np.array(strides[2], _INDEX))
    index = lax.broadcast(offset, shape)
    assert index.dtype == _INDEX, "JAX's 64-bit types are off: `kept` would draw fewer bits"
    for dim, stride in enumerate(strides):
        index = lax.add(index, lax.mul(lax.broadcasted_iota(_INDEX, shape, dim), lax.full(shape, stride, _INDEX)))
    upper = lax.convert_element_type(lax.shift_right_logical(index, lax.full_like(index, 32)), _WORD)
    lower = lax.convert_element_type(lax.bitwise_and(index, lax.full_like(index, 2**32 - 1)), _WORD)
    first_half, second_half = jax.random.key_data(key)
    upper, lower = threefry2x32_p.bind(first_half, second_half, upper, lower)
    # The two words form one 64-bit number, which is compared with the limit. GPUs compare 32-bit words faster.
    upper_limit, lower_limit = lax.full(shape, limit >> 32, _WORD), lax.full(shape, limit & (2**32 - 1), _WORD)
    is_close = lax.bitwise_and(lax.eq(upper, upper_limit), lax.lt(lower, lower_limit))
    return lax.bitwise_or(lax.lt(upper, upper_limit), is_close)
