"""Tests of passes/joint/regather.py: the nodes of a joint graph that the partitioner must recompute.

tests/cases/processes/fully_sharded.py runs such graphs.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from dynaxla.passes.joint.regather import regather_parameters

aten = torch.ops.aten
pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no collectives")


def placeholder(graph: Graph, name: str, position: int, wrapped: bool = False) -> Node:
    node = graph.placeholder(name)
    description = SimpleNamespace(idx=position)
    node.meta["desc"] = SimpleNamespace(base=description, attr="_local_tensor") if wrapped else description
    return node


def gathered(graph: Graph, node: Node) -> Node:
    gather = graph.call_function(torch.ops._c10d_functional.all_gather_into_tensor.default, (node, 2, "0"))
    return graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (gather,))


def tagged(graph: Graph, parameters: list[int]) -> set[str]:
    regather_parameters(GraphModule({}, graph), parameters)
    return {node.name.removesuffix("_default") for node in graph.nodes if node.meta.get("recompute") == CheckpointPolicy.MUST_RECOMPUTE}


@pytest.mark.parametrize("wrapped", [False, True])
def test_gathers_of_parameters_are_recomputed_with_their_casts_and_views(wrapped: bool) -> None:
    graph = Graph()
    weight, x = placeholder(graph, "weight", 0, wrapped), placeholder(graph, "x", 1)
    half = graph.call_function(aten._to_copy.default, (weight,), {"dtype": torch.bfloat16})
    gathered_weight = graph.call_function(aten.t.default, (gathered(graph, half),))
    product = graph.call_function(aten.mm.default, (gathered(graph, x), gathered_weight))
    other = graph.call_function(aten.mm.default, (gathered_weight, gathered_weight))
    graph.output((product, other, graph.call_function(aten.neg.default, (weight,))))
    assert tagged(graph, [0]) == {"_to_copy", "all_gather_into_tensor", "wait_tensor", "t"}


def test_users_policy_is_kept() -> None:
    graph = Graph()
    gathered_weight = gathered(graph, placeholder(graph, "weight", 0))
    gathered_weight.args[0].meta["recompute"] = CheckpointPolicy.MUST_SAVE  # type: ignore[union-attr]
    graph.output(gathered_weight)
    assert tagged(graph, [0]) == {"wait_tensor"}


def test_gathers_of_other_inputs_are_not_recomputed() -> None:
    graph = Graph()
    graph.output(gathered(graph, placeholder(graph, "x", 0)))
    assert tagged(graph, []) == set()
