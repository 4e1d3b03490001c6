"""Makes consumers of a view of a changed input read the value that was written to this view, instead of a view of the whole new input.

A key/value cache of all layers is an example. The first layer writes its keys, `c' = select_scatter(c, keys', 0, 0)`, and attention reads
`select(c', 0, 0)`, which is keys'. For the next layer, `select(c', 0, 1)` is `select(c, 0, 1)`. Without this pass, each layer would copy
the whole cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.fx import Graph, Node

from ...torch_ops import aten
from .write_chains import WrittenView, reads_through_writes, viewed_at

# Ops that address elements by their offset in the operand's memory.
_BY_MEMORY = (aten.as_strided.default, aten.as_strided_copy.default, aten.as_strided_scatter.default)


def read_places(graph: Graph, copies: Mapping[Node, Node], states: Mapping[Node, WrittenView]) -> None:
    """Replaces each use of a view of a changed input by the first node with the same value.

    Args:
        graph: the graph to change: a copy of the original graph, without an output node.
        copies: from the nodes of the original graph to their copies in `graph`.
        states: the states of nodes of the original graph, in the order of the graph.
    """
    first: dict[Any, Node] = {}
    for node, state in states.items():
        copy, key = copies[node], (state.source, state.seen, state.place.specs[-1])
        same = first.get(key)
        if reads_through_writes(node):
            if same is None and not state.seen:
                with graph.inserting_before(copy):
                    same = viewed_at(graph, state.place, state.source, copies)
            if same is not None:
                for user in [user for user in copy.users if user.target not in _BY_MEMORY]:
                    user.replace_input_with(copy, same)
        first.setdefault(key, same or copy)
