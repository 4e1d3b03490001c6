"""Lets what reads a place of a changed input read what has been written there, where the rest of the input does not matter.

A cache of all layers is an example: the first layer's keys are written to their place, `c' = select_scatter(c, keys', 0, 0)`, and attention
reads `select(c', 0, 0)`. That is keys', and for the next layer `select(c', 0, 1)` is `select(c, 0, 1)`. Without this each layer would have
a copy made of all that the layers have in common.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.fx import Graph, Node

from ..torch_ops import aten
from .chains import State, reads_through_writes, viewed_at

# These read numbers by where they lie in memory, from wherever that of their operand begins.
_BY_MEMORY = (aten.as_strided.default, aten.as_strided_copy.default, aten.as_strided_scatter.default)


def read_places(graph: Graph, copies: Mapping[Node, Node], found: Mapping[Node, State]) -> None:
    """Let views of changed inputs be read from the first node with the same numbers. What the graph returns stays.

    copies: the nodes of `graph`, which has no output yet, for those of the graph that `found` is about (in the order of that graph).
    """
    first: dict[Any, Node] = {}
    for node, state in found.items():
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
