"""Removes the tokens of linear-algebra checks from graphs that become JAX functions.

AOTAutograd and torch.export keep `aten._linalg_check_errors`, whose result nothing reads, by a token that the graph takes and returns
(`with_effects`). A JAX function has no such operand: a lowered check is part of its program in any case.
"""

from __future__ import annotations

import operator

from torch.fx import Graph, Node

from ..lowering.interpreter import with_effects
from ..torch_ops import aten


def remove_tokens_of_checks(graph: Graph) -> None:
    """Replaces checks with a token by checks without one. Tokens that only checks pass on are no longer inputs and outputs of the graph."""
    first_tokens: dict[Node, None] = {}
    for node in graph.find_nodes(op="call_function", target=with_effects):
        token, op, *args = node.args
        if op is not aten._linalg_check_errors.default:
            continue
        with graph.inserting_before(node):
            check = graph.call_function(op, tuple(args), node.kwargs)
        check.meta = {**node.meta, "val": None}
        for next_token in list(node.users):
            assert next_token.target is operator.getitem, next_token
            next_token.replace_all_uses_with(token)
            graph.erase_node(next_token)
        graph.erase_node(node)
        if token.op == "placeholder":
            first_tokens[token] = None
    output = graph.output_node()
    for token in first_tokens:
        if set(token.users) <= {output}:
            output.args = ([item for item in output.args[0] if item is not token],)
            graph.erase_node(token)


def token_count(graph: Graph) -> int:
    """Returns the number of tokens that a graph takes before its other inputs."""
    tokens = {node.args[0] for node in graph.find_nodes(op="call_function", target=with_effects)}
    return sum(node in tokens for node in graph.find_nodes(op="placeholder"))
