"""Moves random ops to the start of a graph, where torch runs them with its own generator, as in eager mode (option exact_rng)."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch.fx import Graph, GraphModule, Node

from ...capture.graph import add_call, copy_graph
from ...lowering.interpreter import draws_random
from ...torch_ops import aten

# Random ops that read only the sizes, strides and dtype of their operand, not its elements.
_DRAWS_BY_SHAPE = (
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
    """Returns a copy of the graph with its random ops moved to the start, and the nodes that torch must run.

    Random ops keep their order, since the random numbers depend on the order. An op that reads values, such as `multinomial`, is not moved.
    """
    module = copy_graph(module)
    graph = module.graph
    insertion_point = _InsertionPoint(graph)
    run_by_torch: set[Node] = set()
    for node in list(graph.nodes):
        if draws_random(node):
            hoisted = _hoist_node(graph, node, insertion_point)
            if hoisted is None:
                insertion_point.last = node
                hoisted = [node]
            run_by_torch.update(hoisted)
    graph.lint()
    module.recompile()
    return module, run_by_torch


class _InsertionPoint:
    """The insertion point for random ops: after the inputs and all random ops so far.

    Attributes:
        last: the node before the insertion point; None for the graph's start.
    """

    def __init__(self, graph: Graph) -> None:
        inputs = graph.find_nodes(op="placeholder")
        self.last: Node | None = inputs[-1] if inputs else None
        self._graph = graph

    def call(self, op: Any, *args: Any, **kwargs: Any) -> Node:
        """Inserts the call of an op, and moves the insertion point behind the call."""
        with self._graph.inserting_before(None) if self.last is None else self._graph.inserting_after(self.last):
            self.last = add_call(self._graph, op, *args, **kwargs)
        return self.last

    def move(self, node: Node) -> None:
        """Moves a node to the insertion point, and moves the insertion point behind the node."""
        first = next(iter(self._graph.nodes))
        if self.last is None and node is not first:
            first.prepend(node)
        elif self.last is not None and node is not self.last:
            self.last.append(node)
        self.last = node


def _hoist_node(graph: Graph, node: Node, insertion_point: _InsertionPoint) -> list[Node] | None:
    """Moves a random op to the insertion point, and returns the moved and added nodes, which torch must run.

    Returns None, and changes nothing, if the op reads the elements of a tensor, or a symbolic size that is not an input.
    """
    if node.target is aten.native_dropout.default:
        return _hoist_dropout(graph, node, insertion_point)
    tensors = node.all_input_nodes
    if not tensors:
        insertion_point.move(node)
        return [node]
    if (
        node.target not in _DRAWS_BY_SHAPE
        or tensors != [node.args[0]]
        or (empty := _add_empty_like(graph, tensors[0], insertion_point)) is None
    ):
        return None
    node.args = (empty, *node.args[1:])
    insertion_point.move(node)
    return [empty, node]


def _hoist_dropout(graph: Graph, node: Node, insertion_point: _InsertionPoint) -> list[Node] | None:
    """Replaces a dropout by x * (mask / (1 - p)) and the mask. The mask has eager mode's random numbers. Returns: as `_hoist_node`.

    Source: ATen native/Dropout.cpp, _dropout (CPU), and native/cuda/Dropout.cu (CUDA).
    """
    x, p, train = (*node.args, None)[:3]
    if train is False or p in (0, 1):  # eager mode draws no random numbers
        keeps_all = train is False or p == 0
        with graph.inserting_before(node):
            out = add_call(graph, aten.mul.Scalar, x, int(keeps_all))
            mask = add_call(graph, aten.full_like.default, x, keeps_all, dtype=torch.bool)
        _replace(graph, node, (out, mask))
        return []
    empty = _add_empty_like(graph, x, insertion_point)
    if empty is None:
        return None
    if x.meta["val"].device.type == "cpu":
        mask = insertion_point.call(aten.bernoulli_.float, empty, 1 - p)  # bernoulli.p would fill the elements in another order
        drawn = [empty, mask]
        with graph.inserting_before(node):
            scaled = add_call(graph, aten.div.Scalar, mask, 1 - p)
            mask = add_call(graph, aten._to_copy.default, mask, dtype=torch.bool)
    else:
        pair = insertion_point.call(aten.native_dropout.default, empty, p, True)
        mask = insertion_point.call(operator.getitem, pair, 1)
        drawn = [empty, pair, mask]
        with graph.inserting_before(node):
            scaled = add_call(graph, aten.mul.Scalar, add_call(graph, aten._to_copy.default, mask, dtype=x.meta["val"].dtype), 1 / (1 - p))
    with graph.inserting_before(node):
        out = add_call(graph, aten.mul.Tensor, x, scaled)
    _replace(graph, node, (out, mask))
    return drawn


def _replace(graph: Graph, node: Node, results: tuple[Node, ...]) -> None:
    """Replaces a node with several results by a node for each result."""
    for user in list(node.users):
        user.replace_all_uses_with(results[user.args[1]])
        graph.erase_node(user)
    graph.erase_node(node)


def _add_empty_like(graph: Graph, like: Node, insertion_point: _InsertionPoint) -> Node | None:
    """Adds an empty tensor with the shape, strides, dtype and device of the tensor of `like`, at the insertion point.

    Returns None if a size or stride is symbolic and is not an input.
    """
    value = like.meta["val"]
    numbers = [_size_argument(graph, item) for item in (*value.shape, *value.stride())]
    if any(item is None for item in numbers):
        return None
    sizes, strides, settings = numbers[: value.dim()], numbers[value.dim() :], {"dtype": value.dtype, "device": value.device}
    with detect_fake_mode(value):
        return insertion_point.call(aten.empty_strided.default, sizes, strides, **settings)


def _size_argument(graph: Graph, number: int | torch.SymInt) -> int | Node | None:
    """Returns a size or stride as an int, or as the graph's input with the symbolic value; None if there is no such input."""
    if isinstance(number, int):
        return number
    return next((node for node in graph.nodes if node.op == "placeholder" and _equals(node.meta["val"], number)), None)


def _equals(value: Any, number: torch.SymInt) -> bool:
    return isinstance(value, torch.SymInt) and bool(value.node.expr == number.node.expr)
