"""Orders of weights as oneDNN's kernels read them."""

from __future__ import annotations

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from dynaxla.lowering.cpu import weight_orders
from dynaxla.lowering.dtypes import to_jax


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_order_is_packed_as_described(dtype: torch.dtype) -> None:
    """Element by element: block after block, with zeros where a block is not full."""
    for candidates, shape in ((weight_orders._of_matrices, (5, 70)), (weight_orders._of_kernels, (20, 5, 2, 3))):
        for order in candidates(to_jax(dtype)):
            weight = np.arange(1, 1 + np.prod(shape), dtype=np.float32).reshape(shape)
            found = np.asarray(order.pack(jnp.asarray(weight)))
            full = order.shape(shape)
            block = _blocks(order, len(shape))
            outer = [range(full[dim] // block[dim]) for dim in order.dims]
            inner = [range(size) for size in order.sizes]
            wanted = []
            for place in itertools.product(*outer, *inner):
                index = [0] * len(shape)
                for dim, step in zip(order.dims, place, strict=False):
                    index[dim] = step
                for dim, size, step in zip(order.blocked, order.sizes, place[len(shape) :], strict=True):
                    index[dim] = index[dim] * size + step
                wanted.append(weight[tuple(index)] if all(at < size for at, size in zip(index, shape, strict=True)) else 0)
            np.testing.assert_array_equal(found[: -weight_orders.SLACK], wanted)
            assert not found[-weight_orders.SLACK :].any()
            assert found.size == order.length(shape)


def _blocks(order: weight_orders.Packing, rank: int) -> list[int]:
    sizes = [1] * rank
    for dim, size in zip(order.blocked, order.sizes, strict=True):
        sizes[dim] *= size
    return sizes
