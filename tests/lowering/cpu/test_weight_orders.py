"""Memory orders of weights that oneDNN's kernels read."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from dynaxla.lowering.cpu import weight_orders
from dynaxla.lowering.dtypes import to_jax


@pytest.mark.sample(usual=1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_weights_match_their_description(dtype: torch.dtype) -> None:
    """Compares each element. Blocks that are not full are padded with zeros."""
    for candidates, shape in ((weight_orders._of_matrices, (5, 70)), (weight_orders._of_kernels, (20, 5, 2, 3))):
        for order in candidates(to_jax(dtype)):
            weight = np.arange(1, 1 + np.prod(shape), dtype=np.float32).reshape(shape)
            packed = np.asarray(order.pack(jnp.asarray(weight)))
            padded_shape = order.shape(shape)
            block = _blocks(order, len(shape))
            steps = [padded_shape[dim] // block[dim] for dim in order.dims] + list(order.sizes)
            steps_of_elements = np.indices(steps).reshape(len(steps), -1)  # for each packed element, its step in each loop
            index = np.zeros((len(shape), steps_of_elements.shape[1]), dtype=int)
            for dim, step in zip(order.dims, steps_of_elements, strict=False):
                index[dim] = step
            for dim, size, step in zip(order.blocked, order.sizes, steps_of_elements[len(shape) :], strict=True):
                index[dim] = index[dim] * size + step
            padded = np.pad(weight, [(0, padded_size - size) for padded_size, size in zip(padded_shape, shape, strict=True)])
            np.testing.assert_array_equal(packed[: -weight_orders.SLACK], padded[tuple(index)])
            assert not packed[-weight_orders.SLACK :].any()
            assert packed.size == order.length(shape)


def _blocks(order: weight_orders.Packing, rank: int) -> list[int]:
    sizes = [1] * rank
    for dim, size in zip(order.blocked, order.sizes, strict=True):
        sizes[dim] *= size
    return sizes
