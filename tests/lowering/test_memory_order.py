"""How operands lie, as the graph tells: in eager's memory, and before the transposes that made them."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hand_made import Builder
from jax import Array
from torch.fx import Node

from dynaxla.lowering import Context
from dynaxla.lowering.memory_order import eager_order, untransposed

aten = torch.ops.aten
X = torch.arange(24.0).view(2, 3, 4)

CHAINS: dict[str, list[tuple[Any, ...]]] = {
    "nothing": [],
    "permute": [(aten.permute.default, [1, -1, 0])],
    "transpose": [(aten.transpose.int, 0, -1)],
    "two": [(aten.permute.default, [2, 0, 1]), (aten.detach.default,), (aten.transpose.int, 1, 2)],
    "beyond a reshape": [(aten.transpose.int, 0, 1), (aten.view.default, [3, 2, 4]), (aten.permute.default, [2, 1, 0])],
}


def chain(name: str) -> tuple[Context, Array, Array]:
    """A context at the reader of the last value of a chain. Returns: that value, and the one before its transposes."""
    build, ctx = Builder(), Context("cpu")
    node, value = build.input(2, 3, 4), X
    ctx.values[node] = before = jnp.asarray(value.numpy())
    for op, *args in CHAINS[name]:
        value = op(value.contiguous() if op is aten.view.default else value, *args)
        node = build.call(op, node, *args, value=value)
        ctx.values[node] = jnp.asarray(value.numpy())
        before = ctx.values[node] if op is aten.view.default else before
    ctx.node = build.call(aten.relu.default, node)
    return ctx, ctx.values[node], before


@pytest.mark.parametrize("name", CHAINS)
def test_before_the_transposes(name: str) -> None:
    ctx, value, before = chain(name)
    found, places = untransposed(ctx, 0, value)
    assert found is before
    assert sorted(places) == [0, 1, 2]
    np.testing.assert_array_equal(np.transpose(found, places), value)


def test_a_matrix_and_what_has_no_dimensions_to_exchange() -> None:
    build, ctx = Builder(), Context("cpu")
    for x, wanted in ((jnp.ones((2, 3)), (1, 0)), (jnp.ones(3), (0,)), (jnp.ones(()), ())):
        source = build.input(*x.shape)
        node = build.call(aten.t.default, source)
        ctx.values[source], ctx.values[node] = x, x.T
        ctx.node = build.call(aten.relu.default, node)
        found, places = untransposed(ctx, 0, x.T)
        assert found is x
        assert places == wanted


def test_order_in_eagers_memory() -> None:
    build, ctx = Builder(), Context("cpu")
    nodes: list[Node] = [build.input(2, 3), build.input(2, 3)]
    nodes[1].meta["val"] = build.fake(3, 2).t()
    ctx.values.update({node: jnp.ones((2, 3)) for node in nodes})
    ctx.node = build.call(aten.add.Tensor, *nodes)
    assert [eager_order(ctx, ctx.values[node]) for node in nodes] == [(0, 1), (1, 0)]
    assert eager_order(ctx, jnp.ones((2, 3))) is None, "a value that the lowering has made"
