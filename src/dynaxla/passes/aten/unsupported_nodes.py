"""Finds the nodes of a graph that no XLA program can hold. torch runs them on its own tensors, between programs.

The reasons:

DATA_DEPENDENT     The node introduces a symbol that no earlier node has, or its op carries `Tag.data_dependent_output`: the symbol of an
              `.item()` may have occurred before, but the number is still read from a tensor.
ASYNCHRONOUS  The op works in the background or with handles: see `dynaxla.lowering.asynchronous`. A program can hold a collective that
              returns its result, but a graph that a control-flow op calls cannot: nothing orders the collectives of two such graphs.
WRITES        The op writes to an operand. A program would write to a copy. Functionalization removes all such ops from a graph, except for
              the writes of a backward pass to an input.
NOT_DENSE      A tensor that the node takes or returns is sparse or quantized.
GENERATOR_STATE         The node draws random numbers and saves or restores the state of torch's generator.
NO_LOWERING   Only torch's kernel computes the node, and a program on the graph's platform cannot call it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from ...capture.graph import called_subgraphs, is_array
from ...lowering.asynchronous import can_be_in_program, is_asynchronous, leaves
from ...lowering.fallback import mutates
from ...lowering.interpreter import needs_kernel
from ...torch_ops import aten
from ..joint.checkpointing import uses_saved_state

DATA_DEPENDENT = "a size or number that it returns depends on the values of a tensor"
ASYNCHRONOUS = "it is a collective, or it works with handles or in the background"
WRITES = "it writes to an operand"
NOT_DENSE = "it takes or returns a tensor that is not a dense array"
GENERATOR_STATE = "it saves or restores the state of torch's generator"
NO_LOWERING = "it has no lowering, and a program on this platform cannot call torch's kernel"


def unsupported_nodes(module: GraphModule, *, is_inner: bool = False) -> dict[Node, str]:
    """Returns the nodes of a graph that no program can hold, in the graph's order, each with the reason.

    is_inner: True if a control-flow op calls the graph.
    """
    found: dict[Node, str] = {}
    known_symbols: set[Any] = set()
    for node in module.graph.nodes:
        symbols = free_unbacked_symbols(node.meta.get("val"))
        if node.op == "call_function":
            if not symbols <= known_symbols or _has_tag(node, torch.Tag.data_dependent_output):
                found[node] = DATA_DEPENDENT
            elif is_asynchronous(node) and (is_inner or not can_be_in_program(node)):
                found[node] = ASYNCHRONOUS
            elif mutates(node.target):
                found[node] = WRITES
            elif not all(is_array(leaf) for leaf in leaves(node) if isinstance(leaf, torch.Tensor)):
                found[node] = NOT_DENSE
            elif uses_saved_state(node):
                found[node] = GENERATOR_STATE
            elif reasons := {reason for inner in called_subgraphs(node) for reason in unsupported_nodes(inner, is_inner=True).values()} - {
                DATA_DEPENDENT
            }:
                found[node] = min(reasons)
        known_symbols |= symbols
    return found


def nodes_without_lowering(module: GraphModule, platform: str) -> dict[Node, str]:
    """Returns the nodes with the reason NO_LOWERING on a platform, in the graph's order."""
    called = [node for node in module.graph.nodes if node.op == "call_function"]
    return {node: NO_LOWERING for node in called if needs_kernel(node, platform)}


def last_writes(module: GraphModule, found: dict[Node, str]) -> set[Node]:
    """Returns the copies to inputs at the end of a backward graph.

    found: the result of `unsupported_nodes`.
    """
    last: set[Node] = set()
    for node in reversed(module.graph.nodes):
        if node.op == "output":
            continue
        if node.target is not aten.copy_.default or found.get(node) != WRITES or node.args[0].op != "placeholder":
            break
        last.add(node)
    return last


def _has_tag(node: Node, tag: torch.Tag) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and tag in node.target.tags
