"""Dropout masks for attention weights: for all rows at once, or for a block of rows. With the same key, both masks agree.

JAX's Threefry hashes each element's position in the array, so any part of the array can be computed alone.

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
# JAX makes a uniform float64 from the upper 52 of 64 random bits.
_MANTISSA_BITS = 52


def dropout_mask(key: Array, keep_probability: float, shape: tuple[int, ...]) -> Array:
    """Returns a bool mask of `shape`: true for the elements to keep. Each element is kept with probability `keep_probability`."""
    # Without this setting, an element's bits also depend on the size of the array, and `dropout_mask_rows` could not compute them.
    with jax.threefry_partitionable(True):
        return jax.random.bernoulli(key, keep_probability, shape)


def dropout_mask_rows(key: Array, keep_probability: float, shape: tuple[int, ...], total_rows: int, first_row: Array) -> Array:
    """Returns the rows of the mask of `dropout_mask` that belong to a block: bool, of shape `shape`.

    Args:
        key: the PRNG key, as for `dropout_mask`.
        keep_probability: the probability to keep an element, as for `dropout_mask`.
        shape: shape of the block: (batch, heads, rows in the block, columns).
        total_rows: number of rows of the whole mask.
        first_row: index of the block's first row, an integer of rank 0.
    """
    threshold = math.ceil(keep_probability * 2**_MANTISSA_BITS) << (64 - _MANTISSA_BITS)
    if threshold >> 64:
        return lax.full(shape, True)
    strides = (shape[1] * total_rows * shape[3], total_rows * shape[3], shape[3], 1)
    offset = lax.mul(lax.convert_element_type(first_row, _INDEX), np.array(strides[2], _INDEX))
    index = lax.broadcast(offset, shape)
    assert index.dtype == _INDEX, "jax_enable_x64 is off: `dropout_mask` then draws 32 bits per element, and this function assumes 64"
    for dim, stride in enumerate(strides):
        index = lax.add(index, lax.mul(lax.broadcasted_iota(_INDEX, shape, dim), lax.full(shape, stride, _INDEX)))
    upper = lax.convert_element_type(lax.shift_right_logical(index, lax.full_like(index, 32)), _WORD)
    lower = lax.convert_element_type(lax.bitwise_and(index, lax.full_like(index, 2**32 - 1)), _WORD)
    first_half, second_half = jax.random.key_data(key)
    upper, lower = threefry2x32_p.bind(first_half, second_half, upper, lower)
    # (upper, lower) is a 64-bit number. It is compared with the threshold word by word, because GPUs compare 32-bit words faster.
    upper_threshold, lower_threshold = lax.full(shape, threshold >> 32, _WORD), lax.full(shape, threshold & (2**32 - 1), _WORD)
    is_less_in_lower_word = lax.bitwise_and(lax.eq(upper, upper_threshold), lax.lt(lower, lower_threshold))
    return lax.bitwise_or(lax.lt(upper, upper_threshold), is_less_in_lower_word)
