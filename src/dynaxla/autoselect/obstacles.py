"""Reasons why a graph, or a call of a graph, must not be run twice, and so no engines can compete for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.fx import GraphModule, Node

from .. import forks
from ..lowering.graphs import user_line
from ..runtime import private
from ..runtime.layout import ORDINARY
from ..torch_ops import passed_arguments

# Namespaces of ops without side effects, whose kernels belong to torch.
_PURE_NAMESPACES = ("aten", "prims", "quantized", "quantized_decomposed")
# Higher-order ops without side effects of their own. The graphs that they run are checked separately.
_PURE_HIGHER_ORDER_OPS = ("cond", "while_loop", "scan", "associative_scan", "map_impl", "flex_attention", "flex_attention_backward",
                          "invoke_subgraph", "tag_activation_checkpoint", "autograd_function_apply", "wrap_with_set_grad_enabled",
                          "wrap_with_autocast", "wrap_activation_checkpoint")  # fmt: skip
# Top-level modules whose functions TorchDynamo puts into graphs. Functions of other modules come from torch.compiler.allow_in_graph.
_TORCH_MODULES = ("torch", "_operator", "builtins", "math")
_DROPOUT_ARGUMENTS = ("dropout_p", "dropout")


def obstacle_in_dynamo_graph(module: GraphModule) -> str:
    """Returns the reason why a TorchDynamo graph must not be run twice; "" if there is none.

    Random functions such as torch.dropout are not found here, because they may draw nothing. `obstacle_in_aten_graph` finds random ops.
    """
    for node in _all_nodes(module):
        target = node.target
        if node.op == "call_module":
            if type(module.get_submodule(str(target))).__module__.partition(".")[0] != "torch":
                return _with_location(node, "the graph calls a module that is not part of torch")
        elif node.op == "call_function":
            if isinstance(target, (OpOverload, OpOverloadPacket, HigherOrderOperator)):
                if reason := _obstacle_of_op(node):
                    return _with_location(node, reason)
            elif str(getattr(target, "__module__", None) or "torch").partition(".")[0] not in _TORCH_MODULES:
                return _with_location(node, "the graph calls a function that is not part of torch")
    return ""


def obstacle_in_aten_graph(module: GraphModule) -> str:
    """Returns the reason why an ATen graph must not be run twice; "" if there is none."""
    for node in _all_nodes(module):
        if node.op == "call_function" and (reason := _obstacle_of_op(node)):
            return _with_location(node, reason)
    return ""


def _with_location(node: Node, reason: str) -> str:
    """Returns a reason with the node's target and the user's line."""
    line = user_line(node)
    return f"{reason}: {node.target}" + (f" at {line}" if line else "")


def _obstacle_of_op(node: Node) -> str:
    """Returns the reason why the op of a node must not be run twice; "" if there is none."""
    op = node.target
    if isinstance(op, HigherOrderOperator):
        return "" if op.name() in _PURE_HIGHER_ORDER_OPS else "the graph calls a higher-order op that may have side effects"
    if isinstance(op, OpOverloadPacket):
        namespace = str(op).partition(".")[0]
    elif isinstance(op, OpOverload):
        namespace = op.namespace
    else:
        return ""
    if "c10d" in namespace:
        return "the graph calls a collective"
    if namespace not in _PURE_NAMESPACES:
        return "the graph calls a custom op"
    if isinstance(op, OpOverload) and torch.Tag.nondeterministic_seeded in op.tags and not _has_zero_dropout(op, node):
        return "the graph draws random numbers"
    return ""


def _has_zero_dropout(op: OpOverload, node: Node) -> bool:
    """True if an op with a dropout argument, such as attention, is called with dropout probability 0."""
    defaults = {argument.name: argument.default_value for argument in op._schema.arguments if argument.name in _DROPOUT_ARGUMENTS}
    if not defaults:
        return False
    passed = passed_arguments(op, node.args, node.kwargs)
    return all(passed.get(name, default) == 0.0 for name, default in defaults.items())


def _all_nodes(module: GraphModule) -> Iterator[Node]:
    """Yields the nodes of a graph and of the graphs nested in it."""
    for part in module.modules():
        if isinstance(part, GraphModule):
            yield from part.graph.nodes


def call_must_run_once(args: Sequence[Any]) -> bool:
    """True if a call must not be repeated.

    That is so if a dispatch mode, hooks for saved tensors or a functorch transform would see the call's ops twice. It is also so if an
    input is neither a plain tensor nor a number nor None, and if the process was forked and cannot use XLA.
    """
    if private.mode_count() or private.saved_tensor_hooks() is not None or private.functorch_level() is not None or forks.has_lost_xla():
        return True
    return not all(isinstance(item, (bool, int, float, type(None))) or _is_plain(item) for item in args)


def _is_plain(item: Any) -> bool:
    """True for a strided tensor of an ordinary class that is not conjugated, negated or quantized."""
    return type(item) in ORDINARY and item.layout == torch.strided and not item.is_conj() and not item.is_neg() and not item.is_quantized
