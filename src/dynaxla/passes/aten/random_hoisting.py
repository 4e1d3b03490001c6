"""Moves random draws to the start of a graph, where torch's own generator draws them as in eager mode (option exact_rng)."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch.fx import Graph, GraphModule, Node

from ...capture.graph import copy_graph
from ...lowering.interpreter import draws_random
from ...torch_ops import aten

# Random ops that read only the size, strides and dtype of their tensor.
_OF_SHAPES = (
    aten.bernoulli.p,
    aten.cauchy.default,
    aten.exponential.default,
    aten.geometric.default,
    aten.log_normal.default,
    aten.normal_functional.default,
    aten.rand_like.default,
    aten.randint_like.default,
    aten.randint_like.low_dtype,
    aten.randn_like.default,
    aten.random.default,
    getattr(aten.random, "from"),
    aten.random.to,
    aten.uniform.default,
)


def hoist(module: GraphModule) -> tuple[GraphModule, set[Node]]:
    """Returns a copy of the graph with its draws moved to the start, and the nodes that torch must run.

    Draws keep their order, since the numbers depend on it. A draw that depends on values, such as `multinomial`, is not moved.
    """
    module = copy_graph(module)
    graph = module.graph
    place = _InsertionPoint(graph)
    drawn: set[Node] = set()
    for node in list(graph.nodes):
        if draws_random(node):
            made = _hoisted(graph, node, place)
            if made is None:
                place.last = node
                made = [node]
            drawn.update(made)
    graph.lint()
    module.recompile()
    return module, drawn


class _InsertionPoint:
    """The insertion point for draws: after those that have been moved already.

    Attributes:
        last: the node in front of the insertion point; None for the graph's start.
    """

    def __init__(self, graph: Graph) -> None:
        inputs = graph.find_nodes(op="placeholder")
        self.last: Node | None = inputs[-1] if inputs else None
        self._graph = graph

    def call(self, op: Any, *args: Any, **kwargs: Any) -> Node:
        """Inserts the call of an op at the insertion point, and advances it."""
        with self._graph.inserting_before(None) if self.last is None else self._graph.inserting_after(self.last):
            self.last = _call(self._graph, op, *args, **kwargs)
        return self.last

    def move(self, node: Node) -> None:
        """Moves a node to the insertion point, and advances it."""
        first = next(iter(self._graph.nodes))
        if self.last is None and node is not first:
            first.prepend(node)
        elif self.last is not None and node is not self.last:
            self.last.append(node)
        self.last = node


def _hoisted(graph: Graph, node: Node, place: _InsertionPoint) -> list[Node] | None:
    """Moves a draw to the insertion point, and returns the nodes there that torch must run.

    Returns None, changing nothing, if the draw depends on values or on sizes that are not known there.
    """
    if node.target is aten.native_dropout.default:
        return _dropout(graph, node, place)
    tensors = node.all_input_nodes
    if not tensors:
        place.move(node)
        return [node]
    if node.target not in _OF_SHAPES or tensors != [node.args[0]] or (empty := _empty(graph, tensors[0], place)) is None:
        return None
    node.args = (empty, *node.args[1:])
    place.move(node)
    return [empty, node]


def _dropout(graph: Graph, node: Node, place: _InsertionPoint) -> list[Node] | None:
    """Replaces a dropout by x * (mask / (1 - p)) and the mask, drawn as eager mode draws it. Returns the same as `_hoisted`.

    Source: ATen native/Dropout.cpp, _dropout (CPU) and native/cuda/Dropout.cu (CUDA)
    """
    x, p, train = (*node.args, None)[:3]
    if train is False or p in (0, 1):  # nothing is drawn
        keep = train is False or p == 0
        with graph.inserting_before(node):
            out = _call(graph, aten.mul.Scalar, x, int(keep))
            mask = _call(graph, aten.full_like.default, x, keep, dtype=torch.bool)
        _replace(graph, node, (out, mask))
        return []
    empty = _empty(graph, x, place)
    if empty is None:
        return None
    if x.meta["val"].device.type == "cpu":
        mask = place.call(aten.bernoulli_.float, empty, 1 - p)  # bernoulli.p would draw for the elements in another order
        drawn = [empty, mask]
        with graph.inserting_before(node):
            scaled = _call(graph, aten.div.Scalar, mask, 1 - p)
            mask = _call(graph, aten._to_copy.default, mask, dtype=torch.bool)
    else:
        pair = place.call(aten.native_dropout.default, empty, p, True)
        mask = place.call(operator.getitem, pair, 1)
        drawn = [empty, pair, mask]
        with graph.inserting_before(node):
            scaled = _call(graph, aten.mul.Scalar, _call(graph, aten._to_copy.default, mask, dtype=x.meta["val"].dtype), 1 / (1 - p))
    with graph.inserting_before(node):
        out = _call(graph, aten.mul.Tensor, x, scaled)
    _replace(graph, node, (out, mask))
    return drawn


def _replace(graph: Graph, node: Node, results: tuple[Node, ...]) -> None:
    """Replaces a node with several results by a node for each result, and erases it."""
    for user in list(node.users):
        user.replace_all_uses_with(results[user.args[1]])
        graph.erase_node(user)
    graph.erase_node(node)


def _empty(graph: Graph, like: Node, place: _InsertionPoint) -> Node | None:
    """Adds an empty tensor like a node's at the insertion point; returns None if its sizes or strides are not known there."""
    value = like.meta["val"]
    numbers = [_number(graph, item) for item in (*value.shape, *value.stride())]
    if any(item is None for item in numbers):
        return None
    sizes, strides, settings = numbers[: value.dim()], numbers[value.dim() :], {"dtype": value.dtype, "device": value.device}
    with detect_fake_mode(value):
        looks = torch.empty_strided(value.shape, value.stride(), **settings)
    return place.call(aten.empty_strided.default, sizes, strides, **settings, like=looks)


def _number(graph: Graph, number: int | torch.SymInt) -> int | Node | None:
    """Returns a size as an int or as the graph input that holds it; None if no input does."""
    if isinstance(number, int):
        return number
    return next((node for node in graph.nodes if node.op == "placeholder" and _is_same(node.meta["val"], number)), None)


def _is_same(value: Any, number: torch.SymInt) -> bool:
    return isinstance(value, torch.SymInt) and bool(value.node.expr == number.node.expr)


def _call(graph: Graph, op: Any, *args: Any, like: torch.Tensor | None = None, **kwargs: Any) -> Node:
    """Adds the call of an op, with its fake value. like: that value, if the caller knows it."""
    node = graph.call_function(op, args, kwargs)
    if like is not None:
        node.meta["val"] = like
        return node
    values = torch.fx.node.map_arg((args, kwargs), lambda source: source.meta["val"])
    with detect_fake_mode(values):
        node.meta["val"] = op(*values[0], **values[1])
    return node
