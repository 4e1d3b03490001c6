"""The memory order of operands, derived from the graph: in eager mode's memory, and before transposes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax import Array
from torch.fx import Node

from dynaxla.lowering import Context
from dynaxla.lowering.memory_order import eager_order, in_memory_order, untransposed
from support.models.graph_builder import Builder

aten = torch.ops.aten
X = torch.arange(24.0).view(2, 3, 4)

CHAINS: dict[str, list[tuple[Any, ...]]] = {
    "no op": [],
    "permute": [(aten.permute.default, [1, -1, 0])],
    "transpose": [(aten.transpose.int, 0, -1)],
    "two transposes": [(aten.permute.default, [2, 0, 1]), (aten.detach.default,), (aten.transpose.int, 1, 2)],
    "after a reshape": [(aten.transpose.int, 0, 1), (aten.view.default, [3, 2, 4]), (aten.permute.default, [2, 1, 0])],
}


def chain(name: str) -> tuple[Context, Array, Array]:
    """Returns a context at the reader of a chain's last value, that value, and the value before its transposes."""
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
def test_untransposed_is_the_value_before_the_transposes(name: str) -> None:
    ctx, value, before = chain(name)
    operand, dims = untransposed(ctx, 0, value)
    assert operand is before
    assert sorted(dims) == [0, 1, 2]
    np.testing.assert_array_equal(np.transpose(operand, dims), value)


def test_untransposed_by_t() -> None:
    build, ctx = Builder(), Context("cpu")
    for x, expected in ((jnp.ones((2, 3)), (1, 0)), (jnp.ones(3), (0,)), (jnp.ones(()), ())):
        source = build.input(*x.shape)
        node = build.call(aten.t.default, source)
        ctx.values[source], ctx.values[node] = x, x.T
        ctx.node = build.call(aten.relu.default, node)
        operand, dims = untransposed(ctx, 0, x.T)
        assert operand is x
        assert dims == expected


TRANSPOSED = (1, 0)


def order_of_sum(make: Callable[[Builder, Node, Node, Node], Node]) -> tuple[int, ...] | None:
    """Returns the order in which a sum reads a value, or None if the sum reads it unchanged.

    Args:
        make: Makes the value of three nodes of shape (3, 40): a row-major one, one that `permute` has transposed, and one that the caller
            has transposed.
    """
    build, ctx = Builder(), Context("cpu")
    row_major, source, by_caller = build.input(3, 40), build.input(40, 3), build.input(3, 40)
    by_caller.meta["val"] = build.fake(40, 3).t()
    node = make(build, row_major, build.call(aten.permute.default, source, [1, 0], value=build.fake(40, 3).t()), by_caller)
    ctx.values[node] = value = jnp.arange(120.0).reshape(3, 40)
    ctx.node = build.call(aten.sum.default, node)
    operand, dims = in_memory_order(ctx, 0, value)
    np.testing.assert_array_equal(np.transpose(operand, dims), value)
    return None if operand is value else dims


def call(build: Builder, op: Any, *nodes: Node) -> Node:
    return build.call(op, *nodes, value=nodes[0].meta["val"])


def read_twice(build: Builder, node: Node, op: Any = aten.relu.default) -> Node:
    call(build, op, node)
    return node


COMPUTED: dict[str, tuple[Callable[[Builder, Node, Node, Node], Node], tuple[int, ...] | None]] = {
    "row-major": (lambda build, x, y, z: call(build, aten.exp.default, x), None),
    "permuted": (lambda build, x, y, z: call(build, aten.exp.default, y), TRANSPOSED),
    "transposed by the caller": (lambda build, x, y, z: call(build, aten.exp.default, z), TRANSPOSED),
    "two transposed operands": (
        lambda build, x, y, z: call(build, aten.mul.Tensor, call(build, aten.exp.default, y), call(build, aten.abs.default, z)),
        TRANSPOSED,
    ),
    "an input": (lambda build, x, y, z: z, TRANSPOSED),
    "slice of an input": (lambda build, x, y, z: call(build, aten.slice.Tensor, z), TRANSPOSED),
    "expanded row": (lambda build, x, y, z: build.call(aten.expand.default, x, value=build.fake(40).expand(3, 40)), None),
    "expanded row and transposed operand": (
        lambda build, x, y, z: call(build, aten.sub.Tensor, z, build.call(aten.expand.default, x, value=build.fake(40).expand(3, 40))),
        TRANSPOSED,
    ),
    "operands in two orders": (lambda build, x, y, z: call(build, aten.add.Tensor, y, x), None),
    "after cumsum": (lambda build, x, y, z: call(build, aten.relu.default, call(build, aten.cumsum.default, y)), None),
    "cheap op, read twice": (lambda build, x, y, z: read_twice(build, call(build, aten.mul.Tensor, y, z)), TRANSPOSED),
    "expensive op, read twice": (lambda build, x, y, z: read_twice(build, call(build, aten.exp.default, y)), None),
    "operand is an expensive op, read twice": (
        lambda build, x, y, z: call(build, aten.mul.Tensor, read_twice(build, call(build, aten.exp.default, y)), z),
        None,
    ),
    "operand is a cheap op, read twice": (
        lambda build, x, y, z: call(build, aten.exp.default, read_twice(build, call(build, aten.neg.default, y))),
        TRANSPOSED,
    ),
    "cheap op, also read by cumsum": (
        lambda build, x, y, z: read_twice(build, call(build, aten.mul.Tensor, y, z), aten.cumsum.default),
        None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", COMPUTED)
def test_order_of_computed_values(name: str) -> None:
    make, order = COMPUTED[name]
    assert order_of_sum(make) == order


def test_order_with_the_longer_last_dimension_is_preferred() -> None:
    """The transposed operand has the longer last dimension."""
    build, ctx = Builder(), Context("cpu")
    row_major, transposed = build.input(40, 3), build.input(40, 3)
    transposed.meta["val"] = build.fake(3, 40).t()
    node = call(build, aten.sub.Tensor, row_major, transposed)
    ctx.values[node] = jnp.ones((40, 3))
    ctx.node = build.call(aten.sum.default, node)
    assert in_memory_order(ctx, 0, ctx.values[node])[0].shape == (3, 40)


def test_order_in_eager_modes_memory() -> None:
    build, ctx = Builder(), Context("cpu")
    nodes: list[Node] = [build.input(2, 3), build.input(2, 3)]
    nodes[1].meta["val"] = build.fake(3, 2).t()
    ctx.values.update({node: jnp.ones((2, 3)) for node in nodes})
    ctx.node = build.call(aten.add.Tensor, *nodes)
    assert [eager_order(ctx, ctx.values[node]) for node in nodes] == [(0, 1), (1, 0)]
    assert eager_order(ctx, jnp.ones((2, 3))) is None, "a value that is no argument of the node"
