"""Random draws with a key are pure functions of the key: a repeated draw returns the same numbers, whatever was drawn in between."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from torch.fx import GraphModule, Node

from dynaxla.errors import UnsupportedOp
from dynaxla.lowering import Context, Interpreter
from dynaxla.lowering.keyed_random import KEY_DTYPE, KEY_SHAPE, keyed, operands, random_key, single_op_graph
from support.models.graph_builder import Builder

aten = torch.ops.aten


def key(build: Builder, number: int) -> Node:
    with build.mode:
        value = torch.empty(KEY_SHAPE, dtype=KEY_DTYPE)
    node = build.call(random_key, number, value=value)
    node.kwargs = {"device": torch.device("cpu")}
    return node


def evaluate(module: GraphModule, *inputs: Any, seed: int = 0) -> list[Any]:
    interpreter = Interpreter(module, "cpu")
    assert interpreter.draws_random
    with jax.enable_x64(True):
        return interpreter.run_all(inputs, Context("cpu", key=jax.random.key(seed)))


def test_same_key_draws_the_same_numbers() -> None:
    build = Builder()
    x = build.input(3)
    keys = [key(build, number) for number in range(2)]
    first = build.call(keyed, aten.rand_like.default, keys[0], x)
    between = build.call(aten.rand_like.default, x)
    again, other = (build.call(keyed, aten.rand_like.default, item, x) for item in keys)
    module = build.module(first, between, again, other)
    draw, _, same_key, other_key = evaluate(module, jnp.ones(3, jnp.float32))
    assert (draw == same_key).all()
    assert (draw != other_key).any()
    assert (evaluate(module, jnp.ones(3, jnp.float32), seed=1)[0] != draw).any()


def test_single_op_graph() -> None:
    """The inputs are the op's operands without the key, each once and in order."""
    build = Builder()
    x, y = build.input(3), build.input(3)
    node = build.call(keyed, aten.normal.Tensor_Tensor, key(build, 0), y, x)
    assert operands(node) == [y, x]
    graph = single_op_graph(node).graph
    assert [item.target for item in graph.find_nodes(op="placeholder")] == [y.name, x.name]
    (inner,) = graph.find_nodes(op="call_function", target=aten.normal.Tensor_Tensor)
    assert inner.meta["val"] is node.meta["val"]
    assert operands(build.call(keyed, aten.normal.Tensor_Tensor, key(build, 0), x, x)) == [x]


def test_keyed_op_runs_only_in_programs() -> None:
    """Torch's kernel would draw from torch's generator."""
    with pytest.raises(AssertionError, match="can only be evaluated in a program"):
        keyed(aten.rand_like.default, None, torch.ones(3))
    build = Builder()
    module = build.module(build.call(keyed, aten._to_sparse.default, key(build, 0), build.input(3)))
    with pytest.raises(UnsupportedOp):
        Interpreter(module, "cpu")
