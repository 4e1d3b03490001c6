"""Finds the graphs for which torch's kernels and XLA programs are interchangeable, so that each call may use either of them.

Three kinds of graph are excluded:

- graphs that draw random numbers: torch and XLA draw different ones;
- graphs that return or take a value that an op saves for its gradient in its own format: a oneDNN workspace, a generator's state, or
  log-sum-exps whose dtype or padding only the kernel knows. If torch has run the forward graph, XLA must not run the backward graph, and
  vice versa;
- graphs with collectives: programs compare their collectives with those of other processes (runtime/collective_agreement.py), and kernels
  do not.
"""

from __future__ import annotations

import operator
from typing import Any, cast

import torch
from torch.fx import GraphModule, Node

from ..torch_ops import aten
from .asynchronous import is_collective
from .graphs import view_source
from .interpreter import draws_random, inner_graphs
from .keyed_random import keyed

# Ops that save results for their gradient in their own format, with the index of the first such result.
_SAVING_OPS = {
    aten._batch_norm_with_update_functional.default: 3,
    aten._cudnn_rnn.default: 3,
    aten._embedding_bag.default: 1,
    aten._embedding_bag_forward_only.default: 1,
    aten._scaled_dot_product_cudnn_attention.default: 1,
    aten._scaled_dot_product_efficient_attention.default: 1,
    aten._scaled_dot_product_flash_attention.default: 1,
    aten._scaled_dot_product_fused_attention_overrideable.default: 1,
    aten._thnn_fused_gru_cell.default: 1,
    aten._thnn_fused_lstm_cell.default: 2,
    aten.log_sigmoid_forward.default: 1,
    aten.mkldnn_rnn_layer.default: 3,
}
# The names of the gradient ops' arguments that receive these results.
#
# The log-sum-exps of attention on the CPU have a standard format, except in float64 before torch 2.13. So float64 is excluded for every
# version of torch.
_SAVED_ARGUMENTS = frozenset(
    {"bag_size", "buffer", "logsumexp", "maximum_indices", "offset2bag", "philox_seed", "reserve", "reserveSpace", "rng_state", "workspace"}
)
_CPU_ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu.default
_CPU_ATTENTION_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def is_interchangeable(module: GraphModule) -> bool:
    """True if torch and XLA give the same results for a graph, up to rounding.

    If the graph is a forward graph, the backward graph may then be run by either engine, whichever has run the forward graph.
    """
    for graph in (module, *inner_graphs(module)):
        nodes = list(graph.graph.nodes)
        if any(draws_random(node) or node.target is keyed or is_collective(node) for node in nodes):
            return False
        saved_results = {node for node in nodes if _is_saved_result(node)}
        saved_operands = [operand for node in nodes for operand in _saved_operands(node)]
        if any(_origin(node) in saved_results for node in graph.graph.output_node().all_input_nodes):
            return False
        if any(_origin(operand) not in saved_results for operand in saved_operands):
            return False
    return True


def _origin(node: Node) -> Node:
    """Returns the node whose memory a node's value is a view of, or the node itself."""
    while (source := view_source(node)) is not None:
        node = source
    return node


def _is_saved_result(node: Node) -> bool:
    """True if a node is a result that an op saves for its gradient in its own format."""
    if node.target is not operator.getitem or not isinstance(producer := node.args[0], Node):
        return False
    target: Any = producer.target
    first = 1 if _is_float64_cpu_attention(producer) else _SAVING_OPS.get(target)
    return first is not None and cast(int, node.args[1]) >= first


def _saved_operands(node: Node) -> list[Node]:
    """Returns the operands of a gradient op that the forward op saved in its own format."""
    op: Any = node.target
    if not isinstance(op, torch._ops.OpOverload) or op.namespace != "aten":
        return []
    if op is _CPU_ATTENTION_BACKWARD and not _is_float64_cpu_attention(node):
        return []
    named = {**dict(zip((argument.name for argument in op._schema.arguments), node.args, strict=False)), **node.kwargs}
    return [value for name, value in named.items() if name in _SAVED_ARGUMENTS and isinstance(value, Node)]


def _is_float64_cpu_attention(node: Node) -> bool:
    return node.target in (_CPU_ATTENTION, _CPU_ATTENTION_BACKWARD) and _dtype(node.args[0]) == torch.float64


def _dtype(node: Any) -> torch.dtype | None:
    value = node.meta.get("val") if isinstance(node, Node) else None
    return value.dtype if isinstance(value, torch.Tensor) else None
