"""Epilogues: an activation is computed together with a matrix product if no other node reads the product."""

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
def test_following_activation(op: Any, keywords: dict[str, str], name: str | None) -> None:
    build = Builder()
    node = product(build)
    reshaped = build.call(aten.view.default, node, [4], value=build.fake(4))
    activation = build.graph.call_function(op, (reshaped,), keywords)
    epilogue = following_activation(node)
    assert (epilogue and epilogue.name) == name
    if epilogue is not None:
        assert (epilogue.node, epilogue.reshapes) == (activation, (reshaped,))


def test_no_activation_if_the_product_has_another_use() -> None:
    """Nor if the product is the activation's second operand, or if another op is in between."""
    cases = []
    for use in ("twice", "twice after a view", "as the second operand", "after an op", "returned", "not at all"):
        build = Builder()
        node = product(build)
        view = build.call(aten.view.default, node, [4]) if "view" in use else node
        if use == "as the second operand":
            build.call(aten.tanh_backward.default, build.input(4), node)
        elif use == "after an op":
            build.call(aten.tanh.default, build.call(aten.neg.default, node))
        elif use != "not at all":
            build.call(aten.tanh.default, view)
        if "twice" in use:
            build.call(aten.neg.default, view)
        if use == "returned":
            build.module(node)
        cases.append(following_activation(node))
    assert cases == [None] * 6


def test_results_of_a_fused_activation_are_recorded() -> None:
    build = Builder()
    node = product(build)
    reshaped = build.call(aten.view.default, node, [4], value=build.fake(4))
    activation = build.call(aten.tanh.default, reshaped, value=build.fake(4))
    computed: list[str] = []

    def compute(name: str) -> Any:
        computed.append(name)
        return jnp.ones((2, 2))

    for supported in ([], ["sigmoid"], ["tanh"]):
        ctx = Context("cpu")
        ctx.node = node
        assert with_activation(ctx, supported, compute).shape == (2, 2)
        is_fused = [item in ctx.fused_results for item in (node, reshaped, activation)]
        assert is_fused == ([False, True, True] if supported == ["tanh"] else [False] * 3)
    assert computed == ["", "", "tanh"]
    assert ctx.fused_results[reshaped] is None
    value = ctx.fused_results[activation]
    assert value is not None
    assert value.shape == (4,), "the shape of the activation's result"
