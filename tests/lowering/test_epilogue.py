"""An activation is computed with a product where it is the only thing that reads the product."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest
import torch
from torch.fx import Node

from dynaxla.lowering import Context
from dynaxla.lowering.epilogue import following_activation, with_activation
from support.models.graph_builder import Builder

aten = torch.ops.aten


def product(build: Builder) -> Node:
    return build.call(aten.mm.default, build.input(2, 2), build.input(2, 2), value=build.fake(2, 2))


@pytest.mark.parametrize(
    ("op", "keywords", "name"),
    [
        (aten.gelu.default, {}, "gelu"),
        (aten.gelu.default, {"approximate": "none"}, "gelu"),
        (aten.gelu.default, {"approximate": "tanh"}, "gelu_tanh"),
        (aten.sigmoid.default, {}, "sigmoid"),
        (aten.tanh.default, {}, "tanh"),
        (aten.relu.default, {}, None),
        (aten.tanh_backward.default, {}, None),
    ],
)
def test_which_activation(op: Any, keywords: dict[str, str], name: str | None) -> None:
    build = Builder()
    node = product(build)
    reshaped = build.call(aten.view.default, node, [4], value=build.fake(4))
    activation = build.graph.call_function(op, (reshaped,), keywords)
    found = following_activation(node)
    assert (found and found.name) == name
    if found is not None:
        assert (found.node, found.reshapes) == (activation, (reshaped,))


def test_nothing_else_may_read_the_product() -> None:
    """Nor may it be a second operand, or one op further away."""
    cases = []
    for read in ("twice", "twice behind a view", "as second", "behind an op", "returned", "not at all"):
        build = Builder()
        node = product(build)
        view = build.call(aten.view.default, node, [4]) if "view" in read else node
        if read == "as second":
            build.call(aten.tanh_backward.default, build.input(4), node)
        elif read == "behind an op":
            build.call(aten.tanh.default, build.call(aten.neg.default, node))
        elif read != "not at all":
            build.call(aten.tanh.default, view)
        if "twice" in read:
            build.call(aten.neg.default, view)
        if read == "returned":
            build.module(node)
        cases.append(following_activation(node))
    assert cases == [None] * 6


def test_what_is_computed_with_it_is_claimed() -> None:
    build = Builder()
    node = product(build)
    reshaped = build.call(aten.view.default, node, [4], value=build.fake(4))
    activation = build.call(aten.tanh.default, reshaped, value=build.fake(4))
    asked: list[str] = []

    def compute(name: str) -> Any:
        asked.append(name)
        return jnp.ones((2, 2))

    for offered in ([], ["sigmoid"], ["tanh"]):
        ctx = Context("cpu")
        ctx.node = node
        assert with_activation(ctx, offered, compute).shape == (2, 2)
        claimed = [item in ctx.fused_results for item in (node, reshaped, activation)]
        assert claimed == ([False, True, True] if offered == ["tanh"] else [False] * 3)
    assert asked == ["", "", "tanh"]
    assert ctx.fused_results[reshaped] is None
    value = ctx.fused_results[activation]
    assert value is not None
    assert value.shape == (4,), "as the activation's own result"
