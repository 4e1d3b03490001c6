"""Splits off the part of an inference graph that depends only on parameters and buffers: it runs once, and not at every call."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ...capture.graph import add_call, copy_graph
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
        rest: the other part. The outputs of `prepared` are among the inputs of `rest`.
    """

    module: GraphModule
    prepared: GraphPart
    rest: GraphPart


def freeze(module: GraphModule, static_inputs: Sequence[int], *, copy_weights: bool) -> Frozen | None:
    """Splits a copy of a graph in two parts. Returns None if no computation depends only on parameters and buffers.

    Views are computed in `rest`, since they cost nothing. Values that the graph returns are computed in `rest`, too, since the caller may
    write to these values.

    Args:
        module: the graph.
        static_inputs: the positions of parameters and buffers among the inputs.
        copy_weights: True if convolutions read copies of row-major parameters, since XLA can choose the memory order of a copy.
    """
    module = copy_graph(module)
    graph = module.graph
    placeholders = graph.find_nodes(op="placeholder")
    static = {placeholders[position] for position in static_inputs}
    fold_batch_norms(graph, static)
    if copy_weights:
        _copy_weights(graph, static)
    returned = _returned_nodes(graph)
    fixed = _fixed_nodes(graph, static) - returned
    # A view is part of `prepared` only if a computation in `prepared` reads the view.
    prepared_nodes = {node for node in fixed if not is_view(node)}
    for node in reversed(graph.nodes):
        if node in prepared_nodes:
            prepared_nodes.update(source for source in node.all_input_nodes if source.op == "call_function")
    if not prepared_nodes:
        return None
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    # Returned values and views are computed in both parts if both parts need them.
    shared = {node for node in prepared_nodes if node in returned or is_view(node)}
    rest = part_of(module, _without_unused([node for node in nodes if node not in prepared_nodes or node in shared], shared - returned))
    read = set(rest.inputs)
    prepared = part_of(
        module, [node for node in nodes if node in prepared_nodes], [node for node in nodes if node in prepared_nodes & read]
    )
    return Frozen(module, prepared, rest)


def _without_unused(nodes: Sequence[Node], optional: Collection[Node]) -> list[Node]:
    """Returns `nodes` without the `optional` nodes that no other node in `nodes` needs."""
    needed = {node for node in nodes if node not in optional}
    for node in reversed(nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
    return [node for node in nodes if node in needed]


def _fixed_nodes(graph: Graph, static: Collection[Node]) -> set[Node]:
    """Returns the nodes whose results are tensors that depend only on parameters, buffers and constants, at least one of these no constant.

    Random ops and ops with side effects are left out.
    """
    fixed: set[Node] = set()
    constant: set[Node] = set()
    for node in graph.nodes:
        sources = node.all_input_nodes
        if node.op == "get_attr":
            constant.add(node)
        if node.op != "call_function" or not all(source in static or source in fixed or source in constant for source in sources):
            continue
        op = node.target
        if isinstance(op, torch._ops.OpOverload) and (
            torch.Tag.nondeterministic_seeded in op.tags or not op._schema.returns or op._schema.is_mutable
        ):
            continue
        if isinstance(op, torch._ops.HigherOrderOperator) or not _is_tensor(node) or is_asynchronous(node):
            continue
        (fixed if any(source in static or source in fixed for source in sources) else constant).add(node)
    return fixed


def _is_tensor(node: Node) -> bool:
    """True if all results of a node are tensors."""
    value = node.meta.get("val")
    return all(isinstance(item, torch.Tensor) for item in (value if isinstance(value, (tuple, list)) else [value]))


def _returned_nodes(graph: Graph) -> set[Node]:
    """Returns the nodes whose values the graph returns, and the nodes of which returned values are views or tuple items."""
    returned = set(graph.output_node().all_input_nodes)
    for node in reversed(graph.nodes):
        if node in returned and (node.target is operator.getitem or is_view(node)):
            returned.update(node.all_input_nodes)
    return returned


def fold_batch_norms(graph: Graph, static: Collection[Node]) -> None:
    """Folds each batch norm into its convolution, by scaling the convolution's weight and bias.

    Weight, bias and statistics must be parameters or buffers, and the batch norm must be the only consumer of the convolution.

    Source: Jacob et al., Quantization and Training of Neural Networks (arXiv:1712.05877), section 3.2.
    """
    for norm in list(graph.nodes):
        if norm.target is not aten._native_batch_norm_legit_no_training.default:
            continue
        convolution, *statistics = norm.args[:5]
        if convolution.target is not aten.convolution.default or len(convolution.users) > 1:
            continue
        if not _is_parameter(convolution.args[1], static) or not all(item is None or _is_parameter(item, static) for item in statistics):
            continue
        if convolution.args[2] is not None and not _is_parameter(convolution.args[2], static):
            continue
        if any(user.args[1] != 0 for user in norm.users) or any(item is not None and item.meta["val"].dim() != 1 for item in statistics):
            continue
        _fold_into_convolution(graph, convolution, norm)


def _copy_weights(graph: Graph, static: Collection[Node]) -> None:
    """Makes convolutions read copies of row-major parameters (among the inputs `static`).

    The weights of pointwise (1x1) convolutions are not copied: their memory order makes no difference.
    """
    copies: dict[Node, Node] = {}
    for node in graph.find_nodes(op="call_function", target=aten.convolution.default):
        weight = node.args[1]
        if weight.op != "placeholder" or weight not in static:
            continue
        value = weight.meta["val"]
        if not all(type(size) is int for size in value.shape) or math.prod(value.shape[2:]) == 1 or not value.is_contiguous():
            continue
        if weight not in copies:
            with graph.inserting_before(node):
                copies[weight] = graph.call_function(aten.clone.default, (weight,))
            copies[weight].meta["val"] = value.clone()
        node.args = (node.args[0], copies[weight], *node.args[2:])


def _is_parameter(node: Node, static: Collection[Node]) -> bool:
    """True for a parameter or buffer, and for a parameter or buffer that is cast to another dtype, as by autocast."""
    return node in static or (node.target is aten._to_copy.default and node.args[0] in static)


def _fold_into_convolution(graph: Graph, convolution: Node, norm: Node) -> None:
    x, weight, bias, *settings = convolution.args
    _, gamma, beta, mean, variance, _, epsilon = norm.args
    transposed, groups = settings[3], settings[5]
    dtype, shape = weight.meta["val"].dtype, weight.meta["val"].shape
    compute_dtype = dtype if dtype in (torch.float32, torch.float64) else torch.float32

    def add_op(op: Any, *args: Any, **kwargs: Any) -> Node:
        with graph.inserting_before(convolution):
            return add_call(graph, op, *args, **kwargs)

    def upcast(node: Node) -> Node:
        return node if node.meta["val"].dtype == compute_dtype else add_op(aten._to_copy.default, node, dtype=compute_dtype)

    scale = add_op(aten.rsqrt.default, add_op(aten.add.Scalar, upcast(variance), epsilon))
    if gamma is not None:
        scale = add_op(aten.mul.Tensor, scale, upcast(gamma))
    shift = add_op(aten.mul.Tensor, add_op(aten.neg.default, upcast(mean)), scale)
    if bias is not None:
        shift = add_op(aten.add.Tensor, shift, add_op(aten.mul.Tensor, upcast(bias), scale))
    if beta is not None:
        shift = add_op(aten.add.Tensor, shift, upcast(beta))
    if transposed:
        # The shape is (in, out / groups, ...): the weights of a group of inputs get the scales of the group's outputs.
        group_scales = add_op(aten.view.default, scale, [groups, 1, shape[1], *[1] * (len(shape) - 2)])
        grouped = add_op(aten.view.default, upcast(weight), [groups, shape[0] // groups, *shape[1:]])
        scaled = add_op(aten.view.default, add_op(aten.mul.Tensor, grouped, group_scales), list(shape))
    else:
        scaled = add_op(aten.mul.Tensor, upcast(weight), add_op(aten.view.default, scale, [shape[0], *[1] * (len(shape) - 1)]))
    if dtype != compute_dtype:
        scaled, shift = (add_op(aten._to_copy.default, node, dtype=dtype) for node in (scaled, shift))
    convolution.args = (x, scaled, shift, *settings)
    for user in list(norm.users):
        user.replace_all_uses_with(convolution)
        graph.erase_node(user)
    graph.erase_node(norm)
