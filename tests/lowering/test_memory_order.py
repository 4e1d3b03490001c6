"""How operands lie, as the graph tells: in eager's memory, and before the transposes that made them."""

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


TRANSPOSED = (1, 0)


def reader_of(make: Callable[[Builder, Node, Node, Node], Node]) -> tuple[int, ...] | None:
    """The order in which a sum reads what is made of a 3x40 tensor, and of one that is transposed: by `permute`, and by the caller. None:
    as it is."""
    build, ctx = Builder(), Context("cpu")
    plain, turned, given = build.input(3, 40), build.input(40, 3), build.input(3, 40)
    given.meta["val"] = build.fake(40, 3).t()
    node = make(build, plain, build.call(aten.permute.default, turned, [1, 0], value=build.fake(40, 3).t()), given)
    ctx.values[node] = value = jnp.arange(120.0).reshape(3, 40)
    ctx.node = build.call(aten.sum.default, node)
    found, places = in_memory_order(ctx, 0, value)
    np.testing.assert_array_equal(np.transpose(found, places), value)
    return None if found is value else places


def of(build: Builder, op: Any, *nodes: Node) -> Node:
    return build.call(op, *nodes, value=nodes[0].meta["val"])


def read_twice(build: Builder, node: Node, op: Any = aten.relu.default) -> Node:
    of(build, op, node)
    return node


COMPUTED: dict[str, tuple[Callable[[Builder, Node, Node, Node], Node], tuple[int, ...] | None]] = {
    "as it is": (lambda build, x, y, z: of(build, aten.exp.default, x), None),
    "transposed": (lambda build, x, y, z: of(build, aten.exp.default, y), TRANSPOSED),
    "by the caller": (lambda build, x, y, z: of(build, aten.exp.default, z), TRANSPOSED),
    "several": (
        lambda build, x, y, z: of(build, aten.mul.Tensor, of(build, aten.exp.default, y), of(build, aten.abs.default, z)),
        TRANSPOSED,
    ),
    "the caller's own": (lambda build, x, y, z: z, TRANSPOSED),
    "a part of it": (lambda build, x, y, z: of(build, aten.slice.Tensor, z), TRANSPOSED),
    "of one row": (lambda build, x, y, z: build.call(aten.expand.default, x, value=build.fake(40).expand(3, 40)), None),
    "of one row and others": (
        lambda build, x, y, z: of(build, aten.sub.Tensor, z, build.call(aten.expand.default, x, value=build.fake(40).expand(3, 40))),
        TRANSPOSED,
    ),
    "in two orders": (lambda build, x, y, z: of(build, aten.add.Tensor, y, x), None),
    "no elementwise op": (lambda build, x, y, z: of(build, aten.relu.default, of(build, aten.cumsum.default, y)), None),
    "read twice": (lambda build, x, y, z: read_twice(build, of(build, aten.mul.Tensor, y, z)), TRANSPOSED),
    "a function read twice": (lambda build, x, y, z: read_twice(build, of(build, aten.exp.default, y)), None),
    "of a function read twice": (
        lambda build, x, y, z: of(build, aten.mul.Tensor, read_twice(build, of(build, aten.exp.default, y)), z),
        None,
    ),
    "a function of what is read twice": (
        lambda build, x, y, z: of(build, aten.exp.default, read_twice(build, of(build, aten.neg.default, y))),
        TRANSPOSED,
    ),
    "in memory": (lambda build, x, y, z: read_twice(build, of(build, aten.mul.Tensor, y, z), aten.cumsum.default), None),
}  # fmt: skip


@pytest.mark.parametrize("name", COMPUTED)
def test_what_is_computed(name: str) -> None:
    make, order = COMPUTED[name]
    assert reader_of(make) == order


def test_the_longest_of_several_orders() -> None:
    """Where the last dimension of what is transposed is the longer one."""
    build, ctx = Builder(), Context("cpu")
    plain, turned = build.input(40, 3), build.input(40, 3)
    turned.meta["val"] = build.fake(3, 40).t()
    node = of(build, aten.sub.Tensor, plain, turned)
    ctx.values[node] = jnp.ones((40, 3))
    ctx.node = build.call(aten.sum.default, node)
    assert in_memory_order(ctx, 0, ctx.values[node])[0].shape == (3, 40)


def test_order_in_eagers_memory() -> None:
    build, ctx = Builder(), Context("cpu")
    nodes: list[Node] = [build.input(2, 3), build.input(2, 3)]
    nodes[1].meta["val"] = build.fake(3, 2).t()
    ctx.values.update({node: jnp.ones((2, 3)) for node in nodes})
    ctx.node = build.call(aten.add.Tensor, *nodes)
    assert [eager_order(ctx, ctx.values[node]) for node in nodes] == [(0, 1), (1, 0)]
    assert eager_order(ctx, jnp.ones((2, 3))) is None, "a value that the lowering has made"
