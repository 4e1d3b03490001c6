"""Splits off the part of an inference graph that depends only on parameters and buffers, so that it is computed once, not at every call."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ...capture.graph import copy_graph
from ...lowering.asynchronous import is_asynchronous
from ...lowering.graphs import is_view
from ...torch_ops import aten
from .split import GraphPart, part_of


@dataclass(frozen=True)
class Frozen:
    """A graph in two parts.

    Attributes:
        module: the whole graph, with batch norms folded.
        prepared: the part that depends only on parameters and buffers.
        rest: the remaining part. The outputs of `prepared` are among its inputs.
        packed: True if `pack` has packed any weights.
    """

    module: GraphModule
    prepared: GraphPart
    rest: GraphPart
    packed: bool


Pack = Callable[[Graph, Collection[Node]], bool]


def freeze(module: GraphModule, static_inputs: Sequence[int], pack: Pack = lambda graph, fixed: False) -> Frozen | None:
    """Splits a graph in two parts; returns None if nothing can be prepared. The module itself is not changed.

    Only computations on parameters and buffers become part of `prepared`. Views stay in place, since they cost nothing, and so do values
    that the graph returns, since the caller may write to them.

    Args:
        module: the graph.
        static_inputs: the positions of parameters and buffers among the inputs.
        pack: changes a graph so that it reads weights in another memory order, and returns True if it packed any. Its second argument has
            the parameters, the buffers and the nodes that depend only on them.
    """
    module = copy_graph(module)
    graph = module.graph
    placeholders = graph.find_nodes(op="placeholder")
    static = {placeholders[position] for position in static_inputs}
    fold_batch_norms(graph, static)
    packed = pack(graph, static | _decided(graph, static))
    returned = _returned(graph)
    decided = _decided(graph, static) - returned
    # A view is prepared only as an operand of a computation.
    wanted = {node for node in decided if not is_view(node)}
    for node in reversed(graph.nodes):
        if node in wanted:
            wanted.update(source for source in node.all_input_nodes if source.op == "call_function")
    if not wanted:
        return None
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    # Returned values and views are computed in both parts if both need them.
    shared = {node for node in wanted if node in returned or is_view(node)}
    rest = part_of(module, _needed([node for node in nodes if node not in wanted or node in shared], shared - returned))
    read = set(rest.inputs)
    prepared = part_of(module, [node for node in nodes if node in wanted], [node for node in nodes if node in wanted & read])
    return Frozen(module, prepared, rest, packed)


def _needed(nodes: Sequence[Node], optional: Collection[Node]) -> list[Node]:
    """Returns the nodes, less those in `optional` that no other node needs."""
    needed = {node for node in nodes if node not in optional}
    for node in reversed(nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
    return [node for node in nodes if node in needed]


def _decided(graph: Graph, static: Collection[Node]) -> set[Node]:
    """Returns the nodes that depend only on parameters, buffers and constants, without random numbers or side effects.

    Nodes that depend only on constants are not among them.
    """
    decided: set[Node] = set()
    constant: set[Node] = set()
    for node in graph.nodes:
        sources = node.all_input_nodes
        if node.op == "get_attr":
            constant.add(node)
        if node.op != "call_function" or not all(source in static or source in decided or source in constant for source in sources):
            continue
        op = node.target
        if isinstance(op, torch._ops.OpOverload) and (
            torch.Tag.nondeterministic_seeded in op.tags or not op._schema.returns or op._schema.is_mutable
        ):
            continue
        if isinstance(op, torch._ops.HigherOrderOperator) or not _is_tensor(node) or is_asynchronous(node):
            continue
        (decided if any(source in static or source in decided for source in sources) else constant).add(node)
    return decided


def _is_tensor(node: Node) -> bool:
    """True if all results of a node are tensors."""
    value = node.meta.get("val")
    return all(isinstance(item, torch.Tensor) for item in (value if isinstance(value, (tuple, list)) else [value]))


def _returned(graph: Graph) -> set[Node]:
    """Returns the nodes that the graph returns or that may share memory with a returned value."""
    output = graph.output_node()
    found = set(output.all_input_nodes)
    for node in reversed(graph.nodes):
        if node in found and (node.target is operator.getitem or is_view(node)):
            found.update(node.all_input_nodes)
    return found


def fold_batch_norms(graph: Graph, static: Collection[Node]) -> None:
    """Folds batch norms into convolutions that have no other consumer, by scaling weight and bias, which must be parameters.

    Source: Jacob et al., Quantization and Training of Neural Networks (arXiv:1712.05877), section 3.2.
    """
    for norm in list(graph.nodes):
        if norm.target is not aten._native_batch_norm_legit_no_training.default:
            continue
        convolution, *statistics = norm.args[:5]
        if convolution.target is not aten.convolution.default or len(convolution.users) > 1:
            continue
        if not _plain(convolution.args[1], static) or not all(item is None or _plain(item, static) for item in statistics):
            continue
        if convolution.args[2] is not None and not _plain(convolution.args[2], static):
            continue
        if any(user.args[1] != 0 for user in norm.users) or any(item is not None and item.meta["val"].dim() != 1 for item in statistics):
            continue
        _fold(graph, convolution, norm)


def copy_weights(graph: Graph, fixed: Collection[Node]) -> bool:
    """Makes convolutions read copies of row-major parameters, since a program can choose the memory order of a copy.

    Pointwise (1x1) kernels get no copy: for them the order makes no difference.

    fixed: parameters, buffers, and the nodes that depend only on them.
    Returns: False, since no weight is packed.
    """
    copies: dict[Node, Node] = {}
    for node in graph.find_nodes(op="call_function", target=aten.convolution.default):
        weight = node.args[1]
        if weight.op != "placeholder" or weight not in fixed:
            continue
        value = weight.meta["val"]
        if not all(type(size) is int for size in value.shape) or math.prod(value.shape[2:]) == 1 or not value.is_contiguous():
            continue
        if weight not in copies:
            with graph.inserting_before(node):
                copies[weight] = graph.call_function(aten.clone.default, (weight,))
            copies[weight].meta["val"] = value.clone()
        node.args = (node.args[0], copies[weight], *node.args[2:])
    return False


def _plain(node: Node, static: Collection[Node]) -> bool:
    """True for a parameter or buffer, or one cast to another dtype, as autocast does."""
    return node in static or (node.target is aten._to_copy.default and node.args[0] in static)


def _fold(graph: Graph, convolution: Node, norm: Node) -> None:
    x, weight, bias, *settings = convolution.args
    _, gamma, beta, mean, variance, _, epsilon = norm.args
    transposed, groups = settings[3], settings[5]
    dtype, shape = weight.meta["val"].dtype, weight.meta["val"].shape
    wide = dtype if dtype in (torch.float32, torch.float64) else torch.float32

    def call(op: Any, *args: Any, **kwargs: Any) -> Node:
        with graph.inserting_before(convolution):
            node = graph.call_function(op, args, kwargs)
        values = torch.fx.node.map_arg((args, kwargs), lambda source: source.meta["val"])
        with weight.meta["val"].fake_mode:
            node.meta["val"] = op(*values[0], **values[1])
        return node

    def widened(node: Node) -> Node:
        return node if node.meta["val"].dtype == wide else call(aten._to_copy.default, node, dtype=wide)

    scale = call(aten.rsqrt.default, call(aten.add.Scalar, widened(variance), epsilon))
    if gamma is not None:
        scale = call(aten.mul.Tensor, scale, widened(gamma))
    shift = call(aten.mul.Tensor, call(aten.neg.default, widened(mean)), scale)
    if bias is not None:
        shift = call(aten.add.Tensor, shift, call(aten.mul.Tensor, widened(bias), scale))
    if beta is not None:
        shift = call(aten.add.Tensor, shift, widened(beta))
    if transposed:
        # (in, out / groups, ...): each group of inputs has the scales of its own outputs.
        spread = call(aten.view.default, scale, [groups, 1, shape[1], *[1] * (len(shape) - 2)])
        grouped = call(aten.view.default, widened(weight), [groups, shape[0] // groups, *shape[1:]])
        scaled = call(aten.view.default, call(aten.mul.Tensor, grouped, spread), list(shape))
    else:
        scaled = call(aten.mul.Tensor, widened(weight), call(aten.view.default, scale, [shape[0], *[1] * (len(shape) - 1)]))
    if dtype != wide:
        scaled, shift = (call(aten._to_copy.default, node, dtype=dtype) for node in (scaled, shift))
    convolution.args = (x, scaled, shift, *settings)
    for user in list(norm.users):
        user.replace_all_uses_with(convolution)
        graph.erase_node(user)
    graph.erase_node(norm)
