"""Finds graphs and calls that must not be run twice, with the reason."""

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

# Namespaces of ops that only compute, with torch's own kernels.
_NAMESPACES = ("aten", "prims", "quantized", "quantized_decomposed")
# Higher-order ops without side effects beyond those of their graphs.
_PURE = ("cond", "while_loop", "scan", "associative_scan", "map_impl", "flex_attention", "flex_attention_backward", "invoke_subgraph",
         "tag_activation_checkpoint", "autograd_function_apply", "wrap_with_set_grad_enabled", "wrap_with_autocast",
         "wrap_activation_checkpoint")  # fmt: skip
# Modules whose functions TorchDynamo puts into graphs. Functions of other modules are the user's (torch.compiler.allow_in_graph).
_KNOWN_MODULES = ("torch", "_operator", "builtins", "math")
_DROPOUTS = ("dropout_p", "dropout")


def in_captured(module: GraphModule) -> str:
    """Returns the reason why a TorchDynamo graph must not be run twice, or "". Random ops are found only in ATen graphs: see `in_aten`."""
    for node in _nodes(module):
        target = node.target
        if node.op == "call_module":
            if type(module.get_submodule(str(target))).__module__.partition(".")[0] != "torch":
                return _said(node, "it calls a module that is not torch's own")
        elif node.op == "call_function":
            if isinstance(target, (OpOverload, OpOverloadPacket, HigherOrderOperator)):
                if reason := _of_op(node):
                    return _said(node, reason)
            elif str(getattr(target, "__module__", None) or "torch").partition(".")[0] not in _KNOWN_MODULES:
                return _said(node, "it calls a function that is not torch's own")
    return ""


def in_aten(module: GraphModule) -> str:
    """Returns the reason why an ATen graph must not be run twice, or ""."""
    for node in _nodes(module):
        if node.op == "call_function" and (reason := _of_op(node)):
            return _said(node, reason)
    return ""


def _said(node: Node, reason: str) -> str:
    line = user_line(node)
    return f"{reason}: {node.target}" + (f" at {line}" if line else "")


def _of_op(node: Node) -> str:
    op = node.target
    if isinstance(op, HigherOrderOperator):
        return "" if op.name() in _PURE else "it may have effects outside the graph"
    if isinstance(op, OpOverloadPacket):
        space = str(op).partition(".")[0]
    elif isinstance(op, OpOverload):
        space = op.namespace
    else:
        return ""
    if "c10d" in space:
        return "it calls a collective"
    if space not in _NAMESPACES:
        return "it calls a custom op"
    if isinstance(op, OpOverload) and torch.Tag.nondeterministic_seeded in op.tags and not _drops_nothing(op, node):
        return "it draws random numbers"
    return ""


def _drops_nothing(op: OpOverload, node: Node) -> bool:
    """True if an op with a dropout argument, such as attention, is called with dropout probability 0."""
    arguments = {argument.name: argument.default_value for argument in op._schema.arguments if argument.name in _DROPOUTS}
    if not arguments:
        return False
    given = {argument.name: value for argument, value in zip(op._schema.arguments, node.args, strict=False)} | dict(node.kwargs)
    return all(given.get(name, default) == 0.0 for name, default in arguments.items())


def _nodes(module: GraphModule) -> Iterator[Node]:
    """Yields the nodes of a graph and of the graphs nested in it."""
    for part in module.modules():
        if isinstance(part, GraphModule):
            yield from part.graph.nodes


def now(args: Sequence[Any]) -> bool:
    """True if a call must not be repeated, since a mode or hooks watch its ops, or its inputs are not plain tensors."""
    if private.mode_count() or private.saved_tensor_hooks() is not None or private.functorch_level() is not None or forks.is_cut_off():
        return True
    return not all(isinstance(item, (bool, int, float, type(None))) or _is_plain(item) for item in args)


def _is_plain(item: Any) -> bool:
    return type(item) in ORDINARY and item.layout == torch.strided and not item.is_conj() and not item.is_neg() and not item.is_quantized
