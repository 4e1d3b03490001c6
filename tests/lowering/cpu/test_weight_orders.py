"""Orders of weights as oneDNN's kernels read them."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from dynaxla.lowering.cpu import weight_orders
from dynaxla.lowering.dtypes import to_jax


@pytest.mark.sample(usual=1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_order_is_packed_as_described(dtype: torch.dtype) -> None:
    """Element by element: block after block, with zeros where a block is not full."""
    for candidates, shape in ((weight_orders._of_matrices, (5, 70)), (weight_orders._of_kernels, (20, 5, 2, 3))):
        for order in candidates(to_jax(dtype)):
            weight = np.arange(1, 1 + np.prod(shape), dtype=np.float32).reshape(shape)
            found = np.asarray(order.pack(jnp.asarray(weight)))
            full = order.shape(shape)
            block = _blocks(order, len(shape))
            steps = [full[dim] // block[dim] for dim in order.dims] + list(order.sizes)
            places = np.indices(steps).reshape(len(steps), -1)  # of each element of the packed weight, its step in each loop
            index = np.zeros((len(shape), places.shape[1]), dtype=int)
            for dim, step in zip(order.dims, places, strict=False):
                index[dim] = step
            for dim, size, step in zip(order.blocked, order.sizes, places[len(shape) :], strict=True):
                index[dim] = index[dim] * size + step
            padded = np.pad(weight, [(0, more - size) for more, size in zip(full, shape, strict=True)])
            np.testing.assert_array_equal(found[: -weight_orders.SLACK], padded[tuple(index)])
            assert not found[-weight_orders.SLACK :].any()
            assert found.size == order.length(shape)


def _blocks(order: weight_orders.Packing, rank: int) -> list[int]:
    sizes = [1] * rank
    for dim, size in zip(order.blocked, order.sizes, strict=True):
        sizes[dim] *= size
    return sizes
