"""Makes consumers of a view of a written input read the value that was written to this view, instead of a view of the whole new input.

For example, a key/value cache `c` has the keys of all layers. The first layer writes its keys, `c' = select_scatter(c, keys', 0, 0)`, and
attention reads `select(c', 0, 0)`, which is keys'. For the next layer, `select(c', 0, 1)` is `select(c, 0, 1)`. Without this pass, each
layer would copy the whole cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.fx import Graph, Node

from ...torch_ops import aten
from .write_chains import WrittenView, add_view, reads_through_writes

# Ops that address elements by their offset in the operand's memory.
_MEMORY_ADDRESSING_OPS = (aten.as_strided.default, aten.as_strided_copy.default, aten.as_strided_scatter.default)


def read_written_values(graph: Graph, copies: Mapping[Node, Node], states: Mapping[Node, WrittenView]) -> None:
    """Replaces each use of a view of a written input by the first node with the same value.

    Args:
        graph: the graph to change: a copy of the original graph, without an output node.
        copies: from the nodes of the original graph to their copies in `graph`.
        states: the states of nodes of the original graph, in the order of the graph.
    """
    first: dict[Any, Node] = {}
    for node, state in states.items():
        copy, key = copies[node], (state.source, state.visible_writes, state.view.specs[-1])
        equal_node = first.get(key)
        if reads_through_writes(node):
            if equal_node is None and not state.visible_writes:
                with graph.inserting_before(copy):
                    equal_node = add_view(graph, state.view, state.source, copies)
            if equal_node is not None:
                for user in [user for user in copy.users if user.target not in _MEMORY_ADDRESSING_OPS]:
                    user.replace_input_with(copy, equal_node)
        first.setdefault(key, equal_node or copy)
